from tally import config

from tests.check import equal, refused


def test_keys_are_found_in_their_section():
    text = "[worker]\nlimit = 4 * cores ; by calc\n[disk]\nfloor = 10\n"
    equal(config.parse(text), {"worker": {"limit": "4 * cores"}, "disk": {"floor": "10"}})


def test_a_value_may_hold_an_equals_sign():
    equal(config.parse("[build]\nflags = -DMODE=fast\n")["build"]["flags"], "-DMODE=fast")


def test_a_line_without_a_value_is_named():
    message = refused(config.ConfigError, config.parse, "[build]\nflags\n")
    equal(message, "line 2: no value for 'flags'")


def test_a_section_named_twice_keeps_both():
    text = "[a]\nx = 1\n[b]\ny = 2\n[a]\nz = 3\n"
    equal(config.parse(text)["a"], {"x": "1", "z": "3"})


def test_an_empty_list_is_empty():
    equal(config.get_list({}, "hosts"), [])
    equal(config.get_list({"hosts": "a, b"}, "hosts"), ["a", "b"])
