r"""The feed-forward network of a Transformer block, and mixtures of experts.

In a mixture of experts a router sends each token through a few of several feed-forward networks. With router weights
$W_r$ a token x has the probabilities $p = \mathrm{softmax}(x W_r)$, and its output is
$\sum_{e \in T} g_e\, f_e(x)$ over the k most probable experts T (Shazeer et al. 2017, arXiv:1701.06538). For k = 1 the
gate is $g_e = p_e$ (Fedus et al. 2021, arXiv:2101.03961, equation 2); for larger k the gates are the $p_e$ divided by
their sum (Jiang et al. 2024, arXiv:2401.04088).

An expert may have room for only some tokens of a sequence. Here places are taken in the order of tokens, so that no
later token takes the place of an earlier one. (Lepikhin et al. 2020, arXiv:2006.16668, give the first choices of all
tokens precedence over any second choice, so a later token can displace an earlier one.)
"""

from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, one_hot, silu

from ortho import checks
from ortho._typing import Bool, Float, Int
from ortho.attention.call import no_autocast
from ortho.heads import new_bias, new_weight


class FeedForward(nn.Module):
    r"""$\mathrm{GELU}(x W_1 + b_1)\, W_2 + b_2$ with hidden width `d_ff`, 4 d_model by default; b only with `bias`."""

    def __init__(
        self,
        d_model: int,
        d_ff: int | None = None,
        *,
        bias: bool = False,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        d_ff = 4 * d_model if d_ff is None else d_ff
        self.weight_up = new_weight(d_ff, d_model, generator=generator, dtype=dtype, device=device)
        self.weight_down = new_weight(d_model, d_ff, generator=generator, dtype=dtype, device=device)
        self.bias_up, self.bias_down = (new_bias(w) if bias else None for w in (self.weight_up, self.weight_down))

    def forward(self, x: Float[Tensor, "B N d"]) -> Float[Tensor, "B N d"]:
        """x (B, N, d) -> (B, N, d)."""
        return linear(gelu(linear(x, self.weight_up, self.bias_up)), self.weight_down, self.bias_down)


class GatedFeedForward(nn.Module):
    r"""$(\mathrm{SiLU}(x W_g) \odot x W_1)\, W_2$ with hidden width `d_ff`, no biases (Shazeer 2020, arXiv:2002.05202).

    It has three matrices where `FeedForward` has two. By default its hidden width is 2/3 of that layer's, for the same
    number of parameters.
    """

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
        d_ff = 8 * d_model // 3 if d_ff is None else d_ff
        kind: dict[str, Any] = {"generator": generator, "dtype": dtype, "device": device}
        self.weight_gate = new_weight(d_ff, d_model, **kind)
        self.weight_up = new_weight(d_ff, d_model, **kind)
        self.weight_down = new_weight(d_model, d_ff, **kind)

    def forward(self, x: Float[Tensor, "B N d"]) -> Float[Tensor, "B N d"]:
        """x (B, N, d) -> (B, N, d)."""
        return _network(x, self.weight_up, self.weight_down, self.weight_gate)


class Routing(NamedTuple):
    """What a router did with the tokens of B sequences."""

    probabilities: Float[Tensor, "B N E"]
    experts: Int[Tensor, "B N k"]  # picked, the most probable first
    kept: Bool[Tensor, "B N k"]  # whether there was room

    @property
    def dropped(self) -> int:
        """The number of pairs of a token and a picked expert without room for it."""
        return int((~self.kept).sum())

    @property
    def load(self) -> Int[Tensor, "E"]:
        """The number of tokens that each expert computes."""
        return torch.bincount(self.experts[self.kept], minlength=self.probabilities.shape[-1])

    @property
    def balance_loss(self) -> Float[Tensor, ""]:
        r"""$E \sum_e f_e P_e$, with $f_e$ the share of pairs that picked expert e, and $P_e$ its mean probability.

        It is 1 if either is uniform (Fedus et al. 2021, equation 4, here for any k). Gradients reach P only.
        """
        E = self.probabilities.shape[-1]
        picked = torch.bincount(self.experts.flatten(), minlength=E) / self.experts.numel()
        return E * (picked.to(self.probabilities) * self.probabilities.flatten(0, -2).mean(0)).sum()


class MixtureOfExperts(nn.Module):
    """`num_experts` networks of hidden width `d_ff`, of which a router picks `top_k` for each token.

    Each network is a `FeedForward`, or with `gated` a `GatedFeedForward`. With a `capacity_factor` c each expert has
    room for ceil(c top_k N / num_experts) of the N tokens of a sequence; a pair of token and expert without room adds
    nothing. Without the factor no pair is dropped. The room depends on N, so the dropped pairs reveal to a causal
    model the length of its sequence, but nothing else about later tokens.

    In the `form` "reference" all experts compute all tokens, weighted by gates that are mostly 0; "fast" computes only
    the pairs that are kept. Raises TypeError or ValueError, naming the argument, for `top_k` above `num_experts` and
    for sizes below 1.
    """

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        *,
        top_k: int = 2,
        d_ff: int | None = None,
        gated: bool = False,
        capacity_factor: float | None = None,
        form: str = "fast",
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        d_ff = 4 * d_model if d_ff is None else d_ff
        checks.positive_int("top_k", top_k)
        checks.expect(top_k <= num_experts, "top_k", f"at most num_experts = {num_experts}", top_k)
        if capacity_factor is not None and capacity_factor <= 0:
            raise ValueError(f"capacity_factor: expected a positive number, got {capacity_factor}")
        self.d_model, self.num_experts, self.top_k = d_model, num_experts, top_k
        self.capacity_factor, self.form = capacity_factor, form
        kind: dict[str, Any] = {"generator": generator, "dtype": dtype, "device": device}

        def stacked(rows: int, columns: int) -> nn.Parameter:
            return nn.Parameter(torch.stack([new_weight(rows, columns, **kind).detach() for _ in range(num_experts)]))

        self.weight_router = new_weight(num_experts, d_model, **kind)
        self.weight_gate = stacked(d_ff, d_model) if gated else None
        self.weight_up = stacked(d_ff, d_model)
        self.weight_down = stacked(d_model, d_ff)

    def route(self, x: Float[Tensor, "B N d"]) -> Routing:
        """Which experts each token picks, and which of them have room for it."""
        with no_autocast(x):  # a close choice is not left to half precision
            working = torch.promote_types(x.dtype, torch.float32)
            probabilities = linear(x.to(working), self.weight_router.to(working)).softmax(-1)
        experts = probabilities.topk(self.top_k).indices
        return Routing(probabilities, experts, self._has_room(experts))

    def forward(
        self, x: Float[Tensor, "B N d"], *, return_routing: bool = False
    ) -> Float[Tensor, "B N d"] | tuple[Float[Tensor, "B N d"], Routing]:
        """x (B, N, d) -> (B, N, d), or (y, `Routing`), whose `balance_loss` should be added to the loss."""
        routing = self.route(x)
        gates = routing.probabilities.gather(-1, routing.experts)
        if self.top_k > 1:
            gates = gates / gates.sum(-1, keepdim=True)
        gates = (gates * routing.kept).to(x.dtype)
        y = (self._all if self.form == "reference" else self._picked)(x, routing, gates)
        return (y, routing) if return_routing else y

    def _has_room(self, experts: Int[Tensor, "B N k"]) -> Bool[Tensor, "B N k"]:
        if self.capacity_factor is None:
            return torch.ones_like(experts, dtype=torch.bool)
        checks.untraced("the room of an expert")
        B, N, k = experts.shape
        capacity = ceil(round(self.capacity_factor * k * N / self.num_experts, 9))  # 11.000000000000002 is 11
        asked = one_hot(experts.flatten(1), self.num_experts)  # (B, N k, E), a token's choices one after the other
        before = (asked.cumsum(1) - asked).gather(-1, experts.flatten(1)[..., None])
        return (before < capacity).view(B, N, k)

    def _expert(self, x: Float[Tensor, "*batch d"], number: int) -> Float[Tensor, "*batch d"]:
        gate = None if self.weight_gate is None else self.weight_gate[number]
        return _network(x, self.weight_up[number], self.weight_down[number], gate)

    def _all(self, x: Float[Tensor, "B N d"], routing: Routing, gates: Tensor) -> Float[Tensor, "B N d"]:
        outputs = torch.stack([self._expert(x, e) for e in range(self.num_experts)], -2)  # (B, N, E, d)
        picked = routing.experts[..., None] == torch.arange(self.num_experts, device=x.device)  # (B, N, k, E)
        weights = (gates[..., None] * picked).sum(-2)
        return (weights[..., None] * outputs).sum(-2)

    def _picked(self, x: Float[Tensor, "B N d"], routing: Routing, gates: Tensor) -> Float[Tensor, "B N d"]:
        tokens, weights = x.flatten(0, 1), gates.flatten()
        y = torch.zeros_like(tokens)
        for number in range(self.num_experts):
            pairs = (routing.kept & (routing.experts == number)).flatten().nonzero()[:, 0]
            rows = pairs // self.top_k
            output = self._expert(tokens.index_select(0, rows), number)
            y = y.index_add(0, rows, weights.index_select(0, pairs)[:, None] * output)
        return y.view_as(x)

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, top_k={self.top_k}, capacity_factor={self.capacity_factor}"


def _network(x: Tensor, up: Tensor, down: Tensor, gate: Tensor | None) -> Tensor:
    hidden = gelu(linear(x, up)) if gate is None else silu(linear(x, gate)) * linear(x, up)
    return linear(hidden, down)
