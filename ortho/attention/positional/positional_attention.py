r"""Attention by position: each head has a fixed pattern of weights, without queries and keys.

Raganato, Scherrer & Tiedemann 2020 (arXiv:2002.10260) multiply by N x N matrices; the fast form uses shifts and running
sums, in time and memory linear in N. Sums of cubes reach 2.5e19 at N = 1e5, so they are taken in float64, and each row
is divided by its own sum.
"""

from collections.abc import Sequence
from itertools import product

import torch

from ortho import checks
from ortho._typing import Bool, Float, Int, State, Tensor
from ortho.attention.call import no_autocast
from ortho.attention.positional.patterns import PATTERNS, SEVEN, PositionalPattern, added, times
from ortho.attention.positional.places import NONE, Places, places, word_starts

__all__ = ["PATTERNS", "SEVEN", "PositionalPattern", "positional_attention", "positional_attention_reference"]


def positional_attention_reference(
    v: Float[Tensor, "*batch H N V"],
    patterns: Sequence[PositionalPattern | str],
    *,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    words: Int[Tensor, "... N"] | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
) -> Float[Tensor, "*batch H N V"] | tuple[Float[Tensor, "*batch H N V"], State]:
    """v (..., H, N, V) -> (..., H, N, V): the N x N matrix of each head's pattern, materialised, times its values.

    `patterns` has a pattern for each head, or its name in `PATTERNS`. `attn_mask` is a mask of keys, True = there, that
    broadcasts to (..., H, 1, N). A token that is not there has a row of zeros and no position. The others stand at
    their rank among those that are there, so padding, wherever it is, acts as if cut out. A row without any
    weight is zeros.

    `words` (..., N) gives each token the number of its word, at least 0 and not falling. As in the paper's word
    variant, the sub-words of a word share its pattern: positions are those of words. A word's weight is divided evenly
    among its tokens, so that rows keep their sums; that is a choice made here. A causal call has no words, since the
    tokens of a word that has begun are not all known.

    A causal call can be cut anywhere. The state here is (values, positions): all values so far (..., H, M, V), and
    their positions (..., h, M), h = 1 or H. Raises TypeError or ValueError, naming the argument, for arguments that do
    not fit together, and for a state in a call that is not causal. The mask is one of the new tokens.
    """
    there = _operands(v, patterns, is_causal, attn_mask, words, initial_state, return_state)
    patterns = named(patterns)
    lead, (H, N, _) = v.shape[:-3], v.shape[-3:]
    h = 1 if there is None else there.shape[-2]
    values, position = v, v.new_full((*lead, h, 0), NONE).long()
    if initial_state is not None:
        past, position = checks.state(initial_state, "values", "positions")
        earlier, own = past.shape[-2], H if position.shape[-2:-1] == (H,) else 1
        checks.carried("values", past, (*lead, H, earlier, v.shape[-1]), v)
        checks.carried("positions", position, (*lead, own, earlier), v.new_empty(0).long())
        h = max(h, own)  # heads with masks of their own, now or in an earlier call
        position, values = position.expand(*lead, h, -1), torch.cat([past, v], -2)
    there = torch.ones(*lead, h, N, dtype=torch.bool, device=v.device) if there is None else there.expand(*lead, h, N)
    starts = there if words is None else word_starts(words, there)
    before = position.amax(-1, keepdim=True) if position.shape[-1] else NONE
    position = torch.cat([position, (before + starts.cumsum(-1)).masked_fill(~there, NONE)], -1)
    heads = torch.zeros_like(v, dtype=torch.float64)
    with no_autocast(v):
        for item in product(*map(range, (*lead, H))):
            at = position[*item[:-1], min(item[-1], h - 1)]
            heads[item] = _matrix(patterns[item[-1]], at, N, is_causal).to(v.device) @ values[item].double()
    o = heads.to(v.dtype)
    return (o, (values, position)) if return_state else o


