r"""S3, section 3, improvement 3: a delta rule beside the attention that makes a bias for its scores.

The source's module is given "some form of position id embedding", and its bias is to be dynamic, unlike ALiBi's. The
source does not say how a state becomes a bias for a pair; `ortho.attention.position_bias.position_delta` is one answer.
"""

from collections.abc import Callable
from functools import partial
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from ortho.attention.position_bias.alibi import alibi_attention_reference, slopes
from ortho.attention.position_bias.path_attention import Reflections, path_attention_reference, reflected_scores
from ortho.attention.position_bias.position_delta import position_delta_attention_reference
from ortho.attention.recurrent.delta import delta_rule_reference
from ortho.attention.scores import unit
from paper.claims.evidence.gates_and_losses import OVERWRITTEN as BEYOND
from paper.claims.evidence.gates_and_losses import more_right
from paper.claims.ledger import evidence
from paper.claims.rules import all_of, holds, region
from paper.claims.shared.common import normal, relative_error
from paper.claims.verdicts import Finding, Parts

CHAPTER = "14-positions"

RIVALS = {"softmax": "no bias", "alibi": "ALiBi"}
LENGTH, WIDTH, INPUT = 40, 4, 16
# Relative, in float64: forty steps that enlarge no error, with sums of four terms each, after exponentials of scores up
# to 10.
EXACT = 1e-11
SHARES = (1, 100)  # per cent: the source says that the bias is dynamic, but not how much of it


def gates(x: Tensor) -> dict[str, Tensor]:
    """What trained gates would make of x (N, INPUT): u, u' and w of the width `WIDTH`, and a strength in (0, 2)."""
    maps = normal(4, INPUT, WIDTH, seed=1) / sqrt(INPUT)
    u, u_keys, w, strength = x @ maps
    return {"bias_queries": u, "bias_keys": u_keys, "directions": w, "beta": 2 * strength[:, 0].sigmoid()}


def weights(attend: Callable[..., Any], **operands: Tensor) -> Tensor:
    """The weights (N, N): the output of a form of attention if the values are the unit vectors."""
    found: Tensor = attend(v=torch.eye(operands["q"].shape[0], dtype=torch.float64), is_causal=True, **operands)
    return found


def bias(*, bias_queries: Tensor, bias_keys: Tensor, directions: Tensor, beta: Tensor) -> Tensor:
    """The bias (N, N) that gates (N, D), and beta (N,), add to the scores; 0 above the diagonal."""
    reflections = Reflections(unit(directions), beta)
    found, _ = reflected_scores(bias_queries, bias_keys, reflections, bias_keys[:0])
    return found / sqrt(bias_queries.shape[-1])


def unlike_delta_rule() -> float:
    r"""The relative difference between the weights and those with a bias from a delta rule, for $u' = \beta w$.

    Its keys are the w, its queries the u, and its values the unit vectors, one a token, so that its output for a token
    is a number for each token before: a row of the bias.
    """
    made = gates(normal(LENGTH, INPUT, seed=2))
    q, k = normal(2, LENGTH, WIDTH, seed=3)
    w, beta = unit(made["directions"]), made["beta"]
    made["bias_keys"] = beta[:, None] * w
    memory = partial(delta_rule_reference, beta=beta, qk_l2norm=False)
    expected = of_the_past((q @ k.T + weights(memory, q=made["bias_queries"], k=w)) / sqrt(WIDTH))
    return relative_error(weights(position_delta_attention_reference, q=q, k=k, **made), expected)


def alibi_vectors(length: int, slope: float) -> dict[str, Tensor]:
    """The u and u' of ALiBi's bias -m (i - j), two numbers each, made of the positions."""
    places, ones = torch.arange(length, dtype=torch.float64), torch.ones(length, dtype=torch.float64)
    queries = sqrt(2) * slope * torch.stack([-places, ones], -1)
    return {"bias_queries": queries, "bias_keys": torch.stack([ones, places], -1)}


