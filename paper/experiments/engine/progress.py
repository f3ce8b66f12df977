"""How far a run is: a line on the terminal that is overwritten, where there is one and tqdm is installed."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from paper.experiments.engine.runner import Progress, unseen


@contextmanager
def shown() -> Iterator[tuple[Callable[[str], None], Progress]]:
    """How to print a line to stdout during the block, at once, and how to say how far the run is."""
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