def _matrix(pattern: PositionalPattern, position: Int[Tensor, "M"], N: int, is_causal: bool) -> Float[Tensor, "N M"]:
    """The rows of the last N tokens. A position's weight is divided among those of its tokens that the row sees."""
    position = position.cpu()
    there = position != NONE
    if not there.any():
        return torch.zeros(N, len(position), dtype=torch.float64)
    seen = there.expand(len(position), -1)
    seen = seen.tril() if is_causal else seen
    same = position[:, None] == position
    sharing = (seen.double() @ same.double()).clamp(min=1)
    weights = pattern.weights(int(position.max()) + 1, is_causal=is_causal)
    at = position.clamp(min=0)
    return (weights[at][:, at] * seen / sharing * there[:, None])[-N:]


def positional_attention(
    v: Float[Tensor, "*batch H N V"],
    patterns: Sequence[PositionalPattern | str],
    *,
    is_causal: bool = False,
    attn_mask: Bool[Tensor, "..."] | None = None,
    words: Int[Tensor, "... N"] | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
) -> Float[Tensor, "*batch H N V"] | tuple[Float[Tensor, "*batch H N V"], State]:
    """`positional_attention_reference` without an N x N matrix, in time and memory O(N d) for given patterns.

    A `Near` takes O((N + D) d) if its furthest distance is D.

    Takes the same. The state is (values, sums, position), whose size does not depend on how many tokens came before:
    the last token's values (..., H, V) and the patterns' sums over what is before it, (..., V, vectors), both float64;
    and its position (..., h).
    """
    checks.untraced("positional_attention")
    there = _operands(v, patterns, is_causal, attn_mask, words, initial_state, return_state)
    patterns = named(patterns)
    lead, N = v.shape[:-3], v.shape[-2]
    sizes = [pattern.vectors for pattern in patterns]
    values, sums, before = _before(v, sum(sizes), initial_state)
    # Heads with masks of their own, now or in an earlier call.
    apart = (there is not None and there.shape[-2] > 1) or (before is not None and before.shape[-1] > 1)
    heads, lasts, vectors = [], [], [sums[..., :0]]
    with no_autocast(v):
        where = places(N, lead, v.device, is_causal=is_causal, present=there, words=words, before=before)
        runs = _runs(patterns, apart)
        parts = v.split([count for _, _, count in runs], -3)
        for (h, pattern, count), x in zip(runs, parts, strict=True):
            x = x.mT.flatten(-3, -2)  # (..., count V, N): equal heads are one wide head
            x = x.to(torch.float64 if pattern.wide else torch.promote_types(v.dtype, torch.float32))
            at = where.head(h, len(lead))
            if is_causal:
                previous = values[..., h : h + count, :].flatten(-2)
                own_sums = sums[..., sum(sizes[:h]) : sum(sizes[: h + count])]
                own_sums = own_sums.unflatten(-1, (count, pattern.vectors)).movedim(-2, -3).flatten(-3, -2)
                o, last, found = _causal(pattern, x, at, previous.to(x), own_sums.to(x))
                lasts.append(last.double().unflatten(-1, (count, -1)))
                if found:
                    vector = torch.stack(found, -1).double().unflatten(-2, (count, -1))  # (..., count, V, memory)
                    vectors.append(vector.movedim(-3, -2).flatten(-2))
            else:
                o = _whole(pattern, x, at)
            heads.append(at.kept(o).to(v.dtype).unflatten(-2, (count, -1)))
        o = torch.cat(heads, -3).mT
    if not return_state:
        return o
    position = where.last.expand(torch.broadcast_shapes(where.last.shape, (*lead, 1)))
    return o, (torch.cat(lasts, -2), torch.cat(vectors, -1), position)


def _runs(patterns: Sequence[PositionalPattern], apart: bool) -> list[tuple[int, PositionalPattern, int]]:
    """Runs of adjacent heads with equal patterns: the first head, the pattern, and the number of heads."""
    runs: list[tuple[int, PositionalPattern, int]] = []
    for head, pattern in enumerate(patterns):
        if runs and not apart and pattern == runs[-1][1]:
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        else:
            runs.append((head, pattern, 1))
    return runs


