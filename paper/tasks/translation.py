"""Translation of short texts: German to English of Multi30k, or of any two files whose lines are each other's."""

import gzip
import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from ortho._checks import positive_int
from paper.tasks.download import RemoteFile, fetch
from paper.tasks.pairs import Pair, batch_of, until_stop
from paper.tasks.subwords import Bleu, Vocabulary, bleu
from paper.tasks.task import Batch, Task

__all__ = ["Corpus", "TextPair", "Translation", "aligned", "multi30k", "multi30k_corpus", "subwords", "translation"]

TRAIN, VALIDATION = 90, 5  # per cent of aligned files; the rest is the test's
MOST_SUBWORDS, FEWEST_SUBWORDS, PAIRS_A_SUBWORD = 4000, 1000, 4

HOME = "https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/raw"
SUMS = {
    "train.de": "726e39b2fa9eb9ffb6dc763fb35a179f80fae06ffc5d28b6ace5faa883de28a6",
    "train.en": "d79cfa999dd4c51d2cb42499b6796d5a882c3a8a961923c25a898c90f8bbd56f",
    "val.de": "f0cba2f995189cf5770f29a8a9a537a3ad3f51657ad873405082ff6863a5e75a",
    "val.en": "14f7d25ddd868909a9213e361768460edcacdd6ab9d1e77b92560dc10c10dc28",
    "test_2016_flickr.de": "9204244e408ccb38d2a55cfcd344df15005fc42a07a6e55ca6c52b6ababb8cc8",
    "test_2016_flickr.en": "611d361c6334bc7246101d48097c13cf5c4413c5befc793cc629934359d532d9",
}
FILES = {name: RemoteFile(f"multi30k/{name}.gz", f"{HOME}/{name}.gz", digest) for name, digest in SUMS.items()}

TextPair = tuple[str, str]


class Corpus(NamedTuple):
    """Pairs of a source and its translation in three parts."""

    train: Sequence[TextPair]
    validation: Sequence[TextPair]
    test: Sequence[TextPair]

    def limited(self, pairs: int | None) -> "Corpus":
        """The same with only so many pairs to train on, all of them for None; in an order that the pairs' sha256 say,
        so that smaller sets are parts of larger ones.

        Raises TypeError or ValueError for fewer than one, and for more than there are.
        """
        if pairs is not None and positive_int("pairs", pairs) > len(self.train):
            raise ValueError(f"pairs: expected at most the {len(self.train)} of the training part, got {pairs}")
        return self._replace(train=sorted(self.train, key=_digest)[:pairs])


@dataclass(frozen=True)
class Translation:
    """The task; its vocabulary; and the texts of validation and tests, in the order in which the task gives them."""

    task: Task
    vocabulary: Vocabulary
    texts: Mapping[str, Sequence[TextPair]]

    def facts(self) -> dict[str, int | str]:
        """What the vocabulary is, for a record: its size, and the sha256 of all that it is made of."""
        state = self.vocabulary.state().encode()
        return {"subwords": self.vocabulary.size, "vocabulary_sha256": hashlib.sha256(state).hexdigest()}

    def read(self, written: torch.Tensor) -> list[str]:
        """The texts that tokens (B, n) spell up to their STOP."""
        return [self.vocabulary.decode(row) for row in until_stop(written)]

    def bleu(self, part: str, written: torch.Tensor) -> Bleu:
        """BLEU of what was written (B, n) for the first sources of a part, 'validation' or the name of a test."""
        return bleu(self.read(written), [text for _, text in self.texts[part][: len(written)]])


def multi30k(
    pairs: int | None = None, vocab_size: int | None = None, folder: str | os.PathLike[str] | None = None
) -> Translation:
    """German to English on `multi30k_corpus(folder)`, with so many pairs to train on.

    Raises what `multi30k_corpus`, `Corpus.limited` and `translation` raise.
    """
    corpus = multi30k_corpus(folder).limited(pairs)
    name, title = "multi30k", "German to English, descriptions of photographs"
    if pairs is not None:
        name, title = f"{name}-{pairs}", f"{title}, {pairs:,} pairs to train on"
    return translation(name, title, corpus, vocab_size)


