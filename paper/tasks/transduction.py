"""A made-up translation, for want of a real one: sentences of a small grammar in two randomly drawn languages.

These are not natural languages, and results do not say how well natural ones are translated. The task asks for what
translation asks for, with known answers: words by a lexicon, another order, agreement at a distance, and words with two
meanings.

A source clause is a noun phrase, a verb, and often another noun phrase; a phrase is a determiner, adjectives, a noun,
and a mark if it is plural. In the target the verb comes last. A phrase begins with its noun; then come its adjectives,
the last one first, and its determiner, each with an ending for the noun's class and number. The verb's ending is for
the class and number of its subject. The last `AMBIGUOUS` nouns have two translations, of different classes; the verb,
which belongs to one of two fields, says which is meant. The target is a function of the source (`Language.translated`).
"""

import hashlib
from collections.abc import Iterator, Sequence
from functools import cache, partial
from itertools import chain, islice, product
from typing import NamedTuple

import torch

from ortho.checks import positive_int
from paper.tasks.pairs import SPECIAL, STOP, Pair, batch_of
from paper.tasks.task import Batch, Task

__all__ = ["Clause", "Language", "Phrase", "task"]

DETERMINERS, ADJECTIVES, NOUNS, VERBS, AMBIGUOUS = 2, 10, 24, 12, 8
CLASSES, FIELDS = 3, 2
MOST_ADJECTIVES = 2
PARTS = {"validation": 1, "test": 1, "train": 6}  # how many in eight sentences, by a hash of the source
BLOCK = 32  # sentences drawn at once
LONGEST_CLAUSE = 2 * (2 + 2 * MOST_ADJECTIVES + 2) + 2  # tokens of a target: two phrases, and a verb with its ending


class Phrase(NamedTuple):
    """A noun phrase: the numbers of its words, and whether it is plural."""

    determiner: int
    adjectives: tuple[int, ...]
    noun: int
    plural: bool


class Clause(NamedTuple):
    """A clause: its subject, the number of its verb, and its object, if any."""

    subject: Phrase
    verb: int
    object: Phrase | None


