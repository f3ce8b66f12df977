"""Kernels of notebooks under test import the checkout that the notebook lies in, as when it is executed."""

import os

import pytest
from nbval.plugin import IPyNbCell

from tools.notebooks import environment


@pytest.hookimpl(tryfirst=True)  # the kernel is started by the set-up of a notebook's first cell
def pytest_runtest_setup(item):
    if isinstance(item, IPyNbCell):
        os.environ.update(environment(item.path))
