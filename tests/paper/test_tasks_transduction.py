"""Pairs of texts as batches, and the made-up language."""

from functools import partial

import pytest
import torch
from seeded import generator
from task_draws import assert_shares

from paper.tasks import transduction
from paper.tasks.pairs import PAD, START, STOP, batch_of, exact_matches, until_stop
from paper.tasks.task import NONE
from paper.tasks.transduction import Clause, Language, Phrase


def test_a_batch_of_pairs():
    (source, target, mask), answers = batch_of([([7, 8], [9]), ([6], [5, 4, 10])])
    assert source.tolist() == [[7, 8, STOP], [6, STOP, PAD]]
    assert mask.tolist() == [[True, True, True], [True, True, False]]
    assert target.tolist() == [[START, 9, STOP, PAD], [START, 5, 4, 10]]
    assert answers.tolist() == [[9, STOP, NONE, NONE], [5, 4, 10, STOP]]
    (source, target, mask), answers = batch_of([([7, 8, 9], [4]), ([6], [5, 4, 10])], most=2)
    assert source.tolist() == [[7, STOP], [6, STOP]] and bool(mask.all())
    assert target.tolist() == [[START, 4], [START, 5]] and answers.tolist() == [[4, STOP], [5, 4]]


def test_matches_are_exact():
    answers = torch.tensor([[9, STOP, NONE], [5, 4, STOP], [5, 4, STOP], [5, 4, STOP], [STOP, NONE, NONE]])
    written = torch.tensor([[9, STOP, STOP], [5, 4, STOP], [5, 4, 4], [5, STOP, 4], [STOP, 9, 9]])
    assert until_stop(written) == [[9], [5, 4], [5, 4, 4], [5], []]
    assert exact_matches(written, answers).tolist() == [True, True, False, False, True]
    cut = torch.tensor([[5, 4, NONE]])  # a long answer, cut
    assert until_stop(cut) == [[5, 4]] and exact_matches(torch.tensor([[5, 4, STOP]]), cut).tolist() == [True]


def spelled(language, tokens):
    return " ".join(language.names[token] for token in tokens)


def test_a_sentence_by_hand():
    """A sentence like 'the old red dogs see a cat, and it runs': order, agreement, endings."""
    language = Language(3)
    language.nouns[4], language.nouns[5] = [("DOG", 2)] * 2, [("CAT", 0)] * 2
    language.tokens |= {"DOG": len(language.names), "CAT": len(language.names) + 1}
    language.names += ["DOG", "CAT"]
    old, red, the, a = (language.stems[name] for name in ("adj1", "adj2", "det0", "det1"))
    see, run = language.stems["verb6"], language.stems["verb7"]
    dogs, cat = Phrase(0, (1, 2), 4, True), Phrase(1, (), 5, False)
    read, written = language.pair([Clause(dogs, 6, cat), Clause(cat, 7, None)])
    assert spelled(language, read) == "det0 adj1 adj2 noun4 plural verb6 det1 noun5 and det1 noun5 verb7"
    assert spelled(language, written) == (
        f"DOG PLURAL {red} -ADJ.2.PL {old} -ADJ.2.PL {the} -ADJ.2.PL CAT {a} -ADJ.0.SG {see} -VERB.2.PL "
        f"AND CAT {a} -ADJ.0.SG {run} -VERB.0.SG"
    )


@pytest.mark.parametrize("seed", range(3))
def test_the_verbs_field_says_which_meaning_a_noun_has(seed):
    language = Language(seed)
    assert sorted(language.fields) == [0] * 6 + [1] * 6
    assert len(set(language.names)) == len(language.names) == len(language.tokens) < 256
    translations = {word for meanings in language.nouns for word, _ in meanings}
    assert len(translations) == transduction.NOUNS + transduction.AMBIGUOUS
    verbs = [language.fields.index(of) for of in (0, 1)]
    for noun, ((one, first), (two, other)) in enumerate(language.nouns):
        twice = noun >= transduction.NOUNS - transduction.AMBIGUOUS
        assert (one != two) is (first != other) is twice
        written = []
        for verb in verbs:
            _, out = language.pair([Clause(Phrase(0, (1,), noun, False), verb, None)])
            words = spelled(language, out).split()
            assert words[0] == language.nouns[noun][language.fields[verb]][0]
            written.append([*words[:-2], words[-1]])  # all but the verb's stem
        assert (written[0] != written[1]) is twice


