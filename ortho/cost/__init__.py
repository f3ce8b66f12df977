"""What a layer, a block and a model cost: closed forms, and the same figures counted from running code.

A closed form is a plain function of sizes. Called with integers it gives an exact count; called with sympy symbols it
gives the formula. `ortho.cost.counting` takes the same figures from a run; the tests hold the two equal, exactly.
"""

from ortho.cost.closed_forms import Cost, block, feed_forward, layer, model
from ortho.cost.synthesizer import synthesizer
from ortho.cost.whole_models import step_memory, text_encoder, vision_transformer

__all__ = [
    "Cost",
    "block",
    "feed_forward",
    "layer",
    "model",
    "step_memory",
    "synthesizer",
    "text_encoder",
    "vision_transformer",
]