def multi30k_corpus(folder: str | os.PathLike[str] | None = None) -> Corpus:
    """Multi30k (Elliott, Frank, Sima'an & Specia 2016, arXiv:1605.00459): 29,000 pairs, 1,014 and, of 2016, 1,000.

    `folder` and what is raised are those of `download.fetch`.
    """
    parts = ("train", "val", "test_2016_flickr")
    return Corpus(*(_pairs(*(fetch(FILES[f"{part}.{side}"], folder) for side in ("de", "en"))) for part in parts))


def aligned(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> Corpus:
    """The pairs of two files in UTF-8, `.gz` or not, of which each line of one translates that of the other.

    The sha256 of its pair says in which part a source is: nine tenths are to train on, and half of the rest is to
    validate with. A source that comes several times is in one part alone. Pairs with an empty side are left out.

    Raises OSError for files that cannot be read, and ValueError for files of unlike lengths and for a part without
    pairs.
    """
    parts: list[list[TextPair]] = [[], [], []]
    for pair in sorted(_pairs(Path(source), Path(target)), key=_digest):
        place = int.from_bytes(hashlib.sha256(pair[0].encode()).digest()[:4]) * 100 >> 32  # 0 to 99
        parts[(place >= TRAIN) + (place >= TRAIN + VALIDATION)].append(pair)
    if not all(parts):
        sizes = ", ".join(str(len(part)) for part in parts)
        raise ValueError(f"source: expected pairs for training, validation and test, got {sizes}")
    return Corpus(*parts)


def subwords(pairs: int) -> int:
    """How many subwords there are at most for so many pairs of short texts, if nothing is said: fewer for fewer pairs,
    as rare subwords are not learnt (Sennrich & Zhang 2019, arXiv:1905.11901)."""
    return min(MOST_SUBWORDS, max(FEWEST_SUBWORDS, pairs // PAIRS_A_SUBWORD))


def translation(name: str, title: str, corpus: Corpus, vocab_size: int | None = None) -> Translation:
    """The task on a corpus, with a vocabulary of its training part: one for both languages, of `vocab_size` subwords
    at most, by default `subwords`.

    Inputs and answers are those of `paper.tasks.pairs`. Training draws pairs with replacement. Validation and test give
    their first ones, whatever the generator, and raise ValueError for more than there are; what is longer than the
    longest text to train on is cut there, but for BLEU.

    Raises ValueError for a part without pairs, and what `Vocabulary` raises.
    """
    for part, found in corpus._asdict().items():
        if not found:
            raise ValueError(f"corpus: expected pairs in each part, got none for {part}")
    size = subwords(len(corpus.train)) if vocab_size is None else vocab_size
    vocabulary = Vocabulary([text for pair in corpus.train for text in pair], size)
    train, validation, test = ([_encoded(vocabulary, pair) for pair in part] for part in corpus)
    longest = 1 + max(len(side) for pair in train for side in pair)  # with the STOP
    task = Task(
        name=name,
        title=title,
        vocab_size=vocabulary.size,
        longest=longest,
        train=partial(_any, train),
        validation=partial(_first, validation, longest),
        tests={"test": partial(_first, test, longest)},
    )
    return Translation(task, vocabulary, {"validation": corpus.validation, "test": corpus.test})


def _pairs(source: Path, target: Path) -> list[TextPair]:
    sides = [_lines(path) for path in (source, target)]
    if len(sides[0]) != len(sides[1]):
        raise ValueError(f"{target}: expected {len(sides[0])} lines like {source}, got {len(sides[1])}")
    return [pair for pair in zip(*sides, strict=True) if all(pair)]


def _lines(path: Path) -> list[str]:
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    # Not splitlines: a line separator within a text would part the files.
    return [line.strip() for line in content.decode("utf-8").removesuffix("\n").split("\n")]


def _digest(pair: TextPair) -> bytes:
    return hashlib.sha256("\n".join(pair).encode()).digest()


def _encoded(vocabulary: Vocabulary, pair: TextPair) -> Pair:
    return vocabulary.encode(pair[0]), vocabulary.encode(pair[1])


def _any(pairs: Sequence[Pair], count: int, generator: torch.Generator) -> Batch:
    picks = torch.randint(len(pairs), (positive_int("count", count),), generator=generator)
    return batch_of([pairs[i] for i in picks.tolist()])


def _first(pairs: Sequence[Pair], most: int, count: int, _: torch.Generator) -> Batch:
    if positive_int("count", count) > len(pairs):
        raise ValueError(f"count: expected at most the {len(pairs)} pairs of this part, got {count}")
    return batch_of(pairs[:count], most=most)
