from tally import durations

from tests.check import equal, refused


def test_parts_add_up():
    equal(durations.parse("1h30m"), 5400)


def test_spaces_between_parts_are_fine():
    equal(durations.parse("1h 30m"), 5400)


def test_words_are_refused():
    refused(ValueError, durations.parse, "fast")


def test_a_number_without_a_unit_is_refused():
    refused(ValueError, durations.parse, "10")
    refused(ValueError, durations.parse, "")


def test_parts_of_nothing_are_left_out():
    equal(durations.show(5400), "1h30m")
    equal(durations.show(3600), "1h")


def test_zero_is_shown():
    equal(durations.show(0), "0s")


def test_days_are_read():
    equal(durations.parse("2d"), 172800)
