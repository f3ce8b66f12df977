"""Run-time checks of the package's annotations, shapes included: in each test, the first calls of each function.

Checks of every call would take longer than the calls themselves. Calls are counted anew in each test, so that the
result of a test does not depend on the tests before it.
"""

from collections import Counter
from functools import partial, wraps
from inspect import isclass

import jaxtyping
from beartype import BeartypeConf, beartype
from sample import WHOLE

CALLS = 8 if WHOLE else 2
typechecker = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int may stand for a float, as with mypy
_jaxtyped = jaxtyping.jaxtyped
_calls, _checking = Counter(), True


def begin_test(checking: bool) -> None:
    """Reset the counts of calls, and set whether calls are checked."""
    global _checking
    _checking = checking
    _calls.clear()


def install() -> None:
    """Check every module of the package that is imported from now on."""
    jaxtyping.install_import_hook(["ortho", "paper"], "annotation_checks.typechecker")
    jaxtyping.jaxtyped = _first_calls  # by this name the hook decorates every function and class


def _first_calls(decorated=None, *, typechecker):
    if decorated is None:
        return partial(_first_calls, typechecker=typechecker)
    if isclass(decorated):
        if "__dataclass_fields__" in vars(decorated):
            decorated.__init__ = _first_calls(decorated.__init__, typechecker=typechecker)
        return decorated
    code, checked = decorated.__code__, None
    if not _checking and "<locals>" in decorated.__qualname__:
        return decorated  # FlexAttention inspects the functions that it is given

    @wraps(decorated)
    def call(*args, **kwargs):
        nonlocal checked
        if not _checking or _calls[code] == CALLS:
            return decorated(*args, **kwargs)
        _calls[code] += 1
        checked = checked or _jaxtyped(decorated, typechecker=typechecker)
        return checked(*args, **kwargs)

    return call