def unlike_alibi() -> float:
    """The relative difference between ALiBi's weights and those with `alibi_vectors`' bias, without reflections."""
    q, k = normal(2, LENGTH, WIDTH, seed=3)
    found = weights(position_delta_attention_reference, q=q, k=k, **alibi_vectors(LENGTH, *slopes(1)))
    return relative_error(found, weights(alibi_attention_reference, q=q, k=k))


def changed(of: str) -> float:
    """Per cent of the biases on earlier tokens that change with the input, if gates are made of the 'tokens' alone, of
    'positions' alone, or of their 'sum'."""
    places = normal(LENGTH, INPUT, seed=4)
    inputs = normal(2, LENGTH, INPUT, seed=5)
    made = {"tokens": inputs, "positions": places.expand_as(inputs), "sum": inputs + places}[of]
    return share_of_others(*(bias(**gates(x)) for x in made))


def share_of_others(one: Tensor, other: Tensor) -> float:
    """Per cent of the entries for earlier tokens that differ."""
    below = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(-1)
    return round(100 * float(((one - other).abs() > EXACT)[below].double().mean()), 1)


def of_the_past(scores: Tensor) -> Tensor:
    """The softmax of the scores up to each token."""
    return scores.masked_fill(torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)


def unlike_path() -> float:
    """The relative difference between PaTH's weights and those of scores that a delta rule gives.

    The score of token i at key j is what its query reads from a memory that holds key j alone, after the tokens between
    have erased by their directions and written nothing.
    """
    q, k = normal(2, LENGTH, WIDTH, seed=3)
    made = gates(normal(LENGTH, INPUT, seed=2))
    w, beta = made["directions"], made["beta"]
    scores = torch.diag((q * k).sum(-1))
    for j in range(LENGTH - 1):
        behind, empty = slice(j + 1, None), torch.zeros(LENGTH - 1 - j, 1, dtype=q.dtype)
        held = (k[j][:, None],)
        options: dict[str, Any] = {"beta": beta[behind], "qk_l2norm": False, "is_causal": True, "initial_state": held}
        read: Any = delta_rule_reference(q[behind], unit(w[behind]), empty, **options)
        scores[behind, j] = read[:, 0]
    found = weights(path_attention_reference, q=q, k=k, directions=w, beta=beta)
    return relative_error(found, of_the_past(scores / sqrt(WIDTH)))


def moved_by_content() -> float:
    """Per cent of PaTH's weights on earlier tokens that change if only its directions are made of another input."""
    q, k = normal(2, LENGTH, WIDTH, seed=3)
    made = (gates(x) for x in normal(2, LENGTH, INPUT, seed=5))
    return share_of_others(
        *(weights(path_attention_reference, q=q, k=k, directions=x["directions"], beta=x["beta"]) for x in made)
    )


@evidence("S3.3j", chapter=CHAPTER)
def delta_rule_in_positions() -> Parts:
    return {
        "PaTH's scores": holds("what a delta rule reads, tokens between erasing", unlike_path(), EXACT),
        "made of the content, weights that other directions change": region(
            SHARES, {"": moved_by_content()}, unit=" %"
        ),
    }


@evidence("S3.3d", chapter=CHAPTER)
def position_delta_net() -> Finding:
    return all_of(
        {
            "the bias": holds(
                "for $u' = \\beta w$, the output of a delta rule whose values are the unit vectors, one a token",
                unlike_delta_rule(),
                EXACT,
            ),
            "ALiBi's": holds("a case of it, with vectors made of positions", unlike_alibi(), EXACT),
            "dynamic, share of the biases that another input changes": region(
                SHARES,
                {
                    "gates made of tokens": changed("tokens"),
                    "gates made of tokens and position embeddings": changed("sum"),
                    "gates made of position embeddings alone": changed("positions"),
                },
                unit=" %",
            ),
        }
        | {
            f"trained on the flip-flop language, against {other}": more_right(
                f"right beyond the lengths of training more often than with {other}",
                "flip-flop",
                "position-delta",
                arm,
                BEYOND,
            )
            for arm, other in RIVALS.items()
        }
    )
