"""Which tokens reach the last one through layers of a pattern: a table, and a script that shows them one by one."""

from html import escape

from ortho.attention.sparse.block_sparse import BigBird
from ortho.attention.sparse.blocked_window import BlockedWindow
from ortho.attention.sparse.dilated import Dilated, LocalDilated
from ortho.attention.sparse.fixed import Fixed
from ortho.attention.sparse.global_local import GlobalLocal
from ortho.attention.sparse.pattern import Pattern
from ortho.attention.sparse.window import Window
from ortho.theory.reachability import layers_between
from paper.interactive.markup import attribute, cells

TOKENS, LAYERS = 64, 6
PATTERNS: dict[str, Pattern] = {
    "window of 8": Window(8),
    "dilated, 8 keys by 4": Dilated(8, 4),
    "blocks of 8": BlockedWindow(8),
    "2 global tokens, window of 8": GlobalLocal(8, 2),
    "big-bird, blocks of 4": BigBird(4, random=1),
    "strided by 8": LocalDilated(8),
    "fixed, blocks of 8": Fixed(8, 1),
}


def needed(pattern: Pattern) -> list[int]:
    """The fewest layers through which each token reaches the last one; 0 for itself and -1 for one that never does."""
    layers: list[int] = layers_between(pattern.mask(TOKENS, is_causal=True))[-1].tolist()
    return layers


def shares(layers: list[int]) -> list[float]:
    """The share of tokens that reach the last one through 1, 2, ... layers."""
    return [sum(0 <= at <= most for at in layers) / len(layers) for most in range(1, LAYERS + 1)]


def sparse_reach() -> str:
    """A table of the shares, by pattern and number of layers; a script adds the tokens themselves."""
    found = {name: needed(pattern) for name, pattern in PATTERNS.items()}
    heads = "".join(f'<th scope="col">{layer}</th>' for layer in range(1, LAYERS + 1))
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th>{cells("td", (f"{100 * share:.0f}" for share in shares(layers)))}</tr>'
        for name, layers in found.items()
    )
    return (
        f'<div class="reach" data-layers="{attribute(found)}">'
        f"<table><caption>Per cent of {TOKENS} tokens that reach the last one, by number of layers (causal)</caption>"
        f'<thead><tr><th scope="col">pattern</th>{heads}</tr>'
        f"</thead><tbody>{rows}</tbody></table></div>"
    )
