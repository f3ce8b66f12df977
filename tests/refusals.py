"""Calls that are refused with one sentence: a line for each, or a table of them that a test goes through."""

import pytest


def refuses(message, function, *args, error=ValueError, **kwargs):
    """Assert that the call raises this error, with a message that matches."""
    with pytest.raises(error, match=message):
        function(*args, **kwargs)


def refusals(rows):
    """Run a test with `refused` for each row (call, message), or (call, message, error) if it is no ValueError.

    `refused(*given)` asserts that the call is refused with what is given. If the row has, in place of a call, the
    arguments that are wrong, `refused(function, **right)` asserts it of the function, whose other ones are right.
    """

    def case(what, message, error=ValueError):
        def refused(*given, **right):
            if callable(what):
                refuses(message, what, *given, error=error)
            else:
                refuses(message, given[0], *given[1:], error=error, **right | what)

        return refused

    def mark(test):
        return pytest.mark.bad_input(pytest.mark.parametrize("refused", [case(*row) for row in rows])(test))

    return mark
