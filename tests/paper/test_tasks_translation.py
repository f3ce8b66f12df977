"""Translation: subwords, BLEU, a corpus; Multi30k where ORTHO_DATA has it."""

import gzip
import os
import sys
from functools import partial
from itertools import pairwise

import pytest
import torch
from seeded import generator

from paper.tasks import translation as texts
from paper.tasks.pairs import PAD, SPECIAL, START, STOP, UNKNOWN
from paper.tasks.translation import Corpus, Vocabulary, bleu, multi30k_corpus, translation


@pytest.fixture
def tokenizers():
    """The package that subword vocabularies need."""
    return pytest.importorskip("tokenizers")


@pytest.fixture
def sacrebleu():
    """The package that BLEU needs."""
    return pytest.importorskip("sacrebleu")


TEXTS = ["Zwei Männer stehen am Herd.", "Two men are at the stove.", "Ein Mann am Herd – zwei Männer nicht!"] * 3


def test_subwords_spell_the_texts(tokenizers):
    vocabulary = Vocabulary(TEXTS, 120)
    assert vocabulary.size <= 120
    for text in (*TEXTS, "Herde. zwei  Männer ", " stets", ""):
        tokens = vocabulary.encode(text)
        assert vocabulary.decode(tokens) == text
        assert all(len(SPECIAL) <= token < vocabulary.size for token in tokens)
    assert len(vocabulary.encode(TEXTS[0])) < 12 < len(Vocabulary(TEXTS, 40).encode(TEXTS[0]))  # merges; bytes
    assert vocabulary.decode([START, *vocabulary.encode("Mann"), STOP, PAD]) == "Mann"


def test_unknown_bytes_and_text_that_looks_like_a_special_subword(tokenizers):
    vocabulary = Vocabulary(TEXTS, 80)
    assert UNKNOWN in vocabulary.encode("Mann 7")  # no text has a digit
    assert vocabulary.decode(vocabulary.encode("Mann7")) == "Mann"
    spelled = Vocabulary([*TEXTS, "<stop>", "<pad>", "u k"], 80)
    tokens = spelled.encode("am <stop><pad>")
    assert not set(tokens) & {PAD, START, STOP, UNKNOWN}
    assert spelled.decode(tokens) == "am <stop><pad>"


def test_what_stands_together_twice_becomes_one(tokenizers):
    """The size also counts the special subwords and the bytes, a space's included."""
    assert Vocabulary(["ab ab"], 50).size == len(SPECIAL) + 3 + 1
    assert Vocabulary(["ab ac"], 50).size == len(SPECIAL) + 4
    assert Vocabulary(["ab ab"], len(SPECIAL) + 3).size == len(SPECIAL) + 3


def test_subwords_are_those_of_the_texts_alone(tokenizers):
    assert Vocabulary(TEXTS, 90).state() == Vocabulary(list(TEXTS), 90).state() != Vocabulary(TEXTS, 60).state()


def test_bleu(sacrebleu):
    same = bleu(TEXTS, TEXTS)
    assert same.score == pytest.approx(100) and f"tok:13a|smooth:exp|version:{sacrebleu.__version__}" in same.signature
    # 5 of 6 words are right, and 4, 3 and 2 of the 5, 4 and 3 longer parts: BLEU is the geometric mean.
    found = bleu(["a b c d e x"], ["a b c d e f"])
    assert found.score == pytest.approx(100 * (5 / 6 * 4 / 5 * 3 / 4 * 2 / 3) ** 0.25)
    assert bleu(["A cat sat down here"], ["a cat sat down here"]).score < 80  # case counts


@pytest.fixture
def corpus():
    pairs = [(f"das ist Satz {i} von {i * i}", f"this is sentence {i} of {i * i}") for i in range(200)]
    return Corpus(pairs[:180], pairs[180:190], pairs[190:])


def test_lines_are_each_others(tmp_path):
    """A separator within a line does not split it, and pairs with an empty side are left out."""
    sides = ["eins ", "zwei\u2028mal", "", "leer"], ["one", "twice", "empty", " "]
    paths = [tmp_path / name for name in ("a.de.gz", "a.en")]
    for path, lines in zip(paths, sides, strict=True):
        content = "\n".join(lines).encode() + b"\n"
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    assert texts._pairs(*paths) == [("eins", "one"), ("zwei\u2028mal", "twice")]
    paths[1].write_bytes(b"one\ntwo\n")
    with pytest.raises(ValueError, match="a.en: expected 4 lines like .*a.de.gz, got 2"):
        texts._pairs(*paths)


