"""Which keys each query reads, pattern by pattern: small matrices of cells, made from the package's own masks."""

from matplotlib.figure import Figure
from torch import Generator, Tensor, randn

from ortho.attention.dynamic_sparse.top_k import top_k_attention_reference
from ortho.attention.sparse.block_sparse import BigBird
from ortho.attention.sparse.blocked_window import BlockedWindow
from ortho.attention.sparse.dilated import Dilated, LocalDilated
from ortho.attention.sparse.fixed import Fixed
from ortho.attention.sparse.global_local import GlobalLocal
from ortho.attention.sparse.pattern import Pattern
from ortho.attention.sparse.window import Window
from ortho.attention.weights import weights_of
from paper.plots import BLUE, ORANGE, VERMILION
from paper.schematics.drawing import canvas, cells, label

TOKENS, COLUMNS = 16, 4
WIDE, HIGH = 19, 22.5  # of a picture with its labels, in cells

# For each picture, the whole pattern and its near part: a window or a block.
PICTURES: dict[str, tuple[Pattern, Pattern | None]] = {
    "window of 4": (Window(4), Window(4)),
    "dilated, 4 keys by 3": (Dilated(4, 3), Window(1)),
    "blocks of 4": (BlockedWindow(4), BlockedWindow(4)),
    "global 2, window 4": (GlobalLocal(4, 2), Window(4)),
    "strided by 4": (LocalDilated(4), Window(5)),
    "fixed, blocks of 4": (Fixed(4, 1), BlockedWindow(4)),
    "big-bird, blocks of 2": (BigBird(2, random=1), BigBird(2, leading=0, random=0)),
}
SELECTED = "chosen, 4 best keys"
CHOSEN = 4


def masks() -> dict[str, Tensor]:
    """The causal mask (N, N) of each picture; that of the last picture is for random queries and keys."""
    found = {name: whole.mask(TOKENS, is_causal=True) for name, (whole, _) in PICTURES.items()}
    q, k = randn(2, TOKENS, TOKENS, generator=Generator().manual_seed(0))
    chosen = weights_of(top_k_attention_reference, q, k, num_keys=CHOSEN, is_causal=True) > 0
    return found | {SELECTED: chosen}


def patterns() -> Figure:
    """Eight causal patterns of 16 tokens: near pairs, far ones, and those that queries and keys choose."""
    found = masks()
    rows = -(-len(found) // COLUMNS)
    drawn, axes = canvas(COLUMNS * WIDE - 2, rows * HIGH - 1)
    for number, (name, mask) in enumerate(found.items()):
        row, column = divmod(number, COLUMNS)
        left, top = column * WIDE + 0.5, (rows - row) * HIGH - 4
        cells(axes, (left, top), _colours(name, mask))
        label(axes, (left + TOKENS / 2, top + 1.3), name)
        label(axes, (left + TOKENS / 2, top - TOKENS - 1.3), f"{int(mask.sum())} pairs", size=8.5)
    return drawn


def _colours(name: str, mask: Tensor) -> list[list[str | None]]:
    """A row of colours for each query: near keys are blue, far ones vermilion, chosen ones orange."""
    near = PICTURES[name][1] if name in PICTURES else None
    close = mask & near.mask(TOKENS, is_causal=True) if near else mask & False
    far = ORANGE if name == SELECTED else VERMILION
    kept, blue = mask.tolist(), close.tolist()
    return [[BLUE if blue[i][j] else far if kept[i][j] else None for j in range(i + 1)] for i in range(TOKENS)]
