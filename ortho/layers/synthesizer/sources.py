"""Where a Synthesizer's logits may come from: one class, one line here."""

from ortho.layers.synthesizer.by_position import FactoredRandom, FixedRandom, Random
from ortho.layers.synthesizer.by_token import Dense, DotProduct, FactoredDense
from ortho.layers.synthesizer.source import LogitSource

# Each takes (d_model, num_heads, max_length, *, generator, dtype, device), and what is its own.
SOURCES: dict[str, type[LogitSource]] = {
    source.name: source for source in (Random, FixedRandom, FactoredRandom, Dense, FactoredDense, DotProduct)
}
