"""What a layer, a block and a model cost: closed forms, and the same figures counted from running code.

A closed form is a plain function of sizes. Called with integers it gives an exact count; called with sympy symbols it
gives the formula. `ortho.cost.counting` takes the same figures from a run; the tests require that the two are exactly
equal.
"""

from ortho._cost import Cost
from ortho.cost.layers import hybrid, layer, synthesizer
from ortho.cost.models import block, encoder_decoder, feed_forward, model, step_memory, text_encoder, vision_transformer

__all__ = [
    "Cost",
    "block",
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