def test_smaller_training_sets_are_parts_of_larger_ones(corpus):
    parts = [corpus.limited(n) for n in (5, 40, 120)]
    assert [len(part.train) for part in parts] == [5, 40, 120]
    assert all(set(small.train) < set(large.train) for small, large in pairwise(parts))
    assert all(part[1:] == corpus[1:] for part in parts)
    assert parts[0].limited(None) == parts[0]


def test_a_task_on_texts(corpus, tokenizers, sacrebleu):
    corpus = corpus.limited(60)
    corpus = corpus._replace(train=[*corpus.train, ("7 " * 30, "7 " * 30)])  # so that none is cut
    made = translation("two-files", "two files", corpus, 100)
    task = made.task
    assert task.vocab_size == made.vocabulary.size <= 100
    for name, draw in {"validation": task.validation, **task.tests}.items():
        count = len(made.texts[name])
        (source, target, mask), answers = draw(count, generator(1))
        assert torch.equal(answers, draw(count, generator(2)).answers)
        assert torch.equal(mask, source != PAD) and max(source.shape[1], target.shape[1]) <= task.longest
        assert made.read(source) == [text for text, _ in made.texts[name]]
        assert made.read(answers) == [text for _, text in made.texts[name]]
        assert made.bleu(name, answers).score == pytest.approx(100)
        assert made.bleu(name, answers[:2]).score == pytest.approx(100)
        assert made.bleu(name, source).score < 20
    again, other = (translation("", "", corpus, size).facts() for size in (100, 90))
    assert made.facts() == again != other and again["subwords"] == task.vocab_size
    known = set(corpus.train)
    batch = task.train(64, generator())
    assert set(zip(made.read(batch.inputs[0]), made.read(batch.answers), strict=True)) <= known
    lengths = {task.train(500, generator(seed)).answers.shape[1] for seed in range(5)}
    assert max(lengths) <= task.longest


def test_longer_texts_are_cut_in_tests_and_never_in_references(tokenizers, sacrebleu):
    long = ("a b c d e f g", "e f g a b c d")
    corpus = Corpus([("a b c d", "e f g")] * 3, [("a", "e")], [long])
    made = translation("cut", "cut", corpus, 30)
    assert made.task.longest == 5 and made.vocabulary.encode("a b") != []
    (source, _, _), answers = made.task.tests["test"](1, generator())
    assert source.shape == answers.shape == (1, 5) and source[0, -1] == STOP and answers[0, -1] != STOP
    assert made.read(source) == ["a b c d"] and made.read(answers) == [
        "e f g a"
    ]  # a space and an a are not one subword
    assert made.texts["test"] == [long] and made.bleu("test", answers).score < 80


@pytest.mark.parametrize("missing", ["tokenizers", "sacrebleu"])
def test_what_is_missing_is_named(monkeypatch, missing):
    for name in (missing, f"{missing}.metrics"):
        monkeypatch.setitem(sys.modules, name, None)
    call = partial(Vocabulary, TEXTS, 90) if missing == "tokenizers" else partial(bleu, TEXTS, TEXTS)
    with pytest.raises(ImportError, match=rf"{missing}: expected for .*, as pip install ortho\[translation\] installs"):
        call()


@pytest.mark.bad_input
def test_errors(corpus):
    cases = [
        (partial(corpus.limited, 1000), "pairs: expected at most the 180 of the training part, got 1000"),
        (partial(translation, "", "", Corpus([], [], []), 90), "corpus: expected pairs in each part, got none"),
        (partial(bleu, [], []), "written: expected as many texts as references, 0, got 0"),
        (partial(bleu, ["a"], ["a", "b"]), "written: expected as many texts as references, 2, got 1"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.bad_input
def test_errors_of_vocabularies(corpus, tokenizers):
    with pytest.raises(ValueError, match="size: expected at least .*, the texts' bytes, got 20"):
        Vocabulary(TEXTS, 20)
    task = translation("", "", corpus, 100).task
    with pytest.raises(ValueError, match="count: expected at most 10, all examples of this part, got 99"):
        task.tests["test"](99, generator())


@pytest.mark.skipif("ORTHO_DATA" not in os.environ, reason="needs the files of Multi30k in ORTHO_DATA")
def test_multi30k(tokenizers, sacrebleu):
    corpus = multi30k_corpus()
    assert [len(part) for part in corpus] == [29_000, 1_014, 1_000]
    made = translation("multi30k", "", corpus.limited(1000), 1000)
    assert made.vocabulary.size == made.task.vocab_size == 1000
    answers = made.task.tests["test"](1000, generator()).answers
    assert answers.shape[0] == 1000 and made.bleu("test", answers).score > 99  # long ones are cut
    assert not {source for source, _ in corpus.train} & {source for source, _ in corpus.test}
