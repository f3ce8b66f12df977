"""Layers: multi-head attention as projection x attention, the feed-forward network, the pre-norm block."""

import copy
from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import nn
from torch.nn.functional import gelu, linear

from ortho import _checks
from ortho._typing import Bool, Float, State, Tensor
from ortho._weights import new_weight, split_heads
from ortho.attention import FORMS, MECHANISMS
from ortho.gates import Gate
from ortho.projections import PROJECTIONS, FrozenProjection, LearnedProjection, Projection

__all__ = ["FeedForward", "MultiheadAttention", "TransformerBlock", "to_standard"]


class MultiheadAttention(nn.Module):
    r"""Multi-head attention, $Y = \mathrm{concat}_j\, A(q_j, k_j, v_j)\, W_O$, without biases.

    `projection` names how q and k are made ('learned', 'frozen', 'stopped', or a `Projection` module) and `attention`
    a mechanism of `ortho.MECHANISMS`; the standard layer is learned x softmax (Vaswani et al. 2017, section 3.2.2),
    orthogonal random attention is frozen x softmax. `form` chooses the mechanism's 'reference' or 'fast' form. Instead
    of a name, `attention` may be a module with the mechanisms' signature, such as `RandomFeatureAttention`, whose form
    is its own. W_V and W_O (`weight_v`, `weight_o`, stored as in `torch.nn.Linear`) are always trained.

    What a mechanism takes besides (`Mechanism.gates`) is made of the keys' tokens by gates, always trained; `gates`
    puts others in their place: `{"beta": ReflectingWriteStrength}`.

    Raises TypeError or ValueError, naming the argument, for unknown names, for d_model not divisible by num_heads, and
    for a `form` beside a module.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        projection: str | Projection = "learned",
        attention: str | nn.Module = "softmax",
        form: str = "fast",
        gates: Mapping[str, type[Gate]] | None = None,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(projection, Projection):
            make = PROJECTIONS[_checks.one_of("projection", projection, PROJECTIONS)]
            projection = make(d_model, num_heads, generator=generator, dtype=dtype, device=device)
        elif (projection.d_model, projection.num_heads) != (d_model, num_heads):
            got = (projection.d_model, projection.num_heads)
            raise ValueError(f"projection: expected (d_model, num_heads) = {(d_model, num_heads)}, got {got}")
        self.d_model, self.num_heads = d_model, num_heads
        self.attention, makers = _attention(attention, form, gates or {})
        self.form = _checks.one_of("form", form, FORMS)
        self.projection = projection
        self.weight_v = new_weight(d_model, d_model, generator=generator, dtype=dtype, device=device)
        self.weight_o = new_weight(d_model, d_model, generator=generator, dtype=dtype, device=device)
        self.gates = nn.ModuleDict(
            {
                name: make(d_model, num_heads, generator=generator, dtype=dtype, device=device)
                for name, make in makers.items()
            }
        )

    def forward(
        self,
        x: Float[Tensor, "B N d"],
        context: Float[Tensor, "B M d"] | None = None,
        *,
        attn_mask: Bool[Tensor, "..."] | None = None,
        is_causal: bool = False,
        initial_state: State | None = None,
        return_state: bool = False,
    ) -> Float[Tensor, "B N d"] | tuple[Float[Tensor, "B N d"], State]:
        """x (B, N, d) -> (B, N, d); queries come from x, keys and values from `context` (B, M, d), by default x.

        `attn_mask` broadcasts to (B, H, N, M), True = may attend. `initial_state` and `return_state` cut a causal
        sequence anywhere: the state that one call returns is what the next one starts from.
        """
        _checks.sequence("x", x, self.weight_v)
        source = x
        if context is not None:
            source = _checks.sequence("context", context, self.weight_v)
            if len(context) != len(x):
                raise ValueError(f"context: expected batch {len(x)} like x, got shape {tuple(context.shape)}")
        q, k = self.projection(x, context)  # (B, H, N, K), (B, H, M, K)
        v = split_heads(linear(source, self.weight_v), self.num_heads)  # (B, H, M, K)
        attend = MECHANISMS[self.attention].form(self.form) if isinstance(self.attention, str) else self.attention
        o = attend(
            q,
            k,
            v,
            is_causal=is_causal,
            attn_mask=attn_mask,
            initial_state=initial_state,
            return_state=return_state,
            **{name: gate(source) for name, gate in self.gates.items()},
        )
        if not return_state:
            return self._merge(o)
        o, state = o
        return self._merge(o), state

    def _merge(self, o: Float[Tensor, "B H N K"]) -> Float[Tensor, "B N d"]:
        """Heads side by side, then W_O."""
        return linear(o.transpose(1, 2).flatten(2), self.weight_o)

    def to_torch(self) -> nn.MultiheadAttention:
        """This layer as PyTorch's own `nn.MultiheadAttention` (batch first, no biases), with identical outputs.

        Raises ValueError for an attention other than softmax, which that layer does not know, and TypeError for a
        projection of one's own, whose weights need not say what it does.
        """
        _convertible(self.projection)
        if self.attention != "softmax":
            raise ValueError(f"attention: expected 'softmax', got {self.attention!r}")
        w = self.weight_o
        layer = nn.MultiheadAttention(
            self.d_model, self.num_heads, bias=False, batch_first=True, dtype=w.dtype, device=w.device
        )
        with torch.no_grad():
            layer.in_proj_weight.copy_(torch.cat([self.projection.weight_q, self.projection.weight_k, self.weight_v]))
            layer.out_proj.weight.copy_(self.weight_o)
        return layer.train(self.training)

    def extra_repr(self) -> str:
        return f"attention={self.attention!r}, form={self.form!r}" if isinstance(self.attention, str) else ""


def _attention(
    attention: str | nn.Module, form: str, gates: Mapping[str, type[Gate]]
) -> tuple[str | nn.Module, dict[str, type[Gate]]]:
    """The attention as it was given, and what makes its gates, by the argument that each is for."""
    for name, make in gates.items():
        if not (isinstance(make, type) and issubclass(make, Gate)):
            raise TypeError(f"gates: expected a class of gates for {name!r}, got {_checks.describe(make)}")
    if isinstance(attention, nn.Module):
        if form != "fast":
            raise ValueError(f"form: expected none beside an attention that is a module, got {form!r}")
        return attention, dict(gates)
    if not isinstance(attention, str) or attention not in MECHANISMS:
        known = ", ".join(map(repr, MECHANISMS))
        raise ValueError(f"attention: expected one of {known}, or an nn.Module, got {attention!r}")
    makers = dict(MECHANISMS[attention].gates)
    for name in gates:
        if name not in makers:
            raise ValueError(f"gates: expected a part of {list(makers)} with {attention!r}, got {name!r}")
    return attention, makers | dict(gates)


class FeedForward(nn.Module):
    r"""$\mathrm{GELU}(x W_1)\, W_2$ with hidden width `d_ff` (4 d_model by default), without biases."""

    def __init__(
        self,
        d_model: int,
        d_ff: int | None = None,
        *,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        d_ff = 4 * _checks.positive_int("d_model", d_model) if d_ff is None else _checks.positive_int("d_ff", d_ff)
        self.weight_up = new_weight(d_ff, d_model, generator=generator, dtype=dtype, device=device)
        self.weight_down = new_weight(d_model, d_ff, generator=generator, dtype=dtype, device=device)

    def forward(self, x: Float[Tensor, "B N d"]) -> Float[Tensor, "B N d"]:
        """x (B, N, d) -> (B, N, d)."""
        _checks.sequence("x", x, self.weight_up)
        return linear(gelu(linear(x, self.weight_up)), self.weight_down)


class TransformerBlock(nn.Module):
    """Pre-norm block: x + attention(norm(x)), then x + feed-forward(norm(x)) (Xiong et al. 2020, arXiv:2002.04745).

    Takes what `MultiheadAttention` takes, and `d_ff`.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        d_ff: int | None = None,
        projection: str | Projection = "learned",
        attention: str | nn.Module = "softmax",
        form: str = "fast",
        gates: Mapping[str, type[Gate]] | None = None,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.attention = MultiheadAttention(
            d_model,
            num_heads,
            projection=projection,
            attention=attention,
            form=form,
            gates=gates,
            generator=generator,
            dtype=dtype,
            device=device,
        )
        self.feed_forward = FeedForward(d_model, d_ff, generator=generator, dtype=dtype, device=device)
        self.norm_attention = nn.LayerNorm(d_model, bias=False, dtype=dtype, device=device)
        self.norm_feed_forward = nn.LayerNorm(d_model, bias=False, dtype=dtype, device=device)

    def forward(
        self,
        x: Float[Tensor, "B N d"],
        *,
        attn_mask: Bool[Tensor, "..."] | None = None,
        is_causal: bool = False,
        initial_state: State | None = None,
        return_state: bool = False,
    ) -> Float[Tensor, "B N d"] | tuple[Float[Tensor, "B N d"], State]:
        """x (B, N, d) -> (B, N, d); the arguments are `MultiheadAttention.forward`'s."""
        _checks.sequence("x", x, self.attention.weight_v)
        y = self.attention(
            self.norm_attention(x),
            attn_mask=attn_mask,
            is_causal=is_causal,
            initial_state=initial_state,
            return_state=return_state,
        )
        if not return_state:
            return self._after(x, y)
        y, state = y
        return self._after(x, y), state

    def _after(self, x: Float[Tensor, "B N d"], y: Float[Tensor, "B N d"]) -> Float[Tensor, "B N d"]:
        """The first residual sum and the feed-forward half."""
        x = x + y
        return x + self.feed_forward(self.norm_feed_forward(x))


def _convertible(projection: Projection) -> Projection:
    if type(projection) not in (LearnedProjection, FrozenProjection):
        raise TypeError(f"projection: expected a learned or frozen one, got {type(projection).__name__}")
    return projection


ModuleT = TypeVar("ModuleT", bound=nn.Module)


def to_standard(module: ModuleT) -> ModuleT:
    """A copy of any module in which every projection is a learned one with the same weights: same outputs, all trained.

    The copy's layers are what the standard architecture loads and what a trainer may fine-tune in full. Raises
    TypeError for a projection of one's own, whose weights need not say what it does.
    """
    module = copy.deepcopy(module)
    for layer in [m for m in module.modules() if isinstance(m, MultiheadAttention)]:
        old = _convertible(layer.projection)
        new = LearnedProjection(old.d_model, old.num_heads, device="meta")  # no draw: its weights are the old ones
        new.weight_q, new.weight_k = (nn.Parameter(w.detach().clone()) for w in (old.weight_q, old.weight_k))
        layer.projection = new.train(old.training)
    return module
