"""What holds for all tests, set before PyTorch and the package are imported, and handed down to the notebooks' kernels.

One thread, unless the environment says otherwise: the tensors are small, and two threads cost more than they give.
Shape annotations are checked at run time when ORTHO_CHECK_SHAPES is set.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
if os.environ.get("ORTHO_CHECK_SHAPES"):
    from jaxtyping import install_import_hook

    install_import_hook("ortho", "beartype.beartype")