@pytest.mark.parametrize("pairs", [None, 50])
@pytest.mark.parametrize("clauses", [1, 3])
def test_answers_are_the_solvers(clauses, pairs):
    task = transduction.task(clauses=clauses, pairs=pairs, seed=1)
    longest, joined = 0, set()
    for draw in (task.train, task.validation, *task.tests.values()):
        (source, target, mask), answers = draw(300, generator())
        assert len(source) == len(target) == len(mask) == len(answers) == 300
        assert torch.equal(mask, source != PAD) and target.shape == answers.shape
        assert source.max() < task.vocab_size and answers.max() < task.vocab_size
        for tokens, row in zip(source.tolist(), answers.tolist(), strict=True):
            assert task.solve(tokens) == [token for token in row if token != NONE]
        assert torch.equal(target[:, 1:], answers[:, :-1].masked_fill(answers[:, :-1] == NONE, PAD))
        longest = max(longest, answers.shape[1], source.shape[1])
        joined |= set((source == Language(1).tokens["and"]).sum(1).tolist())
    assert task.longest - 7 <= longest <= task.longest  # the very longest is rare
    assert joined == set(range(clauses))


def test_the_longest_sentence():
    task, language = transduction.task(clauses=2), Language(0)
    phrase = Phrase(0, (1, 2), 3, True)
    _, written = language.pair([Clause(phrase, 0, phrase)] * 2)
    assert len(written) + 1 == task.longest


def test_parts_share_no_source_and_held_out_ones_are_always_the_same():
    task, small, large = (transduction.task(clauses=1, pairs=pairs) for pairs in (None, 20, 400))
    found = {}
    for name, draw in {"train": task.train, "validation": task.validation, **task.tests}.items():
        found[name] = {tuple(row) for row in draw(500, generator()).inputs[0].tolist()}
    test = found["like training"] | found["ambiguous nouns"]
    assert not found["train"] & found["validation"] and not (found["train"] | found["validation"]) & test
    for draw, same in [
        (task.validation, large.validation),
        *zip(task.tests.values(), small.tests.values(), strict=True),
    ]:
        assert torch.equal(draw(100, generator(1)).answers, same(100, generator(2)).answers)
    sets = [{tuple(row) for row in one.train(5000, generator()).inputs[0].tolist()} for one in (small, large)]
    # In 5000 draws each is missing with probability (1 - 1/400)^5000 = 4e-6. Rows are as long as their batch's longest.
    words = [{row[: row.index(STOP)] for row in found} for found in sets]
    assert len(words[0]) <= 20 and words[0] < words[1] and 390 < len(words[1]) <= 400
    first, again, other = (task.train(4, generator(seed)).inputs[0] for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_what_is_drawn_as_often_as_said():
    count, language = 4000, Language(0)
    rows = transduction.task(clauses=1).train(count, generator()).inputs[0].tolist()
    sentences = [spelled(language, row[: row.index(STOP)]).split() for row in rows]
    subjects = [words[: next(i for i, w in enumerate(words) if w.startswith("verb"))] for words in sentences]
    shares = {
        "an object": (sum(sum(w.startswith("det") for w in words) == 2 for words in sentences), 3 / 4),
        "a plural subject": (sum("plural" in words for words in subjects), 1 / 2),
        "two adjectives": (sum(sum(w.startswith("adj") for w in words) == 2 for words in subjects), 1 / 3),
        "the last noun": (sum("noun23" in words for words in subjects), 1 / 24),
        "the first verb": (sum("verb0" in words for words in sentences), 1 / 12),
    }
    assert_shares({what: (torch.tensor(found), share) for what, (found, share) in shares.items()}, count)
    adjectives = [[w for w in words if w.startswith("adj")] for words in subjects]
    assert all(len(set(words)) == len(words) for words in adjectives)


@pytest.mark.bad_input
def test_errors():
    cases = [
        (partial(batch_of, []), ValueError, "pairs: expected at least one, got none"),
        (partial(transduction.task, clauses=0), ValueError, "clauses: expected an integer of at least 1, got 0"),
        (partial(transduction.task, pairs=0), ValueError, "pairs: expected an integer of at least 1, got 0"),
        (partial(transduction.task().train, 0, generator()), ValueError, "count: expected an integer of at least 1"),
    ]
    for call, error, message in cases:
        with pytest.raises(error, match=message):
            call()
