"""Shape annotations. With jaxtyping installed they can be checked at run time; without it they are notes on tensors."""

from typing import TYPE_CHECKING, Annotated, Any

from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
else:
    try:
        from jaxtyping import Bool, Float, Int
    except ImportError:

        class Float:
            def __class_getitem__(cls, item: tuple[Any, str]) -> Any:
                return Annotated[item]

        Bool = Int = Float

State = tuple[Any, ...]  # tensors
Size = Annotated[Any, "size"]  # an integer, or a sympy symbol

__all__ = ["Bool", "Float", "Int", "Size", "State", "Tensor"]
