"""Shape annotations are checked at run time when ORTHO_CHECK_SHAPES is set, before the package is imported."""

import os

if os.environ.get("ORTHO_CHECK_SHAPES"):
    from jaxtyping import install_import_hook

    install_import_hook("ortho", "beartype.beartype")
