"""Every set of arms that is timed, on sequences so short that a test can go through all of them."""

from paper.experiments.speed import attention as speed
from paper.experiments.speed import attention_variants as arms

TINY = {"H": 2, "K": 8, "chunk": 8}
# As many tokens as it takes for windows and choices to leave some out.
SETS = {
    name: speed.case(600 if name in ("patterns", "dynamic", "window alone") else 24, name, **TINY) for name in arms.SETS
}
SERVED = {None, "math", "flash"}  # of the kernels by their names, on a CPU
ALL = list(  # each arm once
    {arm: (case, arm) for case in SETS.values() for arm in arms.arms_of(case) if arms.by_name(arm) in SERVED}.values()
)
