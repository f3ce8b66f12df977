"""Classification of small images: handwritten digits, which come with the package.

Digits: 1,797 images of 8 x 8 pixels, the test set of 'Optical Recognition of Handwritten Digits' by E. Alpaydin and
C. Kaynak (1998, UCI Machine Learning Repository, doi:10.24432/C50P49, licence CC BY 4.0), in the copy of scikit-learn
1.9.1. Forms filled in by 13 people were scanned at 32 x 32 points; a pixel counts the black points in a square of
4 x 4, so it is 0 to 16, and 16 is ink. `digits.npz` holds the pixels (1797, 8, 8) and the answers (1797,) as bytes, in
scikit-learn's order:

    images = sklearn.datasets.load_digits()
    np.savez_compressed("digits.npz", pixels=images.images.astype(np.uint8), answers=images.target.astype(np.uint8))
"""

import hashlib
from collections.abc import Sequence
from functools import cache, partial
from importlib.resources import files
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paper.tasks.task import Batch, Draw, Task, any_of, first_of

CLASSES = 10
INK = 16  # the largest number of a pixel
DIGITS = (3, 1, 1)  # weights of training, validation, test


class Images(NamedTuple):
    """Pixels (n, C, H, W) as bytes, and the class of each image, integers (n,)."""

    pixels: Tensor
    answers: Tensor

    def taken(self, picks: Tensor) -> "Images":
        """The images at the indices, in their order."""
        return Images(self.pixels[picks], self.answers[picks])


def split(images: Images, weights: Sequence[int]) -> list[Images]:
    """The images in parts, whose sizes in each class are in proportion to `weights`. Within a part images are in the
    order of the sha256 of their pixels, so that the first ones of a part are of all classes.

    The order in which the images come does not matter, and no image is in two parts. Equal images of a class follow
    each other, and so are in one part, unless a cut falls between them.
    """
    digests = [hashlib.sha256(image.tobytes()).digest() for image in images.pixels.numpy()]
    ordered = images.taken(torch.tensor(sorted(range(len(digests)), key=digests.__getitem__)))
    cuts = [0, *accumulate(weights)]
    parts = torch.empty(len(digests), dtype=torch.long)
    for label in ordered.answers.unique():
        places = (ordered.answers == label).nonzero().flatten()
        for part, (first, last) in enumerate(pairwise(len(places) * cut // cuts[-1] for cut in cuts)):
            parts[places[first:last]] = part
    return [ordered.taken((parts == part).nonzero().flatten()) for part in range(len(weights))]


def _draws(part: Images) -> tuple[Draw, Draw]:
    """Draws with replacement, and the first images whatever the generator; ValueError for more than there are."""

    def batch(picks: Tensor) -> Batch:
        taken = part.taken(picks)
        return Batch((taken.pixels.float() / INK,), taken.answers)

    return partial(any_of, len(part.answers), batch), partial(first_of, len(part.answers), batch)


def digit_images() -> Images:
    """All digits, pixels (1797, 1, 8, 8), in the order of the file."""
    with (files(__package__) / "digits.npz").open("rb") as stream, np.load(stream) as stored:
        return Images(torch.from_numpy(stored["pixels"])[:, None], torch.from_numpy(stored["answers"]).long())


@cache
def digits() -> Task:
    """The task to say which digit is shown: pixels (B, 1, 8, 8), float32 in [0, 1] with ink 1, answers (B,) below 10.

    In each class the images' sha256 say which 60 % are to train on, which 20 % to validate and which to test with:
    the writers are not known, so each may be in all three.
    """
    train, validation, test = split(digit_images(), DIGITS)
    return Task(
        name="digits",
        title="handwritten digits, 8 x 8 pixels",
        vocab_size=CLASSES,
        longest=train.pixels[0, 0].numel(),  # the tokens of the smallest patches
        train=_draws(train)[0],
        validation=_draws(validation)[1],
        tests={"test": _draws(test)[1]},
    )
