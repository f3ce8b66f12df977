r"""S0, section 2: what freezing $W_Q$ and $W_K$ takes out of the layer's work, and what it leaves there."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import sympy
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ortho.attention import softmax_attention_reference
from ortho.cost import block, layer, of
from ortho.cost.big_o import H, N, d
from ortho.cost.counting import optimiser_bytes
from ortho.layers.multihead import MultiheadAttention
from paper.claims.figures import percent, show
from paper.claims.ledger import evidence, evidence_table
from paper.claims.rules import all_of, contradiction, counted, growth, growth_where, holds, printed, region
from paper.claims.shared.common import seeded
from paper.claims.verdicts import Finding, Parts
from paper.elementwise import formulas

CHAPTER = "02-what-freezing-removes"

# --------------------------------------------------- which products the backward pass holds, read off autograd's graph

# The gradients of the two operands of each product of the forward pass.
_WEIGHTED = {"weight_o": ("dO", "dW_O"), **{f"weight_{x}": (f"dX_{x.upper()}", f"dW_{x.upper()}") for x in "vqk"}}
_WITHIN = [("dP", "dV"), ("dQ", "dK")]  # P V, then Q K^T: from the output back
# What each is, and its FLOPs for one sequence. dX_Q is the part of dX that comes through Q. S is not a gradient; a
# fused kernel computes it a second time.
PRODUCTS = {
    "dW_O": (r"O^\top\,\mathrm{d}Y", 2 * N * d**2),
    "dO": (r"\mathrm{d}Y\,W_O^\top", 2 * N * d**2),
    "S": (r"Q K^\top", 2 * N**2 * d),
    "dV": (r"P^\top\,\mathrm{d}O", 2 * N**2 * d),
    "dP": (r"\mathrm{d}O\,V^\top", 2 * N**2 * d),
    "dQ": (r"\mathrm{d}S\,K", 2 * N**2 * d),
    "dK": (r"\mathrm{d}S^\top Q", 2 * N**2 * d),
    "dW_V": (r"X^\top\,\mathrm{d}V", 2 * N * d**2),
    "dX_V": (r"\mathrm{d}V\,W_V^\top", 2 * N * d**2),
    "dW_Q": (r"X^\top\,\mathrm{d}Q", 2 * N * d**2),
    "dX_Q": (r"\mathrm{d}Q\,W_Q^\top", 2 * N * d**2),
    "dW_K": (r"X^\top\,\mathrm{d}K", 2 * N * d**2),
    "dX_K": (r"\mathrm{d}K\,W_K^\top", 2 * N * d**2),
}


def graph(y: Tensor) -> list[Any]:
    """The nodes of autograd's graph of y, in the order in which a backward pass may reach them."""
    nodes, front = [], [y.grad_fn]
    while front:
        node = front.pop(0)
        if node is not None and node not in nodes:
            nodes.append(node)
            front += [below for below, _ in node.next_functions]
    return nodes


class _KernelOutputs(TorchDispatchMode):
    """Keeps what a fused attention kernel's backward pass hands to autograd: dq, dk, dv."""

    gradients: tuple[Tensor, ...] = ()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if "attention" in func.name() and "backward" in func.name():
            self.gradients = out[:3]
        return out


@cache
def backward_products(projection: str, *, form: str = "reference", input_grad: bool = True) -> dict[str, str]:
    """What becomes of each of `PRODUCTS` in a layer's backward pass, read off autograd's graph of a small layer.

    'used': an edge of the graph asks for the result. 'discarded': none does, but the fused kernel returns it all the
    same. 'absent': it is not computed.
    """
    generator = seeded()
    module = MultiheadAttention(4, 1, projection=projection, form=form, generator=generator, dtype=torch.float64)
    x = torch.randn(1, 3, 4, generator=generator, dtype=torch.float64).requires_grad_(input_grad)
    y = module(x)
    found = dict.fromkeys(PRODUCTS, "absent")

    def ask(names: tuple[str, ...], node: Any) -> None:
        found.update({name: "used" for name, (below, _) in zip(names, node.next_functions, strict=False) if below})

    within = list(_WITHIN)
    for node in graph(y):
        kind = node.name()
        if kind == "MmBackward0":
            ask(_WEIGHTED[_weight(node, module)], node)
        elif kind == "BmmBackward0":
            ask(within.pop(0), node)
        elif kind.startswith("ScaledDotProduct"):
            with _KernelOutputs() as kernel:
                trained = [weight for weight in module.parameters() if weight.requires_grad]
                torch.autograd.grad(y, trained, y.detach(), retain_graph=True)
            returned = zip(("dQ", "dK", "dV"), kernel.gradients, strict=True)
            found.update({name: "discarded" for name, gradient in returned if gradient.count_nonzero()})
            ask(("dQ", "dK", "dV"), node)
            found["S"], found["dP"] = "used", found["dQ"]  # dV needs the weights again, dQ and dK need dP
    return found


