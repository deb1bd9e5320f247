from tally.calc import CalcError, evaluate

from tests.check import equal, refused


def test_products_before_sums():
    equal(evaluate("2 + 3 * 4"), 14)


def test_names_are_looked_up():
    equal(evaluate("4 * cores", {"cores": 8}), 32)


def test_powers_group_to_the_right():
    equal(evaluate("2 ^ 3 ^ 2"), 512)


def test_a_power_binds_tighter_than_a_minus():
    equal(evaluate("-2 ^ 2"), -4)
    equal(evaluate("2 ^ -1"), 0.5)


def test_a_missing_bracket_is_an_error():
    refused(CalcError, evaluate, "(1 + 2")
    refused(CalcError, evaluate, "(1 + 2]")


def test_dividing_by_zero_is_an_error_of_ours():
    refused(CalcError, evaluate, "1 / 0")
