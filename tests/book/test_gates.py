"""The gates can close: what must not be published is refused, for every reason, and a failed run changes nothing."""

import json
import os
import subprocess
import sys
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from nbformat import v4

from tools import notebooks, pages, stored, words

ROOT = Path(__file__).parents[2]
MUST_FAIL = ROOT / "tests" / "gates" / "must_fail.ipynb"


def printed(text, name="stdout"):
    return v4.new_output("stream", name=name, text=text)


def notebook(*sources, tags=()):
    """A notebook as `execute` would leave it, with cells that printed nothing."""
    cells = [v4.new_code_cell(source, id=f"cell-{i}", execution_count=i + 1) for i, source in enumerate(sources)]
    nb = v4.new_notebook(cells=cells)
    notebooks.normalise(nb)
    for i in tags:
        nb.cells[i].metadata["tags"] = [notebooks.TIMING_TAG]
    return nb


def save(nb, path):
    path.write_text(nbformat.writes(nb) + "\n")
    return path


def pytest_nbval(*arguments):
    command = [sys.executable, "-m", "pytest", "--nbval", "-q", "-p", "no:cacheprovider", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


# ------------------------------------------------------------------------------------------ the notebook that must fail


def test_comparison_fails_on_stale_and_raising_cells_and_is_blind_to_the_unexecuted_one():
    result = pytest_nbval(MUST_FAIL)
    assert result.returncode == 1
    assert "2 failed, 1 passed" in result.stdout
    assert "Cell outputs differ" in result.stdout
    assert "Cell execution caused an exception" in result.stdout


def test_check_rejects_the_unexecuted_cell():
    assert stored.faults(nbformat.read(MUST_FAIL, as_version=4)) == ["code cell 2 (unexecuted) is not executed"]
    assert notebooks.main(["check", str(MUST_FAIL)]) == 1


def test_it_is_run_on_request_only(pytestconfig):
    assert MUST_FAIL.parent.name in pytestconfig.getini("norecursedirs")


# ---------------------------------------------------------------------------------------------------------------- check


def cell(number, **changed):
    """A function that changes one cell of a notebook."""
    return lambda nb: nb.cells[number].update(changed)


def shows(*outputs):
    return cell(0, outputs=list(outputs))


def data(kind, content):
    return v4.new_output("display_data", {kind: content})


def tagged(tag):
    return cell(0, metadata={"tags": [tag]})


def swapped(nb):
    nb.cells[1].execution_count, nb.cells[2].execution_count = 3, 2


@pytest.mark.parametrize(
    ("alter", "reason"),
    [
        (cell(1, execution_count=None), "{1} is not executed"),
        (swapped, "{1} is out of order: executed as number 3, expected 2"),
        (shows(v4.new_output("error", ename="ValueError", evalue="no")), "{0} stores an error: ValueError: no"),
        (shows(printed("UserWarning: slow\n", "stderr")), "{0} stores a warning: UserWarning: slow"),
        (cell(1, source="x  # changed"), "{1} was edited, added or removed after execution"),
        (lambda nb: nb.cells.append(v4.new_code_cell(id="cell-3")), "{3} was edited, added or removed after execution"),
        (lambda nb: nb.cells.pop(), "code cell 2 was edited, added or removed after execution"),
        (lambda nb: nb.metadata.pop("ortho"), "was never executed by tools/notebooks.py"),
        (shows(data("image/png", "iVBORw0KGgo=")), "{0} has outputs that were edited after execution"),
        (tagged("nbval-skip"), "{0} has tags other than "),
        (cell(0, source="# NBVAL_SKIP\nx = 2"), "{0} keeps itself from the comparison of outputs: # NBVAL_SKIP"),
        (tagged(notebooks.TIMING_TAG), "{0} has the tag nbval-ignore-output, and takes no time that could differ"),
        (shows(printed("saved to /home/someone/figure.png\n")), "{0} shows an absolute path: /home/someone/figure.png"),
        (shows(data("text/plain", f"'{ROOT}/results'")), "{0} shows an absolute path"),
        (shows(data("text/plain", "<object at 0x7f3a5c0d12e0>")), "{0} shows a memory address: at 0x7f3a5c0d12e0"),
    ],
)
def test_check_names_the_reason(alter, reason):
    nb = notebook("x = sum([1, 1])", "x", "assert x == 2")
    assert stored.faults(nb) == []
    alter(nb)
    said = reason.format(*(f"code cell {i} (cell-{i})" for i in range(4)))
    assert any(fault.startswith(said) for fault in stored.faults(nb)), stored.faults(nb)


def test_live_timings_may_differ():
    for source in ("import time\nprint(time.perf_counter())", "experiments.measure(step, case, 'cpu')"):
        assert stored.faults(notebook(source, "assert f()", tags=[0])) == []


@pytest.mark.parametrize(
    "source", ["x = f(2)", "'assert x'", "# assert x", "assert_x = 2", "x =", "def f(x):\n    return x"]
)
def test_code_that_asserts_nothing(source):
    assert stored.faults(notebook(source)) == ["asserts nothing"]


@pytest.mark.parametrize(
    "source",
    [
        "assert True",
        "assert 1 == 1",
        "assert 6 * 7 // 2 == 21, 'as expected'",
        "x = 2\nassert x == 2",
        "x, y = 2, 3\ny += x\nassert y == 5",
        "for n in (63, 1000):\n    assert n > 0",
        "assert (n := 2) < 3",
        "torch.testing.assert_close(1.0, 1.0, rtol=0)",
    ],
)
def test_an_assertion_on_constants_is_refused(source):
    fault, *others = stored.faults(notebook(source))
    assert fault.startswith("code cell 0 (cell-0) asserts of constants alone: ") and others == ["asserts nothing"]


@pytest.mark.parametrize(
    "source",
    [
        "assert x == 2",
        "assert f(1) == 2",
        "x = f()\nassert x == 2",
        "x = 2\nx = f()\nassert x == 2",
        "x = 2\nx += f()\ny = x\nassert y == 2",
        "rows = []\nfor i in (1, 2):\n    rows.append(i)\nassert rows == [1, 2]",
        "found, rest = {}, 0\nassert not found",
        "for n in sizes:\n    assert n > 0",
        "x = 2\ndef check(x):\n    assert x == 2",
        "from module import x\nassert x == 2",
        "with opened() as x:\n    assert x",
        "torch.testing.assert_close(a, b)",
        "%precision 3\nassert x",
    ],
)
def test_an_assertion_on_what_code_computes_counts(source):
    assert stored.faults(notebook(source)) == []


def test_check_of_a_damaged_file_says_so_in_one_line(tmp_path, capsys):
    damaged = tmp_path / "damaged.ipynb"
    damaged.write_text('{"cells": [')
    assert notebooks.main(["check", str(damaged), str(tmp_path / "absent.ipynb")]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if "damaged.ipynb cannot be read as a notebook" in line]
    assert [line for line in lines if "absent.ipynb cannot be read as a notebook" in line]
    assert len(lines) == 3


# -------------------------------------------------------------------------------------------------------------- execute


def test_executing_twice_leaves_the_same_bytes(tmp_path):
    clock = "import time\nprint(time.perf_counter_ns())"
    nb = notebook("x = sum([1, 1])", clock, "for i in range(3):\n    print(i, flush=True)\nassert x == 2\nx", tags=[1])
    nb.metadata["language_info"] = {"name": "python", "version": "3.0.0"}
    nb.cells[0].metadata["execution"] = {"iopub.status.busy": "2026-01-01T00:00:00Z"}
    path = save(nb, tmp_path / "chapter.ipynb")

    seconds, changed = notebooks.execute(path)
    assert seconds > 0.1 and changed, "a kernel alone takes longer to start"
    first = path.read_bytes()
    assert not notebooks.execute(path)[1]
    assert path.read_bytes() == first
    assert [child.name for child in tmp_path.iterdir()] == [path.name]

    nb = nbformat.reads(first.decode(), as_version=4)
    assert stored.faults(nb) == []
    assert "version" not in nb.metadata["language_info"]
    assert nb.cells[0].metadata == {}
    assert [output.get("text") for output in nb.cells[2].outputs] == ["0\n1\n2\n", None]

    notebooks.execute(path, fresh=True)
    assert path.read_bytes() != first, "a fresh run takes the timing anew"

    second = nbformat.read(path, as_version=4)
    second.cells[0].source = "x = sum([2, 0])"
    notebooks.execute(save(second, path))
    third = nbformat.read(path, as_version=4)
    assert third.cells[1].outputs != second.cells[1].outputs, "code before the timing has changed"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("y = 1\nassert x == 3, f'x is {x}'", "AssertionError: x is 2\n    line 2: assert x == 3, f'x is {x}'"),
        ("import os\nos._exit(1)", "the kernel died"),
        ("import time\ntime.sleep(60)", "still running after 2 s"),
    ],
)
def test_a_failing_cell_is_named_and_the_file_stays_as_it_was(tmp_path, monkeypatch, source, message):
    monkeypatch.setattr(notebooks, "CELL_TIMEOUT", 2)
    path = save(notebook("x = 2", source), tmp_path / "chapter.ipynb")
    before = path.read_bytes()
    with pytest.raises(notebooks.NotebookError) as failure:
        notebooks.execute(path)
    assert str(failure.value).startswith(f"{path}, cell 1 (cell-1): {message}")
    assert path.read_bytes() == before
    assert [child.name for child in tmp_path.iterdir()] == [path.name]


