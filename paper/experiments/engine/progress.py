"""Shows how far a run is: a line on the terminal that is overwritten, if there is a terminal and tqdm is installed."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from paper.experiments.engine.runner import Progress, unseen


@contextmanager
def shown() -> Iterator[tuple[Callable[[str], None], Progress]]:
    """Two functions for the block: one prints a line to stdout at once, the other shows how far the run is."""
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        tqdm = None
    if tqdm is None or not sys.stderr.isatty():
        yield partial(print, flush=True), unseen  # a kill must not swallow what was said
        return
    with tqdm(
        file=sys.stderr, leave=False, dynamic_ncols=True, bar_format="{n_fmt}/{total_fmt} {bar:20} {desc}"
    ) as bar:

        def echo(line: str) -> None:
            bar.write(line, file=sys.stdout)
            sys.stdout.flush()

        def show(ended: int, total: int, running: Sequence[str]) -> None:
            bar.n, bar.total = ended, total
            bar.set_description_str(", ".join(running))

        yield echo, show