def _weight(node: Any, module: MultiheadAttention) -> str:
    """The name of the layer's matrix that is the right operand of a node's product."""
    below = node.next_functions[1][0]
    weight = below.next_functions[0][0].variable if below else node._saved_mat2  # trained: a leaf below the transpose
    found = next(name for name, known in module.named_parameters() if known.data_ptr() == weight.data_ptr())
    return found.rpartition(".")[2]


# ------------------------------------------------------------------------------------------------------------ the costs

r = sympy.Symbol("r", positive=True)  # N / d
STANDARD, FROZEN, STOPPED = (
    layer(1, N, d, H, projection=projection, form="reference") for projection in ("learned", "frozen", "stopped")
)


class ValuesLast(nn.Module):
    """A layer of softmax attention that averages tokens and maps them by W_V afterwards: (P X) W_V, not P (X W_V)."""

    def __init__(self, layer: MultiheadAttention) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """x (B, N, d) -> (B, N, d)."""
        made, heads = self.layer, self.layer.num_heads
        q, k = made.projection(x)
        mixed: Any = softmax_attention_reference(q, k, x[:, None].expand(-1, heads, -1, -1))  # P X: (B, H, N, d)
        o = mixed @ made.weight_v.unflatten(0, (heads, -1)).mT  # (B, H, N, d/H)
        return o.transpose(1, 2).flatten(2) @ made.weight_o.mT


# Work is a sum of these; counts at three sizes (N, d, H) give the three factors, and a count at a fourth checks them.
_TERMS = (N * d**2, N**2 * d, H * N**2 * d)
_RUNS, _HELD_OUT = ((3, 4, 1), (5, 4, 2), (4, 8, 2)), (7, 8, 4)


@cache
def backward_counted(order: str, *, projection: str = "frozen", input_grad: bool = True) -> sympy.Expr:
    """The backward FLOPs of a layer that evaluates "P (X W_V)" or "(P X) W_V", counted in small runs.

    Raises AssertionError if the counts are not of the form of `_TERMS`.
    """

    def counts(length: int, width: int, heads: int) -> int:
        made = MultiheadAttention(width, heads, projection=projection, form="reference")
        module = ValuesLast(made) if order == VALUES_LAST else made
        return of(module, torch.ones(1, length, width, requires_grad=input_grad)).backward

    def terms(run: tuple[int, ...]) -> list[sympy.Expr]:
        return [term.subs(dict(zip((N, d, H), run, strict=True))) for term in _TERMS]

    factors = sympy.Matrix([terms(run) for run in _RUNS]).solve(sympy.Matrix([counts(*run) for run in _RUNS]))
    assert sympy.Matrix(terms(_HELD_OUT)).dot(factors) == counts(*_HELD_OUT), f"{order}: counts of another form"
    return sympy.Matrix(_TERMS).dot(factors)


VALUES_FIRST, VALUES_LAST = "P (X W_V)", "(P X) W_V"
WANTED = {True: "gradient for $X$", False: "none for $X$"}


def backward_settings() -> dict[str, sympy.Expr]:
    """The backward FLOPs of ORA, by the order of evaluation and by whether X needs a gradient."""
    return {
        f"${order}$, {wanted}": backward_counted(order, input_grad=input_grad)
        for order in (VALUES_FIRST, VALUES_LAST)
        for input_grad, wanted in WANTED.items()
    }


def linear_backward() -> Finding:
    """Whether ORA's backward pass is O(N d^2): a statement that the source makes three times."""
    return growth_where("N*d^2", backward_settings()).noting(
        f"With the gradient through $Q$ and $K$ stopped and one for $X$: {show(STOPPED.backward)}"
    )


def _ratio(projection: str, quantity: str, **options: Any) -> Any:
    """A cost of a layer over the standard layer's, as a function of r = N/d."""
    variant, standard = (
        getattr(layer(1, N, d, H, projection=p, **options), quantity).subs(N, r * d) for p in (projection, "learned")
    )
    return sympy.factor(sympy.simplify(variant / standard))


def speed_up(projection: str, *, form: str = "reference", input_grad: bool = True) -> Any:
    """FLOPs of a standard layer's forward and backward pass over those of a variant, as a function of r = N/d."""
    return sympy.factor(1 / _ratio(projection, "step", form=form, input_grad=input_grad))


def saved_share(projection: str, *, form: str = "reference", input_grad: bool = True) -> Any:
    """The share of a standard layer's backward FLOPs that a variant saves, as a function of r = N/d."""
    return sympy.factor(1 - _ratio(projection, "backward", form=form, input_grad=input_grad))