def test_a_kernel_that_never_comes_up_is_said_in_a_few_lines(tmp_path, monkeypatch, capsys):
    argv = [sys.executable, "-c", "raise SystemExit('no such module')"]
    monkeypatch.setattr(KernelSpecManager, "get_kernel_spec", lambda self, name: KernelSpec(argv=argv))
    path = save(notebook("x = 2"), tmp_path / "chapter.ipynb")
    before = path.read_bytes()
    assert notebooks.main(["execute", str(path)]) == 1
    error = capsys.readouterr().err
    assert f"{path}, before the first cell: Kernel died" in error and "\n    no such module\n" in error
    assert "1 of 1 notebooks failed" in error
    assert path.read_bytes() == before


def test_a_lost_process_stops_no_other(tmp_path, monkeypatch, capsys):
    def lost():
        raise BrokenProcessPool("terminated abruptly")

    a, b = tmp_path / "a.ipynb", tmp_path / "b.ipynb"
    monkeypatch.setattr(
        notebooks, "executions", lambda some, fresh: [(a, lost), (b, lambda: (1.0, False))][: len(some)]
    )
    assert notebooks.main(["execute", str(a), str(b)]) == 1
    printed = capsys.readouterr()
    assert f"{a} could not be executed: terminated abruptly\n" in printed.err and "1 of 2" in printed.err
    assert f"  {b}\n" in printed.out


