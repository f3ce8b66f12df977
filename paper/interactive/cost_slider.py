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


def faster(at: dict[str, list[float]], variant: str) -> float:
    """By how much a variant's step is faster than the learned one's if time is proportional to FLOPs, in per cent."""
    return 100 * (sum(at["learned"]) / sum(at[variant]) - 1)


def cost_slider() -> str:
    """A slider over N/d that sets the costs of layer and block, and the gains at five ratios as a table.

    Without scripts, and in print, the table of gains stands alone.
    """
    data = {
        "ratios": list(map(str, RATIOS)),
        "variants": list(VARIANTS.values()),
        "costs": {form: [[list(at.values()) for at in figures(form, r).values()] for r in RATIOS] for form in FORMS},
    }
    options = "".join(f'<option value="{form}">{name}</option>' for form, name in FORMS.items())
    heads = cells("th", ("", "variant", "faster by", "saved", "forward", "backward", "total"))
    return (
        f'<div class="cost-slider" data-costs="{attribute(data)}"><div class="setting" hidden>'
        f'<label>N/d <input type="range" min="0" max="{len(RATIOS) - 1}" value="{START}" step="1"></label> '
        f'<output></output> <label>attention <select>{options}</select></label></div><table class="chosen" hidden>'
        "<caption>Products of one training step, in units of N d<sup>2</sup> FLOPs, and the gain</caption><thead>"
        f"<tr>{heads}</tr></thead><tbody></tbody></table>"
        f"{_gains()}</div>"
    )


def _gains() -> str:
    """A table of what freezing gains at a few ratios, alone and with the gradient stopped as well."""
    shown = [RATIOS[at] for at in SHOWN]
    rows = []
    for scope in SCOPES:
        for variant in ("frozen", "stopped"):
            for form in FORMS:
                found = [figures(form, ratio)[scope] for ratio in shown]
                gains = [f"{faster(at, variant):.1f} ({saved(at, variant):.1f})" for at in found]
                rows.append((f"{scope}, {variant}{', fused' * (form == 'fast')}", *gains))
    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    caption = (
        "A training step is faster by so many per cent, and in brackets the share of its FLOPs saved; weights P kept, "
        "unless fused"
    )
    heads = cells("th", ("at N/d", *map(str, shown)))
    return f'<table class="fixed"><caption>{caption}</caption><thead><tr>{heads}</tr></thead>{body}</table>'