def two_tokens(projection: str = "frozen") -> tuple[MultiheadAttention, Tensor, Tensor]:
    """(layer, x, dy): two tokens of width two, one head, and weights for which every gradient can be computed by hand.

    As the formulas write them (x W): W_Q and W_O are the identity, W_K a quarter turn, W_V = [[1, 1], [0, 1]].
    """
    module = MultiheadAttention(2, 1, projection=projection, form="reference", dtype=torch.float64)
    weights = {
        module.projection.weight_q: [[1, 0], [0, 1]],
        module.projection.weight_k: [[0, 1], [-1, 0]],
        module.weight_v: [[1, 1], [0, 1]],
        module.weight_o: [[1, 0], [0, 1]],
    }
    with torch.no_grad():
        for weight, values in weights.items():
            weight.copy_(torch.tensor(values).T)  # stored as in nn.Linear
    x = torch.tensor([[[1, 0], [1, 1]]], dtype=torch.float64, requires_grad=True)
    return module, x, torch.tensor([[[1, 0], [0, -1]]], dtype=torch.float64)


@dataclass(frozen=True)
class Trained:
    """What one step of AdamW does to a layer. `moved`: entries that it changed, by matrix."""

    trainable: int
    gradient_bytes: int
    optimiser_bytes: int
    moved: dict[str, int]
    orthogonality: float  # the largest entry of |W^T W - I|, W_Q and W_K, after the step


@cache
def train_once(projection: str, d_model: int = 64) -> Trained:
    """Build a layer, take one step of AdamW on a random batch and look at what there is afterwards."""
    generator = seeded()
    module = MultiheadAttention(d_model, 4, projection=projection, generator=generator, dtype=torch.float64)
    optimiser = torch.optim.AdamW(module.parameters())
    before = {name: weight.clone() for name, weight in module.state_dict().items()}
    x = torch.randn(1, 16, d_model, generator=generator, dtype=torch.float64)
    module(x).square().sum().backward()
    optimiser.step()
    gradients = [weight.grad for weight in module.parameters() if weight.grad is not None]
    identity = torch.eye(d_model, dtype=torch.float64)
    return Trained(
        trainable=sum(weight.numel() for weight in module.parameters() if weight.requires_grad),
        gradient_bytes=sum(gradient.nbytes for gradient in gradients),
        optimiser_bytes=optimiser_bytes(optimiser),
        moved={
            name.rpartition("weight_")[2].upper(): int((weight != before[name]).sum())
            for name, weight in module.state_dict().items()
        },
        orthogonality=max(
            float((w.detach().T @ w.detach() - identity).abs().max())
            for w in (module.projection.weight_q, module.projection.weight_k)
        ),
    )


def outside(projection: str) -> tuple[sympy.Expr, sympy.Expr]:
    """Scalar operations of a layer outside its products, forward and backward."""

    def build(_: int, width: int, heads: int, __: int) -> MultiheadAttention:
        return MultiheadAttention(width, heads, projection=projection, form="reference")

    return formulas(build, H * N**2, N * d)


# ----------------------------------------------------------------------------------------------------------- the claims


@evidence("S0.2.1a", chapter=CHAPTER)
def definition() -> Parts:
    d_model = 64
    step = train_once("frozen", d_model)
    # Householder's QR leaves a residual of this order in d and eps (Higham 2002, theorem 19.4).
    tolerance = d_model**1.5 * torch.finfo(torch.float64).eps
    return {
        "$W_Q, W_K$ at the start": holds("$W^\\top W = I$", step.orthogonality, tolerance),
        "entries that a training step changes": counted(
            {"$W_Q, W_K$": 0, "$W_V, W_O$": 2 * d_model**2},
            {"$W_Q, W_K$": step.moved["Q"] + step.moved["K"], "$W_V, W_O$": step.moved["V"] + step.moved["O"]},
        ),
    }


@evidence("S0.2.3a", chapter=CHAPTER)
def weight_gradients() -> Finding:
    module, x, dy = two_tokens()
    frozen = [module.projection.weight_q.requires_grad_(), module.projection.weight_k.requires_grad_()]
    derivatives = torch.autograd.grad(module(x), frozen, dy)
    off = min(float(derivative.abs().max()) for derivative in derivatives)
    products = backward_products("frozen")
    computed = sum(products[name] != "absent" for name in ("dW_Q", "dW_K"))
    to_o = sum(PRODUCTS[name][1] for name in ("dW_O", "dO"))
    # Without a gradient for X, all that is left of the backward pass computes dW_V from dO.
    values = {f"${order}$": backward_counted(order, input_grad=False) - to_o for order in (VALUES_FIRST, VALUES_LAST)}
    parts = {
        "value": holds(
            "$\\partial L/\\partial W_Q = 0$ and $\\partial L/\\partial W_K = 0$",
            off,
            8 * torch.finfo(torch.float64).eps,
            at="two tokens of width two",
        ),
        "products for $W_Q$ and $W_K$": counted({"": 0}, {"": computed}),
        "$\\partial L/\\partial W_V$, from $\\mathrm{d}O$ on": growth_where("N*d^2", values),
        "$\\partial L/\\partial W_O = O^\\top \\mathrm{d}Y$": growth("N*d^2", PRODUCTS["dW_O"][1]),
    }
    return all_of(parts).noting("The two derivatives are not computed, which is all that the saving needs")


