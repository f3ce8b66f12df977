r"""The Synthesizer layer, $Y = \mathrm{concat}_j\, \mathrm{softmax}(S_j)\, V_j\, W_O$, with logits S from any source.

Tay et al. 2021, arXiv:2005.00743. It takes no queries and keys, so it is separate from projections and mechanisms.
"""

from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ortho import checks
from ortho._typing import Bool, Float, State
from ortho.attention.call import blocked_pairs, no_autocast
from ortho.attention.scores import masked_softmax
from ortho.heads import new_weight, split_heads
from ortho.layers.synthesizer.sources import SOURCES, LogitSource, Seen
from ortho.projections import head_sizes

__all__ = ["SynthesizerAttention"]


class SynthesizerAttention(nn.Module):
    r"""Multi-head Synthesizer for sequences of at most `max_length` tokens, without biases.

    `source` is where the logits come from: a name of `SOURCES`, a `LogitSource` of these sizes, or several of either.
    A shorter sequence uses the first positions. W_V and W_O (`weight_v`, `weight_o`, stored as in `torch.nn.Linear`)
    are always trained.

    Several sources are mixed, $\sum_i \alpha_i S_i$, with a trained share for each; the shares sum to 1 (Tay et al.
    2021, section 3). They are the softmax of `mixing`, the same for all heads and equal at first; for two sources this
    is the sigmoid of the authors' code.

    With `head_dim` there may be any number of heads, each of that width: W_V is (H K, d) and W_O (d, H K). Their
    entries start with the variance of a layer whose heads together are as wide as x. Sources must then depend on
    positions alone ("random", "fixed-random", "factored-random"); a source module has H K as its d_model.

    Raises TypeError or ValueError, naming the argument, for sizes below 1, for d_model not divisible by num_heads, for
    unknown sources or sources of other sizes, and for a source that looks at the tokens if `head_dim` is given.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        max_length: int,
        *,
        source: str | LogitSource | Sequence[str | LogitSource] = "random",
        head_dim: int | None = None,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.d_model, self.num_heads, self.head_dim = head_sizes(d_model, num_heads, head_dim)
        self.max_length = checks.positive_int("max_length", max_length)
        options: dict[str, Any] = {"generator": generator, "dtype": dtype, "device": device}
        given = [source] if isinstance(source, str | LogitSource) else source
        checks.expect(given, "source", "at least one", "none")
        self.sources = nn.ModuleList(self._source(one, options) for one in given)
        mixed = len(self.sources) > 1
        self.mixing = nn.Parameter(torch.zeros(len(self.sources), dtype=dtype, device=device)) if mixed else None
        if head_dim is not None:
            by_position(type(one) for one in self._sources())
        width, fans = self.num_heads * self.head_dim, None if head_dim is None else 2 * d_model
        self.weight_v = new_weight(width, d_model, fans=fans, **options)
        self.weight_o = new_weight(d_model, width, fans=fans, **options)

    def _source(self, source: str | LogitSource, options: dict[str, Any]) -> LogitSource:
        """The source of that name, or the given one if it has the layer's sizes."""
        sizes = (self.num_heads * self.head_dim, self.num_heads, self.max_length)
        if not isinstance(source, LogitSource):
            return SOURCES[checks.one_of("source", source, SOURCES)](*sizes, **options)
        got = (source.d_model, source.num_heads, source.max_length)
        checks.expect(got == sizes, "source", f"(d_model, num_heads, max_length) = {sizes}", f"{got} ({source.name})")
        return source

    def forward(
        self,
        x: Float[Tensor, "B N d"],
        *,
        attn_mask: Bool[Tensor, "..."] | None = None,
        key_padding_mask: Bool[Tensor, "B M"] | None = None,
        is_causal: bool = False,
        initial_state: State | None = None,
        return_state: bool = False,
    ) -> Float[Tensor, "B N d"] | tuple[Float[Tensor, "B N d"], State]:
        """x (B, N, d) -> (B, N, d).

        `attn_mask` broadcasts to (B, H, N, N), True = may attend, and `key_padding_mask` is (B, N), True = padding; a
        row with nothing to attend to gives zeros.
        `initial_state` holds the values (B, H, P, K) of P earlier tokens and what the sources carry, each of that
        shape; the mask then spans them too. With `return_state` the result is (y, state). Raises TypeError or
        ValueError for arguments that do not fit, and for more than `max_length` tokens, earlier ones included.
        """
        state = self._state(x, initial_state)
        v = state[0]
        attn_mask = checks.layer_mask(attn_mask, key_padding_mask, len(x), self.num_heads, x.shape[1], v.shape[2])
        weights = self._weights(x, state, attn_mask, is_causal)
        with no_autocast(x):
            o = self._read(weights, v.to(weights.dtype))
        y = linear(o.to(v.dtype), self.weight_o)
        return (y, state) if return_state else y

    @staticmethod
    def _read(weights: Float[Tensor, "b H N M"], v: Float[Tensor, "B H M K"]) -> Float[Tensor, "B N d"]:
        """The heads' outputs side by side."""
        if len(weights) == 1:  # one matrix a head for the batch, whose items are columns of one product
            columns = v.permute(1, 2, 0, 3)  # (H, M, B, K)
            o = (weights[0] @ columns.flatten(2)).unflatten(2, columns.shape[2:]).permute(2, 1, 0, 3)  # (B, N, H, K)
        else:
            o = (weights @ v).transpose(1, 2)
        return o.flatten(2)

    def weights(
        self, x: Float[Tensor, "B N d"], *, attn_mask: Bool[Tensor, "..."] | None = None, is_causal: bool = False
    ) -> Float[Tensor, "b H N N"]:
        """The attention weights (B, H, N, N), in float32 at least; (1, H, N, N) if they are the same for all items of
        the batch."""
        return self._weights(x, self._state(x, None), attn_mask, is_causal)

    def _state(self, x: Tensor, past: State | None) -> State:
        """The values, and what the sources carry, for these tokens after those of the past: (B, H, M, K) each."""
        checks.sequence("x", x, self.d_model)
        new = [split_heads(linear(x, self.weight_v), self.num_heads)]  # (B, H, N, K)
        for source in self._sources():
            new += source.state(x)
        if past is None:
            joined = tuple(new)
        else:
            joined = tuple(torch.cat(pair, 2) for pair in zip(self._past(past, new[0]), new, strict=True))
        if joined[0].shape[2] > self.max_length:
            raise ValueError(f"x: expected at most {self.max_length} tokens, got {joined[0].shape[2]}")
        return joined

    def _past(self, state: State, v: Tensor) -> State:
        names = ["values", *(name for source in self._sources() for name in source.carries)]
        state = checks.state(state, *names)
        shape = (*v.shape[:2], state[0].shape[2], v.shape[3])
        return tuple(checks.carried(name, part, shape, v) for name, part in zip(names, state, strict=True))

    def _weights(self, x: Tensor, state: State, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
        queries, keys = x.shape[1], state[0].shape[2]
        if attn_mask is not None:
            checks.mask(attn_mask, (len(x), self.num_heads, queries, keys))
        blocked = blocked_pairs(queries, keys, is_causal, attn_mask, x.device)
        logits = self._logits(x, keys, state[1:])
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return masked_softmax(logits, blocked, empty_rows=attn_mask is not None)

    def _logits(self, x: Tensor, keys: int, carried: State) -> Tensor:
        """The mixture of the sources' logits, (B or 1, H, N, keys)."""
        shares = [None] if self.mixing is None else self.mixing.softmax(0)
        logits = []
        for source, share in zip(self._sources(), shares, strict=True):
            own, carried = carried[: len(source.carries)], carried[len(source.carries) :]
            logits.append(source.logits(x, Seen(keys, own), share))
        return reduce(torch.add, logits)

    def _sources(self) -> list[LogitSource]:
        return cast(list[LogitSource], list(self.sources))

    def extra_repr(self) -> str:
        width = "" if self.num_heads * self.head_dim == self.d_model else f", head_dim={self.head_dim}"
        return f"d_model={self.d_model}, num_heads={self.num_heads}, max_length={self.max_length}{width}"


def by_position(sources: Iterable[type[LogitSource]]) -> None:
    """Raise ValueError for a source that looks at the tokens: it splits its results into heads of width d/H."""
    for source in sources:
        checks.expect(not source.by_token, "source", "sources by position beside head_dim", repr(source.name))