def test_a_failure_stops_no_other_and_timings_are_taken_alone(tmp_path, monkeypatch, capsys):
    sources = {"a": "print(1)", "b": "raise ValueError('no')", "timed": "print(3)", "c": "print(2)"}
    paths = {name: save(notebook(source), tmp_path / f"{name}.ipynb") for name, source in sources.items()}
    save(notebook(sources["timed"], tags=[0]), paths["timed"])
    executions, ends = notebooks.executions, []

    def noted(*some, **how):
        for path, done in executions(*some, **how):
            ends.append(path)
            yield path, done

    monkeypatch.setattr(notebooks, "executions", noted)
    assert notebooks.main(["execute", *map(str, paths.values())]) == 1
    assert sorted(ends[:-1]) == [paths[name] for name in "abc"] and ends[-1] == paths["timed"]
    printed = capsys.readouterr()
    assert f"{paths['b']}, cell 0 (cell-0): ValueError: no" in printed.err
    assert "1 of 4 notebooks failed" in printed.err
    assert [name for name in sources if paths[name].as_posix() in printed.out] == ["a", "timed", "c"]
    shown = [nbformat.read(paths[name], as_version=4).cells[0].outputs[0]["text"] for name in ("a", "c")]
    assert shown == ["1\n", "2\n"]


def kept_times(root, monkeypatch, *, changed):
    """Execute a chapter of a made-up book in 1.26 s; return what was executed, and the book's stored times."""
    executed = []

    def execute(path, fresh):
        executed.append(path.relative_to(root).as_posix())
        return 1.26, changed

    for name, value in (("ROOT", root), ("RUN_TIMES", root / "times"), ("SHOW_TIMES", [root / "book" / "status"])):
        monkeypatch.setattr(notebooks, name, value)
    monkeypatch.setattr(notebooks, "execute", execute)
    assert notebooks.main(["execute", str(root / "notebooks" / "01-a.ipynb")]) == 0
    return executed, json.loads((root / "times").read_text())


@pytest.mark.parametrize(
    ("old", "changed", "new"),
    [
        ({}, False, {"notebooks/01-a.ipynb": 1.3}),
        ({"notebooks/01-a.ipynb": 9.0}, True, {"notebooks/01-a.ipynb": 1.3}),
        ({"notebooks/01-a.ipynb": 9.0}, False, {"notebooks/01-a.ipynb": 9.0}),
        ({"notebooks/00-gone.ipynb": 9.0}, False, {"notebooks/01-a.ipynb": 1.3}),
    ],
)
def test_a_chapter_has_the_time_of_its_stored_outputs_and_the_pages_follow(tmp_path, monkeypatch, old, changed, new):
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "01-a.ipynb").touch()
    (tmp_path / "times").write_text(json.dumps(old))
    executed, times = kept_times(tmp_path, monkeypatch, changed=changed)
    assert times == new
    assert executed == ["notebooks/01-a.ipynb"] + ["book/status"] * (new != old)


