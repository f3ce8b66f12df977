"""Multi-head attention as projection x attention."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout as drop

from ortho import checks
from ortho._typing import Bool, Float, State
from ortho.attention import MECHANISMS
from ortho.attention.cache import Cache, new_cache
from ortho.attention.options import check_names, check_options, described, options_of, sums_keys
from ortho.gates import Gate
from ortho.heads import repeat_kv
from ortho.layers.heads import Heads, alone
from ortho.projections import PROJECTIONS, Projection, by_matrices


class MultiheadAttention(Heads):
    r"""Multi-head attention, $Y = \mathrm{concat}_j\, A(q_j, k_j, v_j)\, W_O$.

    `projection` makes q and k: a name of `ortho.PROJECTIONS` ('learned', 'frozen', 'stopped', ...), a class of
    projections, or a module. `attention` is a name of `ortho.MECHANISMS`, or a function or module with the mechanisms'
    signature, such as `RandomFeatureAttention`. The standard layer is learned x softmax (Vaswani et al. 2017, section
    3.2.2), orthogonal random attention is frozen x softmax. `form` chooses the mechanism's 'reference' or 'fast' form;
    a function or module has its own. `options` are the attention's own: `attention="window", width=64`. `Heads` makes
    W_V and W_O and has `head_dim`; `bias` adds biases to all four maps. `embed_dim` is another name of `d_model`.

    While training, each attention weight is set to 0 with probability `dropout` (Srivastava et al. 2014), by PyTorch's
    global generator, as in `torch.nn.MultiheadAttention`. The definition then computes the weights, N x M for each
    head. Only softmax attention has dropout: the fast forms of other mechanisms have no weights.

    `num_kv_heads`, a divisor of `num_heads`, is the number of heads of keys and values. Neighbouring heads of queries
    share them (grouped queries, Ainslie et al. 2023, arXiv:2305.13245; 1: multi-query attention).

    A mechanism's further operands (`Mechanism.gates`) are made by gates, which are always trained, from the keys'
    tokens or the queries' (`Mechanism.query_gates`); `gates` replaces them: `{"beta": ReflectingWriteStrength}`. A
    function or module can have these attributes of a mechanism's entry: `query_gates`, `self_attention_only`,
    `same_tokens`; and `keeps = "sums"` if its state sums up the keys.

    Raises TypeError or ValueError, naming the argument, for unknown names and options, and for options with which the
    attention cannot be called; for d_model not divisible by num_heads; for a `form` with a function or module; for
    sizes or a `bias` other than those of a projection module; for a `dropout` outside [0, 1), or with an attention
    other than softmax.
    """

    def __init__(
        self,
        d_model: int | None = None,
        num_heads: int | None = None,
        *,
        embed_dim: int | None = None,
        head_dim: int | None = None,
        num_kv_heads: int | None = None,
        bias: bool = False,
        projection: str | Callable[..., Projection] | Projection = "learned",
        attention: str | Callable[..., Any] = "softmax",
        form: str = "fast",
        gates: Mapping[str, type[Gate]] | None = None,
        dropout: float = 0.0,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> None:
        checks.expect(d_model is None or embed_dim is None, "embed_dim", "none beside d_model", embed_dim)
        d_model = checks.positive_int("d_model", embed_dim if d_model is None else d_model)
        num_heads = checks.positive_int("num_heads", num_heads)
        super().__init__(d_model, num_heads, head_dim=head_dim, num_kv_heads=num_kv_heads)
        kind: dict[str, Any] = {"generator": generator, "dtype": dtype, "device": device}
        sizes = {"head_dim": head_dim, "num_kv_heads": num_kv_heads, "bias": bias}
        self.projection = _projection(projection, self, **sizes, **kind)
        if not self.projection.own_tokens:
            wanted = "one that makes a token's query and key from that token alone"
            raise ValueError(f"projection: expected {wanted}, got {type(self.projection).__name__}")
        batch_first = options.pop("batch_first", True)  # as users of PyTorch's layer write it
        checks.expect(batch_first is True, "batch_first", "True, as x is (B, N, d)", batch_first)
        self.attention, self.form, self.options = attention, form, options
        makers = self._check_attention(gates or {})
        self._make_maps(bias=bias, **kind)
        own = {**kind, **({} if head_dim is None else {"head_dim": head_dim})}  # not every gate knows of other widths
        self.gates = nn.ModuleDict({name: make(d_model, num_heads, **own) for name, make in makers.items()})
        self.dropout, entry = checks.probability("dropout", dropout), self._entry
        self._of_queries = tuple(getattr(entry, "query_gates", ())) if makers else None  # None: there are no gates
        self._same_tokens, self._described = getattr(entry, "same_tokens", False), described(attention, options)
        wanted = f"0 with the attention {self._described}, whose fast form has no weights"
        checks.expect(not dropout or getattr(entry, "exact", False), "dropout", wanted, dropout)

    def _check_attention(self, gates: Mapping[str, type[Gate]]) -> dict[str, type[Gate]]:
        """The class of each gate, by the argument that it is for, after a check of the attention and its options."""
        for name, make in gates.items():
            if not (isinstance(make, type) and issubclass(make, Gate)):
                raise TypeError(f"gates: expected a class of gates for {name!r}, got {checks.describe(make)}")
        if isinstance(self.attention, str):
            mechanism = MECHANISMS[checks.one_of("attention", self.attention, MECHANISMS)]
            makers = dict(mechanism.gates)
            for name in gates:
                checks.expect(name in makers, "gates", f"a part of {list(makers)} with {self.attention!r}", repr(name))
            mechanism.form(self.form)
            self._given = check_options(mechanism, self.form, self.options, self.num_heads, self.head_dim)
            return makers | dict(gates)
        if not callable(self.attention):
            raise TypeError(
                f"attention: expected a name, a function or a module, got {checks.describe(self.attention)}"
            )
        checks.expect(self.form == "fast", "form", "none beside an attention without a name", repr(self.form))
        check_names(described(self.attention, {}), self.attention, self.options, gates)
        self._given = self.options
        return dict(gates)

    @property
    def _entry(self) -> Any:
        """What says how the attention is called: the mechanism's entry, or the function or module itself."""
        return MECHANISMS[self.attention] if isinstance(self.attention, str) else self.attention

    @property
    def _function(self) -> Callable[..., Any]:
        """What is called with q, k and v."""
        if not isinstance(self.attention, str):
            return self.attention
        mechanism = MECHANISMS[self.attention]
        return mechanism.reference if self.form == "reference" else mechanism.fast

    def forward(
        self,
        x: Float[Tensor, "B N d"],
        context: Float[Tensor, "B M d"] | None = None,
        value: Float[Tensor, "B M d"] | None = None,
        *,
        attn_mask: Bool[Tensor, "..."] | Float[Tensor, "..."] | None = None,
        key_padding_mask: Bool[Tensor, "B M"] | None = None,
        is_causal: bool = False,
        initial_state: State | None = None,
        return_state: bool = False,
        cache: Cache | None = None,
        need_weights: bool = False,
    ) -> Float[Tensor, "B N d"] | tuple[Float[Tensor, "B N d"], Any]:
        """x (B, N, d) -> (B, N, d); queries come from x, keys and values from `context` (B, M, d), by default x.

        `layer(x, x, x)` and `layer(x, context, context)`, as for `torch.nn.MultiheadAttention`, are `layer(x)` and
        `layer(x, context)`. `attn_mask` broadcasts to (B, H, N, M), True = attend; softmax attention also takes
        numbers, which are added to the scores. `key_padding_mask` is (B, M), as in `torch.nn.MultiheadAttention` True =
        padding, to which nothing attends.

        With `initial_state` and `return_state` a causal sequence can be cut anywhere: one call returns the state from
        which the next one starts; masks span its tokens, too. A `cache` (`new_cache`) does so in place, for an x that
        follows the tokens it has read, without gradients. Where a state sums up the keys (linear and recurrent
        attention), prompts of unequal length can be decoded together, with a `key_padding_mask`.

        With `need_weights` the result is (y, weights): each head's output is the sum of values with these weights
        (B, H, N, M). The mechanism's definition computes them, with the identity as values, after `dropout`. A signed
        mechanism can have negative weights, and only a softmax's rows sum to 1.

        Raises TypeError or ValueError, naming the argument, for operands that do not fit together; for an ambiguous
        `attn_mask`, (N, M) where B = N, or (H, N, M) where B = H; for a context with an attention whose queries must be
        the keys' tokens (fox, path, position-delta); for another attention's cache; for a cache with a context, a mask
        of pairs, a state or a call that is not causal; and for weights, or dropout in training, with a state or a
        cache, or of an attention that has no weights (`Mechanism.has_weights`).
        """
        if value is not None or context is not None:
            context = self._context(x, context, value)
        checks.sequence("x", x, self.d_model)
        if cache is not None:
            others: dict[str, Any] = {"context": context, "attn_mask": attn_mask, "initial_state": initial_state}
            alone(is_causal, **others, return_state=return_state, need_weights=need_weights)
            return self._decoded(x, cache, key_padding_mask)
        cut, mask = initial_state is not None or return_state, None
        if attn_mask is not None or key_padding_mask is not None:
            keys = None if initial_state is not None else x.shape[1] if context is None else context.shape[1]
            mask = checks.layer_mask(attn_mask, key_padding_mask, len(x), self.num_heads, x.shape[1], keys)
        q, k, v, given = self._operands(x, context)
        if self.num_kv_heads != self.num_heads:
            k, v = repeat_kv(k, self.num_heads), repeat_kv(v, self.num_heads)
        if self._same_tokens:
            given["same_tokens"] = context is None
        if need_weights or (self.dropout and self.training):
            if cut:
                self.refuse_dropout("a state")
                raise ValueError("need_weights: expected False beside a state, got True")
            weights = self._weights(q, k, v, is_causal=is_causal, attn_mask=mask, **given)
            y = self._merge(weights @ v)
            return (y, weights) if need_weights else y
        attend = self._function
        if mask is not None and initial_state is not None and sums_keys(attend):
            mask = mask[..., -x.shape[1] :]  # of the new keys
        if key_padding_mask is not None and attend is self.attention:  # which may hand tokens on
            padding = key_padding_mask[:, None, key_padding_mask.shape[1] - k.shape[2] :, None]
            k, v = k.masked_fill(padding, 0), v.masked_fill(padding, 0)
        if cut:
            given |= {"initial_state": initial_state, "return_state": return_state}
        if mask is not None:
            given["attn_mask"] = mask
        o = attend(q, k, v, is_causal=is_causal, **self._given, **given)
        return (self._merge(o[0]), o[1]) if return_state else self._merge(o)

    def _context(self, x: Tensor, context: Tensor | None, value: Tensor | None) -> Tensor | None:
        """What keys and values are made of, None for x itself."""
        if value is not None and value is not context:
            wanted = "the context once more, as keys and values are made of the same tokens"
            raise ValueError(f"value: expected {wanted}, got another tensor: write layer(x) or layer(x, context)")
        if context is None or context is x:
            return None
        checks.sequence("context", context, self.d_model)
        if len(context) != len(x):
            raise ValueError(f"context: expected batch {len(x)} like x, got shape {tuple(context.shape)}")
        if getattr(self._entry, "self_attention_only", False):
            wanted = f"None with {self.attention!r}, in which each query is one of the keys' tokens"
            raise ValueError(f"context: expected {wanted}, got shape {tuple(context.shape)}")
        return context

    def _operands(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
        """q (B, H, N, K), k and v (B, G, M, K), and the gates."""
        q, k = self.projection(x, context)
        source = x if context is None else context
        v = self._values(source)
        if self._of_queries is None:
            return q, k, v, {}
        return q, k, v, {name: gate(x if name in self._of_queries else source) for name, gate in self.gates.items()}

    def _weights(self, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Float[Tensor, "B H N M"]:
        """The attention weights, after dropout, by the definition: its outputs for the identity as values."""
        entry = self._entry
        if not isinstance(self.attention, str) or not entry.has_weights:
            wanted = f"False with the attention {described(self.attention, {})}, which has no weights"
            raise ValueError(f"need_weights: expected {wanted}, got True")
        known = options_of(entry.reference, {}) or ()
        own = {name: option for name, option in self._given.items() if name in known}
        identity = torch.eye(k.shape[2], dtype=v.dtype, device=v.device).expand(*k.shape[:2], -1, -1)
        return drop(entry.reference(q, k, identity, **own, **given), self.dropout, self.training)

    def new_cache(self, capacity: int | None = None) -> Cache:
        """An empty cache for decoding with this layer, with room for `capacity` tokens (`ortho.attention.cache`)."""
        return new_cache(self.attention, capacity, form=self.form, **self.options)

    def _decoded(self, x: Tensor, cache: Cache, padding: Tensor | None) -> Tensor:
        """The outputs of tokens after those that the cache has read."""
        self.refuse_dropout("a cache")
        cache.fits(self._described)
        with torch.no_grad():
            q, k, v, given = self._operands(x, None)
            if padding is not None:
                checks.layer_mask(None, padding, len(x), self.num_heads, x.shape[1], None)
                given["key_mask"] = ~padding[:, padding.shape[1] - x.shape[1] :]
            if not isinstance(self.attention, str):
                given["function"] = partial(self.attention, **self._given)
            return self._merge(cache.attend(q, k, v, **given))

    def refuse_dropout(self, beside: str) -> None:
        """Raise ValueError if `dropout` applies to a call that computes no weights."""
        if self.dropout and self.training:
            raise ValueError(f"dropout: expected 0 in training beside {beside}, got {self.dropout}: call eval() first")

    def to_torch(self) -> nn.MultiheadAttention:
        """This layer as PyTorch's own `nn.MultiheadAttention` (batch first), with identical outputs.

        Raises ValueError for what that layer cannot express: an attention other than softmax, grouped queries, and
        heads of another width than d/H; and TypeError for a custom projection, whose weights need not define it.
        """
        made = by_matrices(self.projection)
        checks.expect(self.attention == "softmax", "attention", "'softmax'", repr(self.attention))
        if self.num_kv_heads != self.num_heads:
            raise ValueError(f"num_kv_heads: expected num_heads = {self.num_heads}, got {self.num_kv_heads}")
        checks.expect(self.head_dim * self.num_heads == self.d_model, "head_dim", "d_model / num_heads", self.head_dim)
        w = self.weight_o
        state = {"in_proj_weight": torch.cat([made.weight_q, made.weight_k, self.weight_v]), "out_proj.weight": w}
        if self.bias_o is not None:
            state["in_proj_bias"] = torch.cat([b for b in (made.bias_q, made.bias_k, self.bias_v) if b is not None])
            state["out_proj.bias"] = self.bias_o
        kind: dict[str, Any] = {"bias": self.bias_o is not None, "dtype": w.dtype, "device": w.device}
        layer = nn.MultiheadAttention(self.d_model, self.num_heads, self.dropout, batch_first=True, **kind)
        layer.load_state_dict(state)
        return layer.train(self.training)

    def extra_repr(self) -> str:
        return f"attention={self._described}" + (f", form={self.form!r}" if isinstance(self.attention, str) else "")


def _projection(made: Any, layer: Heads, **sizes: Any) -> Projection:
    """The projection that a name or a class makes for a layer, or a given one, after a check of its sizes."""
    if isinstance(made, str):
        made = PROJECTIONS[checks.one_of("projection", made, PROJECTIONS)]
    if callable(made) and not isinstance(made, Projection):
        made = made(layer.d_model, layer.num_heads, **{name: value for name, value in sizes.items() if value})
    if not isinstance(made, Projection):
        raise TypeError(f"projection: expected a name, a class or a module of them, got {checks.describe(made)}")
    names = ("d_model", "num_heads", "head_dim", "num_kv_heads")
    wanted, got = ([getattr(one, name) for name in names] for one in (layer, made))
    if got != wanted or bool(sizes["bias"]) != (made.bias_q is not None):
        raise ValueError(
            f"projection: expected {', '.join(names)} and bias {(*wanted, sizes['bias'])}, "
            f"got {(*got, made.bias_q is not None)}"
        )
    return made
