"""What holds for all tests, set before PyTorch and the package are imported, and handed down to the notebooks' kernels.

One thread, unless the environment says otherwise: the tensors are small, and two threads cost more than they give.
Shape annotations are checked at run time when ORTHO_CHECK_SHAPES is set. Files that take longest are begun first, so
that no process works at one of them alone when the others are done.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
if os.environ.get("ORTHO_CHECK_SHAPES"):
    from jaxtyping import install_import_hook

    install_import_hook("ortho", "beartype.beartype")

LONGEST = ("test_shapes.py", "test_portability.py", "test_shapes_of_training.py")


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.name not in LONGEST)