class Language:
    """Two vocabularies in one and what connects them, drawn by the seed.

    `names` has the name of each token, the source's words in lower case, the target's in upper case; `tokens` has the
    token of each name. `stems` has the translation of each word of the source except nouns. `nouns` has, for each noun
    and each field, the translation and its class; `fields` has the field of each verb.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        generator = torch.Generator().manual_seed(seed)

        def order(count: int) -> list[int]:
            return torch.randperm(count, generator=generator).tolist()

        words = {"det": DETERMINERS, "adj": ADJECTIVES, "noun": NOUNS, "verb": VERBS}
        self.stems = {f"{k}{i}": f"{k.upper()}{j}" for k, n in words.items() for i, j in enumerate(order(n))}
        self.stems |= {"plural": "PLURAL", "and": "AND"}
        classes = torch.randint(CLASSES, (NOUNS,), generator=generator).tolist()
        others = torch.randint(1, CLASSES, (NOUNS,), generator=generator).tolist()
        self.nouns: list[list[tuple[str, int]]] = []
        for i, (first, other) in enumerate(zip(classes, others, strict=True)):
            one = self.stems.pop(f"noun{i}"), first
            two = f"{one[0]}'", (first + other) % CLASSES
            self.nouns.append([one, two if i >= NOUNS - AMBIGUOUS else one])
        self.fields = [i % FIELDS for i in order(VERBS)]
        numbers = product(("ADJ", "VERB"), range(CLASSES), (False, True))
        found = [*SPECIAL, *self.stems, *self.stems.values(), *(f"noun{i}" for i in range(NOUNS))]
        found += [word for meanings in self.nouns for word, _ in meanings] + [ending(*number) for number in numbers]
        self.names = list(dict.fromkeys(found))
        self.tokens = {name: token for token, name in enumerate(self.names)}

    def pair(self, clauses: Sequence[Clause]) -> Pair:
        """The tokens of a sentence in both languages, put together from its clauses."""
        read: list[str] = []
        written: list[str] = []
        for subject, verb, thing in clauses:
            phrases = [subject] if thing is None else [subject, thing]
            said = [_read(phrase) for phrase in phrases]
            read += [*(["and"] if read else []), *said[0], f"verb{verb}", *chain(*said[1:])]
            meaning = self.fields[verb]
            written += [*(["AND"] if written else []), *chain(*(self._written(phrase, meaning) for phrase in phrases))]
            _, noun_class = self.nouns[subject.noun][meaning]
            written += [self.stems[f"verb{verb}"], ending("VERB", noun_class, subject.plural)]
        return [self.tokens[word] for word in read], [self.tokens[word] for word in written]

    def _written(self, phrase: Phrase, meaning: int) -> list[str]:
        noun, noun_class = self.nouns[phrase.noun][meaning]
        words = [*(f"adj{i}" for i in reversed(phrase.adjectives)), f"det{phrase.determiner}"]
        agreeing = [part for word in words for part in (self.stems[word], ending("ADJ", noun_class, phrase.plural))]
        return [noun, *(["PLURAL"] if phrase.plural else []), *agreeing]

    def translated(self, tokens: list[int]) -> list[int]:
        """The target of a source, both with their STOP; tokens after the source's STOP do not matter.

        The source is read from right to left, word by word, independently of how sentences are put together.
        """
        sentence = [self.names[token] for token in tokens[: tokens.index(STOP)]]
        written: list[str] = []
        while sentence:
            start = len(sentence) - sentence[::-1].index("and") if "and" in sentence else 0
            written = ["AND"] * (start > 0) + self._clause(sentence[start:]) + written
            sentence = sentence[: max(start - 1, 0)]
        return [*(self.tokens[word] for word in written), STOP]

    def _clause(self, words: list[str]) -> list[str]:
        place = next(i for i, word in enumerate(words) if word.startswith("verb"))
        meaning = self.fields[int(words[place].removeprefix("verb"))]
        written: list[str] = []
        agreement = ""
        for part in (words[place + 1 :], words[:place]):  # the subject last: the verb agrees with it
            number = "PL" if "plural" in part else "SG"
            phrase: list[str] = []
            for word in part:
                if word.startswith("noun"):
                    noun, noun_class = self.nouns[int(word.removeprefix("noun"))][meaning]
                    agreement = f"{noun_class}.{number}"
                    phrase = [noun, *(["PLURAL"] if number == "PL" else []), *phrase]
                elif word != "plural":
                    phrase = [self.stems[word], "", *phrase]
            written = [word or f"-ADJ.{agreement}" for word in phrase] + written
        return [*written, self.stems[words[place]], f"-VERB.{agreement}"]


def ending(kind: str, noun_class: int, plural: bool) -> str:
    """The ending of an adjective or a verb; determiners have those of adjectives."""
    return f"-{kind}.{noun_class}.{'PL' if plural else 'SG'}"


def _read(phrase: Phrase) -> list[str]:
    words = [f"det{phrase.determiner}", *(f"adj{i}" for i in phrase.adjectives), f"noun{phrase.noun}"]
    return [*words, *(["plural"] if phrase.plural else [])]


def task(*, clauses: int = 2, pairs: int | None = None, seed: int = 0) -> Task:
    """The task with 1 to `clauses` clauses a sentence, each number equally often, in the languages of the seed.

    With `pairs` there are only so many sentences to train on; smaller sets are parts of larger ones. Source sentences
    of training, validation and tests differ; the latter two are the same for every generator and number of pairs. One
    test has sentences like those of training; in the other every noun has two meanings. Inputs and answers are those of
    `paper.tasks.pairs`; `solve` takes a source.

    Raises TypeError or ValueError for sizes below 1.
    """
    language = _language(seed)
    positive_int("clauses", clauses)
    limited = "" if pairs is None else f", {positive_int('pairs', pairs):,} pairs to train on"
    return Task(
        name="transduction" if pairs is None else f"transduction-{pairs}",
        title=f"a made-up translation of one to {clauses} clauses{limited}",
        vocab_size=len(language.names),
        longest=(LONGEST_CLAUSE + 1) * clauses,  # with what joins them, and the STOP
        train=partial(_train, language, clauses, pairs),
        validation=partial(_first, language, clauses, "validation", 0),
        tests={
            "like training": partial(_first, language, clauses, "test", 0),
            "ambiguous nouns": partial(_first, language, clauses, "test", NOUNS - AMBIGUOUS),
        },
        solve=language.translated,
    )


@cache
def _language(seed: int) -> Language:
    return Language(seed)


def _train(language: Language, clauses: int, pairs: int | None, count: int, generator: torch.Generator) -> Batch:
    positive_int("count", count)
    if pairs is None:
        return batch_of(list(islice(_sentences(language, clauses, "train", 0, generator), count)))
    known = _held(language, clauses, "train", 0, pairs)
    return batch_of([known[i] for i in torch.randint(pairs, (count,), generator=generator).tolist()])


def _first(language: Language, clauses: int, part: str, first: int, count: int, _: torch.Generator) -> Batch:
    return batch_of(_held(language, clauses, part, first, positive_int("count", count)))


@cache
def _held(language: Language, clauses: int, part: str, first: int, count: int) -> tuple[Pair, ...]:
    """The first sentences of a part, always the same."""
    generator = torch.Generator().manual_seed(language.seed)
    return tuple(islice(_sentences(language, clauses, part, first, generator), count))


def _sentences(language: Language, clauses: int, part: str, first: int, generator: torch.Generator) -> Iterator[Pair]:
    """The sentences of a part, one after the other, without end; nouns are those from number `first` on."""
    phrase = (DETERMINERS, MOST_ADJECTIVES + 1, ADJECTIVES, ADJECTIVES - 1, NOUNS - first, 2)
    sizes = torch.tensor([clauses, *([VERBS, 4, *phrase, *phrase] * clauses)])
    while True:
        drawn = torch.rand(BLOCK, len(sizes), generator=generator, dtype=torch.float64)
        for number, *row in (drawn * sizes).long().tolist():
            width = len(row) // clauses
            pair = language.pair([_clause(row[i * width : (i + 1) * width], first) for i in range(number + 1)])
            if _part(pair[0]) == part:
                yield pair


def _clause(drawn: list[int], first: int) -> Clause:
    """The clause that numbers below the sizes of `_sentences` stand for; three in four have an object."""
    verb, has_object, *rest = drawn
    phrases = []
    for determiner, count, one, distance, noun, plural in (rest[:6], rest[6:]):
        adjectives = (one, (one + 1 + distance) % ADJECTIVES)[:count]  # two that differ
        phrases.append(Phrase(determiner, adjectives, first + noun, bool(plural)))
    return Clause(phrases[0], verb, phrases[1] if has_object else None)


def _part(source: Sequence[int]) -> str:
    """The part that a source sentence belongs to."""
    place = hashlib.sha256(bytes(source)).digest()[0] % sum(PARTS.values())  # all tokens are below 256
    return [name for name, share in PARTS.items() for _ in range(share)][place]
