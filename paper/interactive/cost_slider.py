"""The cost of layer and block over N/d, with a slider, and a table that needs none."""

from fractions import Fraction

from ortho import cost
from paper.interactive.markup import attribute, cells

VARIANTS = {"learned": "learned", "frozen": "frozen", "stopped": "frozen, gradient stopped"}
SCOPES = {"layer": cost.layer, "block": cost.block}
FORMS = {"reference": "weights kept", "fast": "fused kernel"}
RATIOS = [Fraction(2) ** power for power in range(-4, 7)]  # N/d
SHOWN = (0, 2, 4, 6, 8)  # places in RATIOS of those in the table without a slider
START = 4  # N = d
D_MODEL, HEADS = 1024, 16  # no figure here depends on them: all are in units of N d^2


def figures(form: str, ratio: Fraction) -> dict[str, dict[str, list[float]]]:
    """By scope and variant: FLOPs of products, forward and backward, in units of N d^2."""
    length = int(ratio * D_MODEL)

    def units(scope: str, variant: str) -> list[float]:
        made = SCOPES[scope](1, length, D_MODEL, HEADS, projection=variant, form=form)
        return [float(Fraction(flops, length * D_MODEL**2)) for flops in (made.forward, made.backward)]

    return {scope: {variant: units(scope, variant) for variant in VARIANTS} for scope in SCOPES}


def saved(at: dict[str, list[float]], variant: str) -> float:
    """What a variant saves of the learned one's forward and backward pass, in per cent."""
    return 100 * (1 - sum(at[variant]) / sum(at["learned"]))


def cost_slider() -> str:
    """A slider over N/d that sets the costs of layer and block, and the savings at five ratios as a table.

    Without scripts, and in print, the table of savings stands alone.
    """
    data = {
        "ratios": list(map(str, RATIOS)),
        "variants": list(VARIANTS.values()),
        "costs": {form: [[list(at.values()) for at in figures(form, r).values()] for r in RATIOS] for form in FORMS},
    }
    options = "".join(f'<option value="{form}">{name}</option>' for form, name in FORMS.items())
    heads = cells("th", ("", "variant", "forward", "backward", "total", "saved"))
    return (
        f'<div class="cost-slider" data-costs="{attribute(data)}"><div class="setting" hidden>'
        f'<label>N/d <input type="range" min="0" max="{len(RATIOS) - 1}" value="{START}" step="1"></label> '
        f'<output></output> <label>attention <select>{options}</select></label></div><table class="chosen" hidden>'
        "<caption>Products of one training step, in units of N d<sup>2</sup> FLOPs</caption><thead>"
        f"<tr>{heads}</tr></thead><tbody></tbody></table>"
        f"{_savings()}</div>"
    )


def _savings() -> str:
    """A table of what freezing saves at a few ratios, alone and with the gradient stopped as well."""
    columns = [
        ("layer", "frozen", "reference"), ("layer", "stopped", "reference"), ("layer", "stopped", "fast"),
        ("block", "frozen", "reference"), ("block", "stopped", "reference"), ("block", "stopped", "fast"),
    ]  # fmt: skip
    titles = ("N/d", *(f"{scope}, {variant}{', fused' * (form == 'fast')}" for scope, variant, form in columns))
    rows = [
        (str(RATIOS[at]), *(f"{saved(figures(form, RATIOS[at])[scope], v):.1f} %" for scope, v, form in columns))
        for at in SHOWN
    ]
    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    caption = "Share of a training step's FLOPs saved; weights P kept, unless fused"
    return (
        f'<table class="fixed"><caption>{caption}</caption><thead><tr>{cells("th", titles)}</tr></thead>{body}</table>'
    )
