"""Settings of all tests, made before PyTorch and the package are imported, and inherited by the notebooks' kernels.

One thread, unless the environment says otherwise: the tensors are small, and a second thread costs more time than it
saves. Annotations are checked at run time, except in tests whose marker says that they cannot be. Tests marked
`nightly` repeat what other tests show more cheaply; they run only with ORTHO_TESTS=all.
"""

import os

import annotation_checks
import pytest
import sample

os.environ.setdefault("OMP_NUM_THREADS", "1")
annotation_checks.install()

UNCHECKED = ("bad_input", "unchecked")


def pytest_collection_modifyitems(config, items):
    if sample.WHOLE:
        return
    left_out = [item for item in items if item.get_closest_marker("nightly")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not item.get_closest_marker("nightly")]


@pytest.fixture
def stored(monkeypatch):
    """A function that sets the stored records of experiments, by name; all other experiments then have none."""
    from paper import experiments

    def these(**found):
        records = {name.replace("_", "-"): rows for name, rows in found.items()}
        monkeypatch.setattr(experiments, "load", lambda name: records.get(name, []))

    these()
    return these


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A small library in place of Python's own."""
    from experiment_fakes import small_library

    from paper.experiments.learning import fine_tuning
    from paper.tasks import text

    parts = small_library(tmp_path_factory.mktemp("library"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "python_parts", lambda: parts)
        fine_tuning.tasks.cache_clear()
        yield parts
    fine_tuning.tasks.cache_clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    annotation_checks.begin_test(checking=not any(map(item.get_closest_marker, UNCHECKED)))
    return (yield)
