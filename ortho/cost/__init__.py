"""What a layer, a block and a model cost: closed forms, and the same figures counted from running code.

A closed form is a plain function of sizes. Called with integers it gives an exact count; called with sympy symbols it
gives the formula. `ortho.cost.counting` takes the same figures from a run; the tests hold the two equal, exactly.
"""

from ortho.cost.budgets import Choice, choose
from ortho.cost.layers import Cost, block, feed_forward, hybrid, layer
from ortho.cost.models import encoder_decoder, model, step_memory, text_encoder, vision_transformer
from ortho.cost.synthesizer import synthesizer

__all__ = [
    "Choice",
    "Cost",
    "block",
    "choose",
    "encoder_decoder",
    "feed_forward",
    "hybrid",
    "layer",
    "model",
    "step_memory",
    "synthesizer",
    "text_encoder",
    "vision_transformer",
]
