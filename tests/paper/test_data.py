"""Texts, images and pairs of sentences: what is fetched, how it is split, and what examples are cut from it."""

import gzip
import hashlib
import os
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch
from seeded import generator

from paper.experiments.learning import fine_tuning
from paper.tasks import images, novels, text, transduction
from paper.tasks import translation as texts
from paper.tasks.download import RemoteFile, fetch
from paper.tasks.pairs import PAD, STOP, until_stop
from paper.tasks.task import NONE
from paper.tasks.transduction import Clause, Language, Phrase
from paper.tasks.translation import multi30k_corpus, translation


def test_files_are_fetched_once_and_by_their_checksum(tmp_path, monkeypatch):
    """What arrives changed is not kept; a file that is damaged later is refused and left as it is."""
    monkeypatch.delenv("ORTHO_DATA", raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    content = bytes(range(256)) * 100
    served, kept = tmp_path / "numbers", tmp_path / "cache" / "ortho" / "some" / "numbers"
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=tmp_path)) as server:
        threading.Thread(target=partial(server.serve_forever, poll_interval=0.01), daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/numbers"
        file = RemoteFile("some/numbers", address, hashlib.sha256(content).hexdigest())
        served.write_bytes(content[:-1])
        with pytest.raises(ValueError, match="hash"):
            fetch(file)
        assert not kept.exists()
        served.write_bytes(content)
        assert fetch(file) == kept and kept.read_bytes() == content
        server.shutdown()
    assert fetch(file) == kept and list(kept.parent.iterdir()) == [kept]
    kept.write_bytes(content[:-1])
    for folder in ("", tmp_path / "cache" / "ortho"):  # as the cache, and as a local folder
        monkeypatch.setenv("ORTHO_DATA", str(folder))
        with pytest.raises(ValueError, match=f"{kept}: expected the sha256 {file.sha256}.*is not used; remove it"):
            fetch(file)
    assert kept.read_bytes() == content[:-1]


# ------------------------------------------------------------------------------------------------------- bytes of texts


# Random bytes: no window of 17 is in two parts, or twice in one.
PARTS = text.Parts(*map(np.random.default_rng(0).bytes, (5000, 1000, 1000)))
EXAMPLE = text.language_modelling("numbers", "counting", PARTS, 16)


def shown(batch):
    """The windows that a batch shows, as bytes."""
    return [bytes(row) for row in text.whole_windows(batch).tolist()]


def draws(task):
    return {"train": task.train, "validation": task.validation, **task.tests}


def test_each_answer_is_the_next_byte_of_its_part():
    for part, draw in draws(EXAMPLE).items():
        batch = draw(40, generator())
        assert batch.inputs[0].shape == batch.answers.shape == (40, 16) == (40, EXAMPLE.longest)
        assert batch.inputs[0].dtype == batch.answers.dtype == torch.long
        assert torch.equal(batch.inputs[0][:, 1:], batch.answers[:, :-1])
        assert all(window in getattr(PARTS, part) for window in shown(batch))


@pytest.mark.parametrize("count", [1, 2, 7, 61, 62])
def test_held_out_windows_are_the_same_whatever_the_generator_and_ask_for_no_byte_twice(count):
    """1,000 bytes have 62 windows of 16 answers: 62 * 16 + 1 <= 1,000 < 63 * 16 + 1."""
    for content, draw in ((PARTS.validation, EXAMPLE.validation), (PARTS.test, EXAMPLE.tests["test"])):
        drawn = shown(draw(count, generator(1)))
        assert drawn == shown(draw(count, generator(2))) and len(drawn) == count
        starts = [content.index(window) for window in drawn]
        assert starts[0] == 0 and (count == 1 or starts[-1] == 1000 - 17)
        distances = np.diff(starts)
        assert count == 1 or ((distances >= 16).all() and np.ptp(distances) <= 1)


def write(folder, contents):
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


SOURCES = {f"package{i % 7}/module{i}.py": f"x = {i}\n".encode() * (1 + i % 3) for i in range(400)}
# What Parts.facts gave for SOURCES when the split was fixed: a changed split makes stored results incomparable.
FIXED = {"train": "2874431fb95d98c5", "validation": "ed411f562d799dfe", "test": "940216b353a77508"}


def test_the_split_of_sources_is_fixed_by_their_content_alone(tmp_path):
    """Whatever the names; files of one content count once, so that none is in two parts."""
    write(tmp_path / "one", SOURCES)
    copied = enumerate([*reversed(SOURCES.values()), *SOURCES.values()])
    write(tmp_path / "two", {f"other{i}.py": content for i, content in copied})
    parts = text.python_parts(tmp_path / "one")
    assert parts == text.python_parts(str(tmp_path / "two"))
    assert {name: fact["sha256"][:16] for name, fact in parts.facts().items()} == FIXED
    by_hash = sorted((hashlib.sha256(content).hexdigest(), content) for content in SOURCES.values())
    for part, first, last in zip(parts, (0, 0.9, 0.95), (0.9, 0.95, 1), strict=True):
        assert part == b"".join(content for digest, content in by_hash if first <= int(digest, 16) / 2**256 < last)


def test_novels(tmp_path, monkeypatch):
    """Each novel has its own parts, without Gutenberg's text around the novel; lines end in one byte."""
    bodies = [b"".join(b"%d line %d\r\n" % (i, n) for n in range(500)) for i in range(2)]
    files = []
    for i, body in enumerate(bodies):
        whole = b"header\r\n*** START OF THIS PROJECT GUTENBERG EBOOK X ***\r\n\r\n" + body + b"***END OF THE PROJECT "
        path = tmp_path / "novels" / f"{i}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(whole + b"GUTENBERG EBOOK X***\r\nlicence\r\n")
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        files.append(RemoteFile(f"novels/{i}.txt", "https://localhost", digest))
    monkeypatch.setattr(novels, "NOVELS", tuple(files))
    plain = [body.replace(b"\r\n", b"\n") for body in bodies]
    monkeypatch.setenv("ORTHO_DATA", str(tmp_path))
    parts = novels.novels_parts()
    ends = [[len(one) * share // 100 for share in (90, 95)] for one in plain]
    assert parts.train == b"".join(one[:a] for one, (a, _) in zip(plain, ends, strict=True))
    assert parts.validation == b"".join(one[a:b] for one, (a, b) in zip(plain, ends, strict=True))
    assert parts.test == b"".join(one[b:] for one, (_, b) in zip(plain, ends, strict=True))


def test_the_parts_of_pythons_help_share_no_paragraph_nor_text_with_its_sources():
    """A model of the sources, tuned to the help, has not seen it; only docstrings may repeat some of it."""
    help_parts, sources = fine_tuning.help_parts(), text.python_parts()
    every = [one for part in help_parts for one in part.decode(errors="ignore").split("\n\n")]
    assert len(set(every)) == len(every)
    sizes = [len(part) for part in help_parts]
    assert [size / sum(sizes) for size in sizes] == pytest.approx([0.9, 0.05, 0.05], abs=1e-4)
    assert sum(sizes) > 200_000
    assert "pydoc_data" in text.LEFT_OUT
    assert b'The "yield" statement' in b"".join(help_parts)
    windows = [help_parts.test[i : i + 100] for i in range(0, len(help_parts.test) - 100, 1000)]
    assert sum(window in sources.train for window in windows) <= len(windows) // 10
    share = [part.test.count(b"self.") / len(part.test) for part in (sources, help_parts)]
    assert share[0] > 10 * share[1]
    assert [task.name for task in fine_tuning.tasks(16)] == ["python-sources", "python-help"]


# --------------------------------------------------------------------------------------------------------------- images


def rows(drawn):
    return [(pixels.numpy().tobytes(), int(answer)) for pixels, answer in zip(*drawn, strict=True)]


def test_the_task_of_digits_shows_its_parts():
    parts = images.split(images.digit_images(), images.DIGITS)
    # As when the split was fixed: a changed split makes stored results incomparable.
    fixed = [hashlib.sha256(part.pixels.numpy().tobytes()).hexdigest()[:16] for part in parts]
    assert fixed == ["87b2e07a4058469b", "fd3ef3a21241c822", "fdcf4ceb891b8772"]
    task = images.digits()
    for draw, part in zip((task.train, task.validation, task.tests["test"]), parts, strict=True):
        (pixels,), answers = draw(len(part.answers), generator())
        # Division by the ink is undone exactly: the product is off by less than 1/2.
        drawn = rows(images.Images((pixels * images.INK).round().to(torch.uint8), answers))
        assert drawn == rows(part) if part is not parts[0] else set(drawn) <= set(rows(part))
        assert pixels.min() == 0 and pixels.max() == 1


# --------------------------------------------------------------------------------------------------- a made-up language


def test_a_text_ends_before_its_stop():
    written = torch.tensor([[9, STOP, STOP], [5, 4, STOP], [5, 4, 4], [5, STOP, 4], [STOP, 9, 9], [5, 4, NONE]])
    assert until_stop(written) == [[9], [5, 4], [5, 4, 4], [5], [], [5, 4]]


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


# --------------------------------------------------------------------------------------------------------- translations


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


@pytest.mark.skipif("ORTHO_DATA" not in os.environ, reason="needs the files of Multi30k in ORTHO_DATA")
def test_multi30k():
    pytest.importorskip("tokenizers")
    pytest.importorskip("sacrebleu")
    corpus = multi30k_corpus()
    assert [len(part) for part in corpus] == [29_000, 1_014, 1_000]
    made = translation("multi30k", "", corpus.limited(1000), 1000)
    assert made.vocabulary.size == made.task.vocab_size == 1000
    answers = made.task.tests["test"](1000, generator()).answers
    assert answers.shape[0] == 1000 and made.bleu("test", answers).score > 99  # long ones are cut
    assert not {source for source, _ in corpus.train} & {source for source, _ in corpus.test}