def _whole(pattern: PositionalPattern, x: Tensor, at: Places) -> Tensor:
    """One head's rows (..., V, N), each of which sees all positions, from x (..., V, N)."""
    r = at.r
    after, u = at.after(r), at.pool(x, None)
    sums, total = pattern.whole(u, r, after, at.mirror), pattern.total(r, after)
    means = sums if total is None else sums / total.to(x.dtype)
    return at.spread(means)


def _causal(
    pattern: PositionalPattern, x: Tensor, at: Places, previous: Tensor, sums: Tensor
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """One head's rows (..., V, N), which see the positions up to their own, from x (..., V, N); and at the last token's
    position, its values and the vectors for what lies before it, each (..., V)."""
    r = at.r
    u, total = at.pool(x, previous), pattern.total(r, at.after(r))
    behind, vectors = pattern.behind(u, sums, r) if pattern.vectors else (None, [])
    rows = added(u, behind, times(pattern.own(r), u))
    rows = rows if total is None else rows / total.to(x.dtype)
    return at.spread(rows), at.at_last(u), [at.at_last(vector) for vector in vectors]


def _before(v: Tensor, vectors: int, initial_state: State | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The state's parts, or their values at the start of a sequence."""
    lead, (H, _, V) = v.shape[:-3], v.shape[-3:]
    shapes = (*lead, H, V), (*lead, V, vectors)
    if initial_state is None:
        values, sums = (v.new_zeros(shape, dtype=torch.float64) for shape in shapes)
        return values, sums, None
    values, sums, position = checks.state(initial_state, "values", "sums", "position")
    like = v.new_empty(0, dtype=torch.float64)
    checks.carried("values", values, shapes[0], like)
    checks.carried("sums", sums, shapes[1], like)
    checks.carried("position", position, (*lead, H if position.shape[-1:] == (H,) else 1), like.long())
    return values, sums, position


def _operands(
    v: Tensor,
    patterns: Sequence[PositionalPattern | str],
    is_causal: bool,
    attn_mask: Tensor | None,
    words: Tensor | None,
    initial_state: State | None,
    return_state: bool,
) -> Tensor | None:
    """Raise unless the arguments fit together; return which tokens are there, (..., 1 or H, N), None if all are."""
    if v.dim() < 3 or 0 in v.shape:
        raise ValueError(f"v: expected shape (..., H, N, V) without empty axes, got {tuple(v.shape)}")
    H, N = v.shape[-3:-1]
    checks.expect(len(named(patterns)) == H, "patterns", f"one for each of {H} heads", len(patterns))
    for name, asked in (("initial_state", initial_state is not None), ("return_state", return_state)):
        wanted = "none in a call that is not causal, which sees what follows"
        checks.expect(is_causal or not asked, name, wanted, "one")
    wanted = "None in a causal call, where words are not yet whole"
    checks.expect(words is None or not is_causal, "words", wanted, "some")
    if words is not None and words.shape != (*v.shape[:-3], N):
        raise ValueError(f"words: expected shape {(*v.shape[:-3], N)}, got {tuple(words.shape)}")
    if attn_mask is None:
        return None
    checks.mask(attn_mask, (*v.shape[:-1], N))
    checks.mask_of_keys(attn_mask, N)
    there = attn_mask.expand(*v.shape[:-2], 1, N)[..., 0, :]
    return there if attn_mask.dim() > 2 and attn_mask.shape[-3] > 1 else there[..., :1, :]


def named(patterns: Sequence[PositionalPattern | str]) -> tuple[PositionalPattern, ...]:
    """The patterns, with names replaced by those of `PATTERNS`. Raises ValueError for an unknown name."""
    return tuple(PATTERNS[checks.one_of("patterns", p, PATTERNS)] if isinstance(p, str) else p for p in patterns)
