"""Training that can be resumed: a recipe, a loop, checkpoints."""

from paper.training.checkpoints import CheckpointError
from paper.training.recipe import Recipe
from paper.training.trainer import Trainer

__all__ = ["CheckpointError", "Recipe", "Trainer"]