def test_every_chapter_and_guide_has_a_time_and_the_pages_that_show_times_exist():
    timed = {notebooks.title(path) for path in notebooks.every_notebook() if path.parent != ROOT / "book"}
    assert json.loads(notebooks.RUN_TIMES.read_text()).keys() == timed
    assert [path.name for path in notebooks.SHOW_TIMES if not path.exists()] == []


# -------------------------------------------------------------------------------------------------------------- kernels


@pytest.fixture
def two_checkouts(tmp_path):
    """Two checkouts with a chapter each; a chapter prints which checkout's package it has imported."""
    chapters = []
    for name in ("mine", "theirs"):
        package = tmp_path / name / "ortho" / "__init__.py"
        package.parent.mkdir(parents=True)
        package.write_text(f"CHECKOUT = {name!r}\n")
        (tmp_path / name / "notebooks").mkdir()
        chapter = notebook("import ortho\nprint(ortho.CHECKOUT)", "assert ortho.CHECKOUT")
        chapter.cells[0].outputs = [printed(f"{name}\n")]
        chapters.append(save(chapter, tmp_path / name / "notebooks" / "chapter.ipynb"))
    return chapters


def test_a_notebook_runs_the_checkout_it_lies_in(two_checkouts, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "theirs"))
    for chapter in two_checkouts:
        notebooks.execute(chapter)
        assert nbformat.read(chapter, as_version=4).cells[0].outputs[0]["text"] == f"{chapter.parts[-3]}\n"
    result = pytest_nbval("-p", "conftest", "--nbval-current-env", *two_checkouts)
    assert "4 passed" in result.stdout, result.stdout


def test_a_notebook_outside_every_checkout_runs_this_one(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["elsewhere", str(ROOT)]))
    assert notebooks.environment(tmp_path / "a.ipynb")["PYTHONPATH"] == os.pathsep.join([str(ROOT), "elsewhere"])


NAMELESS = "import pwd\ndef nobody(uid):\n    raise KeyError(uid)\npwd.getpwuid = nobody\n"


def test_a_user_without_a_home_folder_can_execute(tmp_path):
    """As in a container that runs under a user id without a name."""
    (tmp_path / "sitecustomize.py").write_text(NAMELESS)
    path = save(notebook("from pathlib import Path\nprint(Path.home().name[:5])"), tmp_path / "chapter.ipynb")
    environment = {name: value for name, value in os.environ.items() if name != "HOME"}
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), str(ROOT)])
    command = [sys.executable, "-m", "tools.notebooks", "execute", str(path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert nbformat.read(path, as_version=4).cells[0].outputs[0]["text"] == "home-\n"


# ---------------------------------------------------------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("The step is 17.3 % faster, at 4,096 tokens and\n64 heads.", ["17.3 %", "4,096", "64"]),
        ("It loses 2 of 8 products, 5 % of the time.", ["5 %"]),
        ("```{prf:theorem} With 24 rows\n:label: one-32\n\nOf 48 rows $128 + 1$ are kept.\n```", ["24", "48"]),
        ("| a | b |\n|:--|--:|\n| 13 | `14` |", ["13"]),
        ("![a curve that falls by 40 %](figure.png)", ["40 %"]),
        ('As the source says: "16.2 to 56.1 %" (arXiv:2102.11174, 2021), for GPT-2 and S0.1.3a.', []),
        ("See chapter 28, sections 14.1 and 15, [29](29-one-learned-head.ipynb), {cite:p}`author2021`.", []),
        ("```python\nx = 64\n```\n\n$$\n64\n$$\n\n(label-64)=\n## About {glue:text}`share-99` of it", []),
    ],
)
def test_typed_figures_are_found(text, found):
    assert words.typed([("text", text)]) == found


def test_captions_in_code_are_read_and_other_strings_are_not():
    source = 'table(rows, "seconds, median of 25 runs")\nx = f"{y:.1f} % of the 800 tokens"\nname = "heads 64"'
    assert sorted(words.typed([("code", source)])) == ["25", "800"]


