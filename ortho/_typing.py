"""Shape annotations. With jaxtyping installed they can be checked at run time; without it they are plain tensors."""

from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from torch import Tensor


class Shaped(NamedTuple):
    """What an annotation says of a tensor: 'float', 'int' or 'bool', and its axes."""

    kind: str
    axes: tuple[str, ...]


if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
else:
    try:
        from jaxtyping import Bool, Float, Int
    except ImportError:

        class _Shaped:
            kind = ""

            def __class_getitem__(cls, item: tuple[Any, str]) -> Any:
                return Annotated[item[0], Shaped(cls.kind, tuple(item[1].split()))]

        Bool, Float, Int = (type(kind, (_Shaped,), {"kind": kind}) for kind in ("bool", "float", "int"))


def shaped(annotation: Any) -> Shaped | None:
    """What an annotation says of a tensor; None if it is not a shape annotation."""
    for part in getattr(annotation, "__metadata__", ()):
        if isinstance(part, Shaped):
            return part
    if not hasattr(annotation, "dim_str"):
        return None
    kind = next(kind for kind in ("float", "int", "bool") if any(kind in name for name in annotation.dtypes))
    return Shaped(kind, tuple(annotation.dim_str.split()))


State = tuple[Any, ...]  # tensors
Size = Annotated[Any, "size"]  # an integer, or a sympy symbol

__all__ = ["Bool", "Float", "Int", "Size", "State", "Tensor"]
