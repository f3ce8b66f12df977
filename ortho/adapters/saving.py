"""Converted models from their files."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from torch import nn

from ortho import _checks
from ortho.adapters import huggingface
from ortho.adapters.finding import attention_layers
from ortho.adapters.freezing import freeze_qk
from ortho.adapters.hybrid import set_heads
from ortho.adapters.kinds import from_description
from ortho.adapters.layouts import Layout
from ortho.adapters.marking import MARK, resolved

ModelT = TypeVar("ModelT", bound=nn.Module)


def restore(
    model: ModelT, record: Mapping[str, Any] | None = None, *, layout: Layout | Sequence[Layout] = ()
) -> ModelT:
    """Do to a model what a record says (`heads_record`), in place: heads are frozen as they are, and told their kinds.

    Without a record it is that of the model's configuration, which `save_pretrained` has written and `from_pretrained`
    read. A state dict is loaded after this, weights of `from_pretrained` are there before. Layouts that are not known
    here are given as they were to `freeze_qk`. Raises TypeError or ValueError if the record is not one of this model,
    which is then as it was.
    """
    attention = None
    if record is None:
        mark = getattr(getattr(model, "config", None), MARK, None)
        if mark is None:
            raise ValueError(
                f"record: expected one, or {MARK} in the configuration of {type(model).__name__}, got none"
            )
        attention, record = mark["attention"], mark["layers"]
    if not isinstance(record, Mapping):
        raise TypeError(f"record: expected a mapping (heads_record), got {_checks.describe(record)}")
    places = dict(
        zip(resolved(list(record), attention_layers(model, strict=False, layout=layout)), record, strict=True)
    )
    kinds = {i: from_description(record[name]["kinds"]) for i, name in places.items() if "kinds" in record[name]}
    if attention is not None:
        for part in huggingface.configured(model):
            if part.config._attn_implementation == huggingface.NAME:
                part.set_attn_implementation(attention)
    given: dict[str, Any] = {"layout": layout, "strict": False}
    for stops in (False, True):
        heads = {i: record[name]["frozen"] for i, name in places.items() if record[name]["stop_gradient"] == stops}
        heads = {i: own for i, own in heads.items() if own}
        if heads:
            freeze_qk(model, heads=heads, draw=None, stop_gradient=stops, **given)
    return set_heads(model, kinds, **given) if kinds else model


def from_pretrained(cls: Any, *args: Any, layout: Layout | Sequence[Layout] = (), **kwargs: Any) -> Any:
    """`cls.from_pretrained(*args, **kwargs)` of transformers, and `restore`, if the model was converted before it was
    saved."""
    huggingface.register()
    model = cls.from_pretrained(*args, **kwargs)
    return restore(model, layout=layout) if getattr(model.config, MARK, None) else model
