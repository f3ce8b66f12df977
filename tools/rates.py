"""Choose the learning rates of the learning experiments by their tuning runs, for the runs that count.

    python -m tools.rates

`make experiments` calls it between the two.
"""

from paper.experiments import EXPERIMENTS, load
from paper.experiments.learning import rates

if __name__ == "__main__":
    found = {name: load(name) for name in EXPERIMENTS}
    rates.write({name: [one for one in some if "rate" in one["configuration"]] for name, some in found.items()})
