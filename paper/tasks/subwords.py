"""Subword vocabularies, and what a translation is worth: the two parts of translation that need other packages."""

from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from ortho._checks import positive_int
from paper.tasks.pairs import SPECIAL

__all__ = ["Bleu", "Vocabulary", "bleu"]

LEAST_PAIRS = 2  # how often two subwords must stand together to become one


class Vocabulary:
    """Subwords of given texts, by byte pair encoding (Sennrich, Haddow & Birch 2016, arXiv:1508.07909) on bytes.

    At most `size` of them, of which the first are those of `paper.tasks.pairs`; fewer where no two stand together twice
    any more. Words, numbers and punctuation are kept apart as in GPT-2. A text of known bytes is what its tokens spell;
    a byte that no text has is UNKNOWN, and spells nothing. What looks like one of the first subwords is text.

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
        """All that it is made of, as JSON."""
        return str(self._tokenizer.to_str())


class Bleu(NamedTuple):
    """A score from 0 to 100, and how it was computed, in sacrebleu's words."""

    score: float
    signature: str


def bleu(written: Sequence[str], references: Sequence[str]) -> Bleu:
    """BLEU of a corpus (Papineni et al. 2002) by sacrebleu's defaults (Post 2018, arXiv:1804.08771): raw text with its
    case, which it splits into words itself ('13a').

    Raises ValueError unless there is a reference for each text, and one at least, and ImportError without `sacrebleu`.
    """
    if not written or len(written) != len(references):
        raise ValueError(f"written: expected as many texts as references, {len(references)}, got {len(written)}")
    metric = _needed("sacrebleu.metrics", "BLEU").BLEU()
    score = metric.corpus_score(list(written), [list(references)])
    return Bleu(float(score.score), str(metric.get_signature()))


def _needed(module: str, purpose: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise ImportError(f"{name}: expected for {purpose}, as pip install ortho[translation] installs it") from error
