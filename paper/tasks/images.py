"""Classification of small images: handwritten digits, which come with the package, and the photographs of CIFAR-10.

Digits: 1,797 images of 8 x 8 pixels, the test set of 'Optical Recognition of Handwritten Digits' by E. Alpaydin and
C. Kaynak (1998, UCI Machine Learning Repository, doi:10.24432/C50P49, licence CC BY 4.0), in the copy of scikit-learn
1.9.1. Forms filled in by 13 people were scanned at 32 x 32 points; a pixel counts the black points in a square of
4 x 4, so it is 0 to 16, and 16 is ink. `digits.npz` holds the pixels (1797, 8, 8) and the answers (1797,) as bytes, in
scikit-learn's order:

    images = sklearn.datasets.load_digits()
    np.savez_compressed("digits.npz", pixels=images.images.astype(np.uint8), answers=images.target.astype(np.uint8))

CIFAR-10: 60,000 colour photographs of 32 x 32 pixels in ten classes (Krizhevsky 2009, Learning Multiple Layers of
Features from Tiny Images, chapter 3), fetched from the author's page. Of the archives there, this is the binary one:
reading it runs no code from a file. Some images of the test have a near copy among those to train on (Barz &
Denzler 2020, arXiv:1902.00423); they are left in, as in published results.
"""

import hashlib
import os
import tarfile
from collections.abc import Sequence
from functools import cache, partial
from importlib.resources import files
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paper.tasks.download import RemoteFile, fetch
from paper.tasks.task import Batch, Draw, Task, any_of, first_of

CLASSES = 10  # of digits and of photographs
INK, WHITE = 16, 255  # the largest number of a pixel
DIGITS = (3, 1, 1)  # weights of training, validation, test
PHOTOGRAPHS = (9, 1)  # weights of training, validation
SHAPE = 3, 32, 32  # of the pixels of a photograph: red, green and blue, row by row
RECORD = 1 + 3 * 32 * 32  # its bytes: the class, then the pixels
TRAIN = tuple(f"cifar-10-batches-bin/data_batch_{i}.bin" for i in range(1, 6))
TEST = ("cifar-10-batches-bin/test_batch.bin",)

ARCHIVE = RemoteFile(
    "cifar10/cifar-10-binary.tar.gz",
    "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    # The author's page gives the MD5 of this file, c32a1d4ab5d03f1284b67883e8d87530.
    "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
)


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


def classification(
    name: str, title: str, train: Images, validation: Images, test: Images, *, white: int, classes: int = CLASSES
) -> Task:
    """The task to say an image's class: pixels (B, C, H, W), float32 from 0 to 1 (for `white`), answers (B,).

    Training draws images with replacement. Validation and test give their first images, whatever the generator, and
    raise ValueError for more than there are. `longest` counts pixels, the tokens of the smallest patches.
    """

    def draws(part: Images) -> tuple[Draw, Draw]:
        def batch(picks: Tensor) -> Batch:
            taken = part.taken(picks)
            return Batch((taken.pixels.float() / white,), taken.answers)

        return partial(any_of, len(part.answers), batch), partial(first_of, len(part.answers), batch)

    return Task(
        name=name,
        title=title,
        vocab_size=classes,
        longest=train.pixels[0, 0].numel(),
        train=draws(train)[0],
        validation=draws(validation)[1],
        tests={"test": draws(test)[1]},
    )


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
    parts = split(digit_images(), DIGITS)
    return classification("digits", "handwritten digits, 8 x 8 pixels", *parts, white=INK)


def cifar10(folder: str | os.PathLike[str] | None = None) -> Task:
    """The task to say what is shown: pixels (B, 3, 32, 32), float32 in [0, 1], answers (B,) below 10.

    The published test is the test; in each class the images' sha256 say which tenth of the other 50,000 is to validate
    with. Images are not augmented. `folder` and the errors raised are those of `download.fetch`.
    """
    return _photographs(fetch(ARCHIVE, folder))


def read(archive: Path) -> tuple[Images, Images]:
    """The images to train on and those of the test, in the order of the archive: pixels (n, 3, 32, 32).

    Raises ValueError, naming the archive, if a file is missing in it, is a link or a folder, does not hold a whole
    number of images, or has a class that does not exist.
    """
    found = {}
    with tarfile.open(archive, "r|gz") as stream:  # in one pass: the archive is compressed as a whole
        for member in stream:
            if member.name not in (*TRAIN, *TEST):
                continue
            content = stream.extractfile(member) if member.isreg() else None
            if content is None:
                raise ValueError(f"{archive}: {member.name}: expected a file, got a link, a folder or a device")
            found[member.name] = _read(content.read(), f"{archive}: {member.name}")
    missing = [name for name in (*TRAIN, *TEST) if name not in found]
    if missing:
        raise ValueError(f"{archive}: expected {len(TRAIN) + len(TEST)} files of images, missing {', '.join(missing)}")
    train, test = ([found[name] for name in names] for names in (TRAIN, TEST))
    return Images(*map(torch.cat, zip(*train, strict=True))), test[0]


@cache
def _photographs(archive: Path) -> Task:
    rest, test = read(archive)
    parts = *split(rest, PHOTOGRAPHS), *split(test, (1,))
    return classification("cifar10", "CIFAR-10, photographs of ten kinds of things", *parts, white=WHITE)


def _read(content: bytes, named: str) -> Images:
    if not content or len(content) % RECORD:
        raise ValueError(f"{named}: expected images of {RECORD} bytes, got {len(content)} bytes")
    records = np.frombuffer(content, np.uint8).reshape(-1, RECORD)
    answers = torch.from_numpy(records[:, 0].astype(np.int64))
    if answers.max() >= CLASSES:
        raise ValueError(f"{named}: expected classes 0 to {CLASSES - 1}, got {int(answers.max())}")
    return Images(torch.from_numpy(records[:, 1:].reshape(-1, *SHAPE).copy()), answers)
