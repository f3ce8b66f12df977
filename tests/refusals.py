"""Assert that calls are refused with one sentence: a line for each call, or a table that a test goes through."""

import pytest


def refuses(message, function, *args, error=ValueError, **kwargs):
    """Assert that the call raises this error, with a message that matches."""
    with pytest.raises(error, match=message):
        function(*args, **kwargs)


def refusals(rows):
    """Run a test with `refused` for each row (call, message), or (call, message, error) if not a ValueError.

    `refused(*given)` asserts that the call with these arguments is refused. A row may have wrong arguments in place of
    a call; then `refused(function, **right)` asserts that the function refuses these beside the right ones.
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
