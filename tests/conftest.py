"""What holds for all tests, set before PyTorch and the package are imported, and handed down to the notebooks' kernels.

One thread, unless the environment says otherwise: the tensors are small, and two threads cost more than they give.
Annotations are checked at run time, but in tests whose marker says that they cannot be.
"""

import os

import annotation_checks
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
annotation_checks.install()

UNCHECKED = ("bad_input", "unchecked")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    annotation_checks.begin_test(checking=not any(map(item.get_closest_marker, UNCHECKED)))
    return (yield)