@evidence("S0.2.3e", chapter=CHAPTER)
def share_in_words() -> Finding:
    shares = {"frozen": saved_share("frozen"), "frozen and stopped": saved_share("stopped")}
    formula = 100 * sympy.limit(1 / (1 + 1 / r), r, sympy.oo)  # the source's, for N >> d
    parts = {
        "$N \\gg d$": contradiction(
            ("the share saved is about 1", int(formula)), ("that is about 50 %", 50), unit=" %"
        ),
        "$N \\approx d$, of the backward pass": region(
            (45, 55), {name: float(100 * share.subs(r, 1)) for name, share in shares.items()}, unit=" %"
        ),
    }
    limits = {name: sympy.limit(share, r, sympy.oo) for name, share in shares.items()}
    return all_of(parts).noting(
        f"For $N \\gg d$ frozen saves {show(limits['frozen'])} and frozen and stopped "
        f"{percent(float(limits['frozen and stopped']))}; of the four weights' gradients alone, half at every $N$"
    )


@evidence("S0.2.4b", chapter=CHAPTER)
def halves() -> Finding:
    standard, frozen = train_once("learned"), train_once("frozen")
    pairs = {
        "trainable parameters": (standard.trainable, frozen.trainable),
        "gradients": (standard.gradient_bytes, frozen.gradient_bytes),
        "Adam's state": (standard.optimiser_bytes, frozen.optimiser_bytes),
        "entries updated": (sum(standard.moved.values()), sum(frozen.moved.values())),
    }
    whole = {projection: block(1, 1, 768, 12, projection=projection).trained for projection in ("learned", "frozen")}
    return printed(
        dict.fromkeys(pairs, "50"),
        {name: 100 * (1 - less / full) for name, (full, less) in pairs.items()},
        unit=" %",
    ).noting(
        "This is the attention layer alone; of a block with its feed-forward network it is "
        f"{percent(1 - whole['frozen'] / whole['learned'])}"
    )


@evidence("S0.4.1a", chapter=CHAPTER)
def half_the_gradients() -> Finding:
    share = saved_share("frozen")
    lengths = {"d/6": "1/6", "d": "1", "16d/3": "16/3"}  # at d = 768: 128, 768, 4096
    backward = {
        f"the backward pass at $N = {length}$": float(100 * share.subs(r, sympy.Rational(ratio)))
        for length, ratio in lengths.items()
    }
    products = [backward_products(projection) for projection in ("learned", "frozen")]
    full, less = (sum(p[f"dW_{name}"] == "used" for name in "QKVO") for p in products)
    weights = {"the four weights' gradients alone": 100 * (1 - less / full)}
    return region((50, 50), weights | backward, unit=" %").noting(
        f"Where X needs a gradient it is {show(100 * sympy.limit(share, r, 0))} % of the backward pass at most"
    )


evidence_table(
    CHAPTER,
    {
        "S0.2.2a": lambda: {
            "order": growth("N^2*d + N*d^2", FROZEN.forward + outside("frozen")[0]),
            "as the standard": counted({"FLOPs": STANDARD.forward}, {"FLOPs": FROZEN.forward}),
        },
        "S0.2.3b": lambda: growth("N^2*d + N*d^2", STANDARD.backward + outside("learned")[1]),
        "S0.2.3c": linear_backward,
        "S0.2.3d": lambda: counted(
            {"frozen": "1/(1 + d/N)", "frozen and stopped": "1/(1 + d/N)"},
            {
                "frozen": sympy.factor(1 - FROZEN.backward / STANDARD.backward),
                "frozen and stopped": sympy.factor(1 - STOPPED.backward / STANDARD.backward),
            },
        ),
        "S0.2.4a": lambda: counted(
            {"standard, trained": "4*d^2", "ORA, trained": "2*d^2", "ORA, frozen": "2*d^2"},
            {"standard, trained": STANDARD.trained, "ORA, trained": FROZEN.trained, "ORA, frozen": FROZEN.frozen},
        ),
    },
)
