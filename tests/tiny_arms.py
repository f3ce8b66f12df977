"""Every set of arms that is timed, and the models, made so small that a test can go through all of them."""

import dataclasses

from ortho.cost.configurations import CONFIGURATIONS
from paper.experiments.speed import attention as speed
from paper.experiments.speed import attention_variants as arms

TINY = {"H": 2, "K": 8, "chunk": 8}
# Enough tokens for windows and selections to leave some out.
SETS = {
    name: speed.case(600 if "pattern" in name or name in ("dynamic", "window alone") else 24, name, **TINY)
    for name in arms.SETS
}
SERVED = {None, "math", "flash"}  # names of the kernels that a CPU has
ALL = list(  # each arm once
    {arm: (case, arm) for case in SETS.values() for arm in arms.arms_of(case) if arms.by_name(arm) in SERVED}.values()
)

MODELS = {
    "BERT-base": {"N": 24, "sizes": {"vocab_size": 19, "max_length": 24}},
    "GPT-2 medium": {"N": 64, "sizes": {"vocab_size": 23, "max_length": 64, "bias": True}},
    "ViT-Base": {"N": 10, "sizes": {"image_size": 12, "patch_size": 4, "num_classes": 5, "channels": 3}},
}


def shrink_models(patch):
    """Give the published models sizes that a test can train."""
    for name, sizes in MODELS.items():
        made = dataclasses.replace(CONFIGURATIONS[name], d=16, H=4, L=3, parameters=0, **sizes)
        count = sum(x.numel() for x in made.build(device="meta").parameters())
        patch.setitem(CONFIGURATIONS, name, dataclasses.replace(made, parameters=count))
