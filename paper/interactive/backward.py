"""The products of the backward pass, with a switch from variant to variant (styles alone, no script)."""

from collections.abc import Mapping
from html import escape
from typing import Any

import sympy

from paper.claims.shared.frozen_layer import PRODUCTS, VALUES_LAST, backward_counted, backward_products

Formula = Any  # sympy's

# The rows of the picture, from the output back, and the products in each.
ROWS = {
    "output": ("dW_O", "dO"),
    "values": ("dV", "dW_V", "dX_V"),
    "scores": ("S", "dP", "dQ", "dK"),
    "queries": ("dW_Q", "dX_Q"),
    "keys": ("dW_K", "dX_K"),
}
VARIANTS = {
    "learned": "learned",
    "frozen": "frozen",
    "stopped": "frozen, gradient stopped",
    "last": "frozen, (P X) W\N{LATIN SUBSCRIPT SMALL LETTER V}, no gradient for X",
}


def backward_switch() -> str:
    """The products of a layer's backward pass, and a switch that strikes out those that a variant does not compute.

    Which products a variant computes is read off autograd's graph of small layers (`backward_products`); their costs
    are those of `PRODUCTS`. For the order (P X) W_V without a gradient for the input, the total is checked against a
    count.
    """
    used = {variant: _used(variant) for variant in VARIANTS}
    assert sympy.expand(_total(used["last"]) - backward_counted(VALUES_LAST, input_grad=False)) == 0
    names = [name for row in ROWS.values() for name in row]
    shown = [name for name in names if any(name in products for products in used.values())]
    inputs = "".join(
        f'<span><input type="radio" name="backward" id="backward-{variant}"{" checked" if variant == "frozen" else ""}>'
        f'<label for="backward-{variant}">{escape(title)}</label></span> '
        for variant, title in VARIANTS.items()
    )
    rows = "".join(
        f'<tr><th scope="row">{row}</th><td>{"".join(_chip(name, used) for name in members if name in shown)}</td></tr>'
        for row, members in ROWS.items()
    )
    totals = "".join(
        f'<tr class="in-{variant}"><th scope="row">{escape(title)}</th><td>{_html(_total(used[variant]))}</td>'
        f"<td>{len(used[variant])}</td></tr>"
        for variant, title in VARIANTS.items()
    )
    return (
        f'<div class="switch">{inputs}<table class="products"><caption>Products of the backward pass, with their FLOPs'
        f'</caption>{rows}</table><table class="totals"><caption>In all</caption><tr><th scope="col">variant</th>'
        f'<th scope="col">FLOPs</th><th scope="col">products</th></tr>{totals}</table></div>'
    )


def _used(variant: str) -> tuple[str, ...]:
    """The products of a variant. With (P X) W_V these are dW_O, dO, and dW_V as the product of P X and dO."""
    if variant == "last":
        return ("dW_O", "dO", "dW_V")
    return tuple(name for name, state in backward_products(variant).items() if state == "used")


def _total(names: tuple[str, ...]) -> Formula:
    return sympy.expand(sum(PRODUCTS[name][1] for name in names))


def _chip(name: str, used: Mapping[str, tuple[str, ...]]) -> str:
    """A product with its FLOPs, and the variants that have it."""
    classes = " ".join(f"in-{variant}" for variant, names in used.items() if name in names)
    stem, _, of = name.partition("_")
    said = f"{stem}<sub>{of}</sub>" if of else stem
    return f'<span class="product {classes}"><i>{said}</i> <small>{_html(PRODUCTS[name][1])}</small></span> '


def _html(formula: Formula) -> str:
    """A polynomial as text: 8 N² d + 16 N d²."""
    text = str(sympy.expand(formula)).replace("**2", "<sup>2</sup>").replace("*", "\N{NARROW NO-BREAK SPACE}")
    return text.replace("d\N{NARROW NO-BREAK SPACE}N", "N\N{NARROW NO-BREAK SPACE}d")
