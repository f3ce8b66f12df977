"""Handwritten digits: 1,797 images of 8 x 8 pixels, which come with the package.

The images are the test set of 'Optical Recognition of Handwritten Digits' by E. Alpaydin and C. Kaynak (1998, UCI
Machine Learning Repository, doi:10.24432/C50P49, licence CC BY 4.0), in the copy of scikit-learn 1.9.1. Forms filled in
by 13 people were scanned at 32 x 32 points; a pixel counts the black ones in 4 x 4, so it is 0 to 16, and 16 is ink.

`digits.npz` holds the pixels (1797, 8, 8) and the answers (1797,) as bytes, in scikit-learn's order:

    images = sklearn.datasets.load_digits()
    np.savez_compressed("digits.npz", pixels=images.images.astype(np.uint8), answers=images.target.astype(np.uint8))
"""

from functools import cache
from importlib.resources import files

import numpy as np
import torch

from paper.tasks.images import Images, classification, split
from paper.tasks.task import Task

__all__ = ["digits", "images"]

CLASSES, INK = 10, 16
WEIGHTS = (3, 1, 1)  # training, validation, test


def images() -> Images:
    """All images, pixels (1797, 1, 8, 8), in the order of the file."""
    with (files(__package__) / "digits.npz").open("rb") as stream, np.load(stream) as stored:
        return Images(torch.from_numpy(stored["pixels"])[:, None], torch.from_numpy(stored["answers"]).long())


@cache
def digits() -> Task:
    """The task to say which digit is shown: pixels (B, 1, 8, 8), float32 in [0, 1] with ink 1, answers (B,) below 10.

    In each class the images' sha256 say which 60 % are to train on, which 20 % to validate and which to test with:
    the writers are not known, so each may be in all three.
    """
    train, validation, test = split(images(), WEIGHTS)
    return classification(
        "digits",
        "handwritten digits, 8 x 8 pixels",
        classes=CLASSES,
        white=INK,
        train=train,
        validation=validation,
        test=test,
    )
