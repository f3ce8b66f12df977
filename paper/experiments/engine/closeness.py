"""Whether a fast form gives what its definition does: asked before anything is measured of it."""

from torch import Tensor


def relative_error(got: Tensor, want: Tensor) -> float:
    """How far `got` is from `want`, as a share of the latter's norm; both are taken to float64."""
    want = want.detach().double()
    return float((got.detach().double() - want).norm() / want.norm())


def assert_close(what: str, got: Tensor, want: Tensor, bound: float) -> None:
    """Raise AssertionError, naming what was compared, unless the relative error is within the bound."""
    error = relative_error(got, want)
    if not error <= bound:  # also where the error is NaN
        raise AssertionError(f"{what}: expected a relative error of at most {bound:.2g}, got {error:.2g}")
