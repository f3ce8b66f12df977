"""Multi-head attention as projection x attention."""

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.nn.functional import dropout as drop
from torch.nn.functional import linear

from ortho import _checks
from ortho._checks import checked, unknown
from ortho._typing import Bool, Float, State, Tensor
from ortho._weights import new_bias, new_weight, split_heads, spread_heads
from ortho.attention import MECHANISMS
from ortho.attention.cache import Cache, new_cache
from ortho.gates import Gate
from ortho.projections import PROJECTIONS, Projection, by_matrices


class MultiheadAttention(nn.Module):
    r"""Multi-head attention, $Y = \mathrm{concat}_j\, A(q_j, k_j, v_j)\, W_O$.

    `projection` makes q and k: a name of `ortho.PROJECTIONS` ('learned', 'frozen', 'stopped', ...), a class of
    projections, or a module, which several layers may share. `attention` is a name of `ortho.MECHANISMS`, or a module
    with the mechanisms' signature, such as `RandomFeatureAttention`. The standard layer is learned x softmax (Vaswani
    et al. 2017, section 3.2.2), orthogonal random attention is frozen x softmax. `form` chooses the mechanism's
    'reference' or 'fast' form; a module has its own. W_V and W_O (`weight_v`, `weight_o`, stored as in
    `torch.nn.Linear`) are always trained, and so are their biases, which `bias` adds.

    While training, a share `dropout` of the attention weights is set to 0 (Srivastava et al. 2014), by PyTorch's global
    generator, as in `torch.nn.MultiheadAttention`. The mechanism's definition then computes the weights, N x M for each
    head, whatever the form.

    `num_kv_heads`, a divisor of `num_heads`, is the number of heads of keys and values. Neighbouring heads of queries
    share them (grouped queries, Ainslie et al. 2023, arXiv:2305.13245; 1: multi-query attention). With `head_dim` there
    may be any number of heads, each of that width: W_V is (G K, d) and W_O (d, H K). Their entries start with the
    variance of a layer whose heads together are as wide as x.

    A mechanism's further operands (`Mechanism.gates`) are made by gates, which are always trained, from the keys'
    tokens or the queries' (`Mechanism.query_gates`); `gates` replaces them: `{"beta": ReflectingWriteStrength}`. A
    module can have these attributes of a mechanism's entry: `query_gates`, `one_sequence`, `same_tokens`.

    Raises TypeError or ValueError, naming the argument, for unknown names; for d_model not divisible by num_heads; for
    a `form` with a module; for sizes or a `bias` other than those of a projection module; for a mechanism with gates
    and `head_dim`, since gates are made for heads that divide x; for a `dropout` outside [0, 1), or with an attention
    that has no weights (`Mechanism.gives_weights`).
    """

    @checked
    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        num_kv_heads: int | None = None,
        bias: bool = False,
        projection: str | Callable[..., Projection] | Projection = "learned",
        attention: str | nn.Module = "softmax",
        form: str = "fast",
        gates: Mapping[str, type[Gate]] | None = None,
        dropout: float = 0.0,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        kind: dict[str, Any] = {"generator": generator, "dtype": dtype, "device": device}
        sizes = {"head_dim": head_dim, "num_kv_heads": num_kv_heads, "bias": bias}
        self.projection = _projection(projection, d_model, num_heads, **sizes, **kind)
        if not getattr(self.projection, "own_tokens", True):
            wanted = "one that makes a token's query and key from that token alone"
            raise ValueError(f"projection: expected {wanted}, got {type(self.projection).__name__}")
        self.d_model, self.num_heads = d_model, num_heads
        self.head_dim, self.num_kv_heads = self.projection.head_dim, self.projection.num_kv_heads
        self.attention, makers = _attention(attention, form, gates or {})
        _checks.expect(not makers or head_dim is None, "head_dim", "None beside an attention with gates", head_dim)
        self.form = form
        fans = None if head_dim is None else 2 * d_model
        self.weight_v = new_weight(self.projection.kv_width, d_model, fans=fans, **kind)
        self.weight_o = new_weight(d_model, self.projection.q_width, fans=fans, **kind)
        self.bias_v, self.bias_o = (new_bias(w) if bias else None for w in (self.weight_v, self.weight_o))
        self.gates = nn.ModuleDict({name: make(d_model, num_heads, **kind) for name, make in makers.items()})
        entry = MECHANISMS[attention] if isinstance(attention, str) else attention
        self._query_gates = frozenset(getattr(entry, "query_gates", ())) & makers.keys()
        self._one_sequence = bool(getattr(entry, "one_sequence", False))
        self._same_tokens = bool(getattr(entry, "same_tokens", False))
        self.dropout = _checks.share("dropout", dropout)
        if dropout:
            self._has_weights("dropout", "0", dropout)

    @checked(shapes=False)
    def forward(
        self,
        x: Float[Tensor, "B N d"],
        context: Float[Tensor, "B M d"] | None = None,
        *,
        attn_mask: Bool[Tensor, "..."] | None = None,
        key_padding_mask: Bool[Tensor, "B M"] | None = None,
        is_causal: bool = False,
        initial_state: State | None = None,
        return_state: bool = False,
        cache: Cache | None = None,
        need_weights: bool = False,
    ) -> Float[Tensor, "B N d"] | tuple[Float[Tensor, "B N d"], Any]:
        """x (B, N, d) -> (B, N, d); queries come from x, keys and values from `context` (B, M, d), by default x.

        `attn_mask` broadcasts to (B, H, N, M), True = may attend; `key_padding_mask` is (B, M), as in
        `torch.nn.MultiheadAttention` True = padding, to which nothing attends. With `initial_state` and `return_state`
        a causal sequence can be cut anywhere: one call returns the state from which the next one starts. A `cache`
        (`new_cache`) does so in place, for an x that follows the tokens it has read, without gradients.

        With `need_weights` the result is (y, weights): each head's output is the sum of values with these weights
        (B, H, N, M). The mechanism's definition computes them, with the identity as values, after `dropout`. A signed
        mechanism can have negative weights, and only a softmax's rows sum to 1.

        Raises TypeError or ValueError, naming the argument, for operands that do not fit together; for an ambiguous
        `attn_mask`, (N, M) where B = N, or (H, N, M) where B = H; for a context with an attention whose queries must be
        the keys' tokens (fox, path, position-delta); for another attention's cache; for a cache with a context, a mask,
        a state or a call that is not causal; and for weights, or dropout in training, with a state or a cache, or of an
        attention that has no weights (`Mechanism.gives_weights`).
        """
        _checks.sequence("x", x, self.weight_v)
        if context is not None:
            _checks.sequence("context", context, self.weight_v)
            if len(context) != len(x):
                raise ValueError(f"context: expected batch {len(x)} like x, got shape {tuple(context.shape)}")
            if self._one_sequence:
                wanted = f"None with {self.attention!r}, in which each query is one of the keys' tokens"
                raise ValueError(f"context: expected {wanted}, got shape {tuple(context.shape)}")
        if cache is not None:
            others: dict[str, Any] = {"context": context, "attn_mask": attn_mask, "initial_state": initial_state}
            others |= {"key_padding_mask": key_padding_mask, "need_weights": need_weights}
            self.refuse_dropout("a cache")
            _alone(cache, self.attention, is_causal, **others, return_state=return_state)
            with torch.no_grad():
                q, k, v, gates = self._operands(x, None)
                return self._merge(cache.attend(q, k, v, **gates))
        keys = None if initial_state is not None else x.shape[1] if context is None else context.shape[1]
        mask = _checks.layer_mask(attn_mask, key_padding_mask, len(x), self.num_heads, x.shape[1], keys)
        q, k, v, gates = self._operands(x, context)
        k, v = spread_heads(k, self.num_heads), spread_heads(v, self.num_heads)
        if key_padding_mask is not None and not isinstance(self.attention, str):  # which may hand tokens on
            absent = key_padding_mask[:, None, key_padding_mask.shape[1] - k.shape[2] :, None]
            k, v = k.masked_fill(absent, 0), v.masked_fill(absent, 0)
        own: dict[str, Any] = {"is_causal": is_causal, "attn_mask": mask, **gates}
        if self._same_tokens:
            own["same_tokens"] = context is None
        if need_weights:
            self._has_weights("need_weights", "False", True)
        if initial_state is not None or return_state:
            self.refuse_dropout("a state")
            _checks.expect(not need_weights, "need_weights", "False beside a state", "True")
        if need_weights or (self.training and self.dropout):
            identity = torch.eye(k.shape[2], dtype=v.dtype, device=v.device).expand(*k.shape[:2], -1, -1)
            weights = MECHANISMS[cast(str, self.attention)].reference(q, k, identity, **own)  # (B, H, N, M)
            weights = drop(weights, self.dropout, self.training)
            y = self._merge(weights @ v)
            return (y, weights) if need_weights else y
        attend: Any = self.attention
        if isinstance(attend, str):
            attend = MECHANISMS[attend].form(self.form)
        o = attend(q, k, v, initial_state=initial_state, return_state=return_state, **own)
        if not return_state:
            return self._merge(o)
        o, state = o
        return self._merge(o), state

    def _operands(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
        """q (B, H, N, K), k and v (B, G, M, K), and the gates."""
        q, k = self.projection(x, context)
        source = x if context is None else context
        v = split_heads(linear(source, self.weight_v, self.bias_v), self.num_kv_heads)
        gates = {name: gate(x if name in self._query_gates else source) for name, gate in self.gates.items()}
        return q, k, v, gates

    @checked
    def new_cache(self, capacity: int | None = None) -> Cache:
        """An empty cache for decoding with this layer, with room for `capacity` tokens (`ortho.attention.cache`)."""
        return new_cache(self.attention, capacity, form=self.form)

    def _merge(self, o: Float[Tensor, "B H N K"]) -> Float[Tensor, "B N d"]:
        """Heads side by side, then W_O."""
        return linear(o.transpose(1, 2).flatten(2), self.weight_o, self.bias_o)

    def refuse_dropout(self, beside: str) -> None:
        """Raise ValueError if `dropout` applies to a call that computes no weights."""
        if self.training and self.dropout:
            raise ValueError(f"dropout: expected 0 in training beside {beside}, got {self.dropout}: call eval() first")

    def _has_weights(self, name: str, expected: str, got: Any) -> None:
        """Raise ValueError for argument `name` unless outputs are weights, which do not depend on the values, times the
        values (`Mechanism.gives_weights`)."""
        if not isinstance(self.attention, str) or not MECHANISMS[self.attention].gives_weights:
            kind = repr(self.attention) if isinstance(self.attention, str) else type(self.attention).__name__
            raise ValueError(f"{name}: expected {expected} with the attention {kind}, which has no weights, got {got}")

    @classmethod
    def from_torch(cls, layer: nn.MultiheadAttention, **kwargs: Any) -> "MultiheadAttention":
        """A layer with the weights of PyTorch's own `nn.MultiheadAttention`, and by default with identical outputs.

        `kwargs` are this class's other arguments, except those that the layer decides (`num_heads`, `num_kv_heads`,
        `head_dim` and `bias`): `projection` "frozen" freezes the weights of queries and keys, and `attention` chooses
        another mechanism. Masks have the opposite sense: here True is "may attend".

        Raises TypeError for a layer of another class; and ValueError for one with `kdim`, `vdim`, `add_bias_kv` or
        `add_zero_attn`, and for a projection that is not defined by matrices.
        """
        if type(layer) is not nn.MultiheadAttention:
            raise TypeError(f"layer: expected an nn.MultiheadAttention itself, got {type(layer).__name__}")
        d, w = layer.embed_dim, layer.in_proj_weight
        if layer.kdim != d or layer.vdim != d or layer.bias_k is not None or layer.add_zero_attn:
            got = f"{layer.kdim}, {layer.vdim}, {layer.bias_k is not None} and {layer.add_zero_attn}"
            wanted = f"kdim and vdim of embed_dim = {d}, no add_bias_kv and no add_zero_attn"
            raise ValueError(f"layer: expected {wanted}, got {got}")
        kind: dict[str, Any] = {"dtype": w.dtype, "device": w.device, "generator": torch.Generator(w.device)}
        biased = layer.in_proj_bias is not None
        decided = {"num_heads": layer.num_heads, "num_kv_heads": layer.num_heads, "head_dim": layer.head_dim}
        for name, own in (*decided.items(), ("bias", biased)):
            given = kwargs.pop(name, None)
            _checks.expect(given is None or given == own, name, f"the layer's own, {own}", given)
        made = cls(d, layer.num_heads, bias=biased, **{"dropout": layer.dropout, **kind, **kwargs})
        parts = ("projection.{}_q", "projection.{}_k", "{}_v", "{}_o")
        state = dict(zip(parts, (*w.chunk(3), layer.out_proj.weight), strict=True))
        named = {part.format("weight"): value for part, value in state.items()}
        if biased:
            biases = (*layer.in_proj_bias.chunk(3), layer.out_proj.bias)
            named |= {part.format("bias"): value for part, value in zip(parts, biases, strict=True)}
        if unknown_names := made.load_state_dict(named, strict=False).unexpected_keys:
            raise ValueError(f"projection: expected one that has {', '.join(unknown_names)}, got {made.projection}")
        return made.train(layer.training)

    def to_torch(self) -> nn.MultiheadAttention:
        """This layer as PyTorch's own `nn.MultiheadAttention` (batch first), with identical outputs.

        Raises ValueError for what that layer cannot express: an attention other than softmax, grouped queries, and
        heads of another width than d/H; and TypeError for a custom projection, whose weights need not define it.
        """
        made = by_matrices(self.projection)
        _checks.expect(self.attention == "softmax", "attention", "'softmax'", repr(self.attention))
        if self.num_kv_heads != self.num_heads:
            raise ValueError(f"num_kv_heads: expected num_heads = {self.num_heads}, got {self.num_kv_heads}")
        _checks.expect(self.head_dim * self.num_heads == self.d_model, "head_dim", "d_model / num_heads", self.head_dim)
        w, biases = self.weight_o, [b for b in (made.bias_q, made.bias_k, self.bias_v) if b is not None]
        kind: dict[str, Any] = {"bias": bool(biases), "dtype": w.dtype, "device": w.device}
        layer = nn.MultiheadAttention(self.d_model, self.num_heads, self.dropout, batch_first=True, **kind)
        with torch.no_grad():
            layer.in_proj_weight.copy_(torch.cat([made.weight_q, made.weight_k, self.weight_v]))
            layer.out_proj.weight.copy_(self.weight_o)
            if self.bias_o is not None:
                layer.in_proj_bias.copy_(torch.cat(biases))
                layer.out_proj.bias.copy_(self.bias_o)
        return layer.train(self.training)

    def extra_repr(self) -> str:
        return f"attention={self.attention!r}, form={self.form!r}" if isinstance(self.attention, str) else ""


def _projection(made: Any, d_model: int, num_heads: int, **sizes: Any) -> Projection:
    """The projection that a name or a class makes, or a given one, after a check of its sizes."""
    if isinstance(made, str):
        made = PROJECTIONS[_checks.one_of("projection", made, PROJECTIONS)]
    if callable(made) and not isinstance(made, Projection):
        made = made(d_model, num_heads, **{name: value for name, value in sizes.items() if value})
    if not isinstance(made, Projection):
        raise TypeError(f"projection: expected a name, a class or a module of them, got {_checks.describe(made)}")
    names = ("d_model", "num_heads", "head_dim", "num_kv_heads")
    like = Projection(d_model, num_heads, **{name: sizes[name] for name in names[2:]})
    wanted, got = ([getattr(one, name) for name in names] for one in (like, made))
    if got != wanted or sizes["bias"] != (made.bias_q is not None):
        raise ValueError(
            f"projection: expected {', '.join(names)} and bias {(*wanted, sizes['bias'])}, "
            f"got {(*got, made.bias_q is not None)}"
        )
    return made


def _alone(cache: Cache, attention: str | nn.Module, is_causal: bool, **others: Any) -> None:
    """Raise ValueError unless the cache is of this attention, and the call is causal and has no other arguments."""
    if cache.attention != attention:
        raise ValueError(f"cache: expected one for {attention!r}, got one for {cache.attention!r}")
    _checks.expect(is_causal, "is_causal", "True beside a cache", "False")
    for name, value in others.items():
        if value is not None and value is not False:
            raise ValueError(f"{name}: expected none beside a cache, got {_checks.describe(value)}")


def _attention(
    attention: str | nn.Module, form: str, gates: Mapping[str, type[Gate]]
) -> tuple[str | nn.Module, dict[str, type[Gate]]]:
    """The attention as given, and the class of each of its gates, by the argument that the gate is for."""
    for name, make in gates.items():
        if not (isinstance(make, type) and issubclass(make, Gate)):
            raise TypeError(f"gates: expected a class of gates for {name!r}, got {_checks.describe(make)}")
    if isinstance(attention, nn.Module):
        _checks.expect(form == "fast", "form", "none beside an attention that is a module", repr(form))
        return attention, dict(gates)
    if not isinstance(attention, str) or attention not in MECHANISMS:
        raise ValueError(unknown("attention", attention, MECHANISMS, ", or an nn.Module"))
    makers = dict(MECHANISMS[attention].gates)
    for name in gates:
        _checks.expect(name in makers, "gates", f"a part of {list(makers)} with {attention!r}", repr(name))
    return attention, makers | dict(gates)
