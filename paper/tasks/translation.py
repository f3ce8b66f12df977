"""Translation of short texts, German to English of Multi30k: subwords, BLEU, and the task.

Vocabularies and BLEU need other packages, which the extra `translation` installs.
"""

import gzip
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ortho.checks import positive_int
from paper.tasks.download import RemoteFile, fetch
from paper.tasks.pairs import SPECIAL, Pair, batch_of, until_stop
from paper.tasks.task import Batch, Task, any_of, first_of

LEAST_PAIRS = 2  # how often two subwords must stand together to become one

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


class Vocabulary:
    """Subwords of given texts, by byte pair encoding (Sennrich, Haddow & Birch 2016, arXiv:1508.07909) on bytes.

    There are at most `size` subwords, the first ones those of `paper.tasks.pairs`; there are fewer if no two stand
    together twice any more. Words, numbers and punctuation are kept apart as in GPT-2. The tokens of a text spell it,
    if its bytes are known; a byte that none of the given texts has is UNKNOWN, and spells nothing. What looks like one
    of the first subwords is treated as text.

    Raises TypeError or ValueError for a size that leaves no room for the bytes, and ImportError without `tokenizers`.
    """

    def __init__(self, texts: Sequence[str], size: int) -> None:
        tokenizers = _needed("tokenizers", "subword vocabularies")
        alphabet = len(set("".join(texts).encode()))
        if positive_int("size", size) < len(SPECIAL) + alphabet:
            raise ValueError(f"size: expected at least {len(SPECIAL) + alphabet}, the texts' bytes, got {size}")
        made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=SPECIAL[-1]))
        made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=size, min_frequency=LEAST_PAIRS, special_tokens=list(SPECIAL), show_progress=False
        )
        made.train_from_iterator(texts, trainer)
        made.encode_special_tokens = True  # as text
        self._tokenizer = made

    @property
    def size(self) -> int:
        """The number of tokens."""
        return int(self._tokenizer.get_vocab_size())

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Iterable[int]) -> str:
        """The text that tokens spell, without the first ones of the vocabulary."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def state(self) -> str:
        """All that the vocabulary is made of, as JSON."""
        return str(self._tokenizer.to_str())


class Bleu(NamedTuple):
    """A score from 0 to 100, and how it was computed, in sacrebleu's words."""

    score: float
    signature: str


def bleu(written: Sequence[str], references: Sequence[str]) -> Bleu:
    """BLEU of a corpus (Papineni et al. 2002) by sacrebleu's defaults (Post 2018, arXiv:1804.08771): raw text with its
    case, which sacrebleu itself splits into words ('13a').

    Raises ValueError unless there is a reference for each text, and at least one, and ImportError without `sacrebleu`.
    """
    metric, score = _scored(written, references)
    return Bleu(float(score.score), str(metric.get_signature()))


def _scored(written: Sequence[str], references: Sequence[str]) -> tuple[Any, Any]:
    """sacrebleu's metric, and its score of a corpus."""
    if not written or len(written) != len(references):
        raise ValueError(f"written: expected as many texts as references, {len(references)}, got {len(written)}")
    metric = _needed("sacrebleu.metrics", "BLEU").BLEU()
    return metric, metric.corpus_score(list(written), [list(references)])


def _needed(module: str, purpose: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise ImportError(f"{name}: expected for {purpose}, as pip install ortho[translation] installs it") from error


class Corpus(NamedTuple):
    """Pairs of a source and its translation in three parts."""

    train: Sequence[TextPair]
    validation: Sequence[TextPair]
    test: Sequence[TextPair]

    def limited(self, pairs: int | None) -> "Corpus":
        """The same with only `pairs` pairs to train on, or all of them for None. They are sorted by their sha256, so
        that smaller sets are parts of larger ones.

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

    def counts(self, part: str, written: torch.Tensor, blocks: int) -> dict[str, list[int]]:
        """What BLEU is made of, for each of `blocks` consecutive equal parts of what was written: for n from 1 to 4
        `right_n_count`, the n-grams that the reference has, and `all_n_count`; `words_count` and `asked_count`."""
        texts, references = self.read(written), [text for _, text in self.texts[part][: len(written)]]
        edges = [len(texts) * i // blocks for i in range(blocks + 1)]
        found = [_scored(texts[a:b], references[a:b])[1] for a, b in pairwise(edges)]
        orders = range(len(found[0].counts))
        return {
            **{f"right_{n + 1}_count": [one.counts[n] for one in found] for n in orders},
            **{f"all_{n + 1}_count": [one.totals[n] for one in found] for n in orders},
            "words_count": [one.sys_len for one in found],
            "asked_count": [one.ref_len for one in found],
        }


def multi30k_corpus() -> Corpus:
    """Multi30k (Elliott, Frank, Sima'an & Specia 2016, arXiv:1605.00459): 29,000 pairs to train on, 1,014 to validate
    with, and the test of 2016 with 1,000. Raises what `download.fetch` raises."""
    parts = ("train", "val", "test_2016_flickr")
    return Corpus(*(_pairs(*(fetch(FILES[f"{part}.{side}"]) for side in ("de", "en"))) for part in parts))


def translation(name: str, title: str, corpus: Corpus, vocab_size: int) -> Translation:
    """The task on a corpus, with a vocabulary of its training part: one for both languages, of `vocab_size` subwords
    at most.

    Inputs and answers are those of `paper.tasks.pairs`. Training draws pairs with replacement. Validation and test give
    their first pairs, whatever the generator, and raise ValueError for more than there are; texts longer than the
    longest one to train on are cut to its length, except for BLEU.

    Raises ValueError for a part without pairs, and what `Vocabulary` raises.
    """
    for part, found in corpus._asdict().items():
        if not found:
            raise ValueError(f"corpus: expected pairs in each part, got none for {part}")
    vocabulary = Vocabulary([text for pair in corpus.train for text in pair], vocab_size)
    train, validation, test = ([_encoded(vocabulary, pair) for pair in part] for part in corpus)
    longest = 1 + max(len(side) for pair in train for side in pair)  # with the STOP
    task = Task(
        name=name,
        title=title,
        vocab_size=vocabulary.size,
        longest=longest,
        train=partial(any_of, len(train), partial(_batch, train, None)),
        validation=partial(first_of, len(validation), partial(_batch, validation, longest)),
        tests={"test": partial(first_of, len(test), partial(_batch, test, longest))},
    )
    return Translation(task, vocabulary, {"validation": corpus.validation, "test": corpus.test})


def _pairs(source: Path, target: Path) -> list[TextPair]:
    sides = [_lines(path) for path in (source, target)]
    if len(sides[0]) != len(sides[1]):
        raise ValueError(f"{target}: expected {len(sides[0])} lines like {source}, got {len(sides[1])}")
    return [pair for pair in zip(*sides, strict=True) if all(pair)]


def _lines(path: Path) -> list[str]:
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    # Not splitlines: a line separator within a text would put the two files out of step.
    return [line.strip() for line in content.decode("utf-8").removesuffix("\n").split("\n")]


def _digest(pair: TextPair) -> bytes:
    return hashlib.sha256("\n".join(pair).encode()).digest()


def _encoded(vocabulary: Vocabulary, pair: TextPair) -> Pair:
    return vocabulary.encode(pair[0]), vocabulary.encode(pair[1])


def _batch(pairs: Sequence[Pair], most: int | None, picks: torch.Tensor) -> Batch:
    return batch_of([pairs[i] for i in picks.tolist()], most=most)
