"""Shape annotations. With jaxtyping installed they can be checked at run time; without it they are plain tensors."""

from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
else:
    try:
        from jaxtyping import Bool, Float, Int
    except ImportError:

        class _Shaped:
            def __class_getitem__(cls, item: tuple[Any, str]) -> Any:
                return item[0]

        Bool = Float = Int = _Shaped

State = tuple[Any, ...]  # tensors; of a layer whose heads are in groups, the states of these
Size = Any  # an integer, or a sympy symbol

__all__ = ["Bool", "Float", "Int", "Size", "State", "Tensor"]