def test_typed_figures_may_only_become_fewer(tmp_path, monkeypatch, capsys):
    page, listed = tmp_path / "page.md", tmp_path / "listed.json"
    monkeypatch.setattr(words, "pages", lambda: [page])
    monkeypatch.setattr(words, "TYPED", listed)
    listed.write_text(json.dumps({page.as_posix(): "17, 64, 64"}))

    page.write_text("Of 64 heads 64, 17 and 18.")
    assert words.main([]) == 1
    assert capsys.readouterr().err.splitlines() == [f"{page} has a typed figure: 18"]
    page.write_text("Of 64 heads 17.")
    assert words.main([]) == 1
    assert capsys.readouterr().err.splitlines() == [f"{page} no longer has 64: python -m tools.words --mend"]
    assert words.main(["--mend"]) == words.main([]) == 0
    assert json.loads(listed.read_text()) == {page.as_posix(): "17, 64"}
    page.unlink()
    page.write_text("Nothing is left.")
    assert words.main(["--mend"]) == 0 and json.loads(listed.read_text()) == {}


# ---------------------------------------------------------------------------------------------------------------- pages


def test_figures_lose_what_nobody_sees(tmp_path):
    (tmp_path / "index.html").touch()
    figure = tmp_path / "_images" / "one.svg"
    figure.parent.mkdir()
    figure.write_text(
        '<svg width="7.125pt">\n <metadata><a>SVG</a></metadata>\n <!-- a tick -->\n <g transform="scale(0.015625)">\n'
        '  <path d="M 1.23456 -2.5 \nL 30 0.001 \n" style="stroke-width: 0.625"/>\n'
        '  <use x="12.999" y="-0.5" transform="translate(31.884766 0)"/>\n <text>a  b</text></g>\n</svg>\n'
    )
    for _ in range(2):
        assert pages.main(tmp_path) == 0
        assert figure.read_text() == (
            '<svg width="7.125pt"><g transform="scale(0.015625)"><path d="M 1.23 -2.5 L 30 0.00 " style="stroke-width: '
            '0.625"/><use x="12.99" y="-0.5" transform="translate(31.88 0)"/><text>a  b</text></g></svg>\n'
        )


def test_pages_that_fetch_from_another_host_are_refused(tmp_path, capsys):
    page = tmp_path / "index.html"
    page.write_text('<a href="https://example.org">a link to follow</a><img src="figure.png">')
    assert pages.main(tmp_path) == 0
    assert page.as_uri() in capsys.readouterr().out

    page.write_text('<script src="https://cdn.example.org/math.js"></script><link rel="stylesheet" href="//a.org/b">')
    assert pages.main(tmp_path) == 1
    assert capsys.readouterr().err.count("index.html: <") == 2


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('<img srcset="a.png 1x, https://e.org/b.png 2x">', "<img srcset=a.png 1x, https://e.org/b.png 2x>"),
        ('<p style="background: url(https://e.org/b.png)">', "url(https://e.org/b.png"),
        ("<style>p {}\n@import url('https://e.org/b.css');</style>", "url('https://e.org/b.css"),
        ('<style>@import "//e.org/b.css";</style>', '@import "//e.org/b.css'),
        ('<img srcset="a.png 1x, b.png 2x"><p style="background: url(b.png)">', ""),
        ("<style>p { background: url(data:image/svg,x) }</style><code>url(https://e.org)</code>", ""),
        ("<style></style>url(https://e.org)<script>const a = 'url(https://e.org)'</script>", ""),
    ],
)
def test_what_attributes_and_styles_fetch_is_found(tmp_path, text, found):
    (tmp_path / "index.html").write_text(text)
    assert pages.foreign(tmp_path) == [f"index.html: {found}"] * bool(found)


def test_what_a_style_sheet_fetches_is_found(tmp_path):
    (tmp_path / "_static").mkdir()
    sheet = "@font-face { src: url(a.woff2), url( 'http://e.org/b.woff2') }"
    (tmp_path / "_static" / "theme.css").write_text(sheet)
    assert pages.foreign(tmp_path) == ["_static/theme.css: url( 'http://e.org/b.woff2"]


def test_icons_that_no_page_shows_are_left_out(tmp_path):
    (tmp_path / "index.html").write_text('<i class="fa-sun"></i><i class="fa-lg"></i>')
    (tmp_path / "theme.js").write_text('button.className = "fa-x"')
    rule, other = '.fa-star:before,.fa-sun:before{content:"\\f185"}', '.fa-lg{font-size:2em}.fa-x:before{content:"x"}'
    (tmp_path / "theme.css").write_text(
        rule + '.fa-sunset:before{content:"\\f186"}.fa-star:before{content:"*"}' + other
    )
    for _ in range(2):  # pages may be built over those of an earlier build
        assert pages.main(tmp_path) == 0
        assert (tmp_path / "theme.css").read_text() == rule + other
