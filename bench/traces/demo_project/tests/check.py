"""What a test says: `equal(got, wanted)`, `refused(error, call, …)`."""


class Failed(Exception):
    """A test's expectation does not hold."""


def equal(got, wanted):
    if got != wanted:
        raise Failed(f"got {got!r}, wanted {wanted!r}")


def refused(error, call, *arguments):
    """`call(*arguments)` raises `error`; the message is returned."""
    try:
        got = call(*arguments)
    except error as raised:
        return str(raised)
    raise Failed(f"{call.__name__}({', '.join(map(repr, arguments))}) gave {got!r}, wanted {error.__name__}")
