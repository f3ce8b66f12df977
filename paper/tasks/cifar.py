"""CIFAR-10: 60,000 colour photographs of 32 x 32 pixels in ten classes (Krizhevsky 2009, Learning Multiple Layers of
Features from Tiny Images, chapter 3), fetched from the author's page.

Of its archives this is the one in binary: reading it runs no code that a file holds. Some images of the test have a
near copy among those to train on (Barz & Denzler 2020, arXiv:1902.00423); they are left in, as in published results.
"""

import os
import tarfile
from functools import cache
from pathlib import Path

import numpy as np
import torch

from paper.tasks.download import RemoteFile, fetch
from paper.tasks.images import Images, classification, split
from paper.tasks.task import Task

__all__ = ["cifar10", "read"]

CLASSES, WHITE = 10, 255
SHAPE = 3, 32, 32  # of the pixels: red, green and blue, row by row
RECORD = 1 + 3 * 32 * 32  # bytes: the class, then the pixels
WEIGHTS = (9, 1)  # training, validation
TRAIN = tuple(f"cifar-10-batches-bin/data_batch_{i}.bin" for i in range(1, 6))
TEST = ("cifar-10-batches-bin/test_batch.bin",)

ARCHIVE = RemoteFile(
    "cifar10/cifar-10-binary.tar.gz",
    "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    # The author's page gives the MD5 of this file, c32a1d4ab5d03f1284b67883e8d87530.
    "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    170052171,
)


def cifar10(folder: str | os.PathLike[str] | None = None) -> Task:
    """The task to say what is shown: pixels (B, 3, 32, 32), float32 in [0, 1], answers (B,) below 10.

    The published test is the test; in each class the images' sha256 say which tenth of the other 50,000 is to validate
    with. Nothing is augmented. `folder` and what is raised are those of `download.fetch`.
    """
    return _task(fetch(ARCHIVE, folder))


def read(archive: Path) -> tuple[Images, Images]:
    """The images to train on and those of the test, in the order of the archive: pixels (n, 3, 32, 32).

    Raises ValueError, naming the archive, if a file is missing in it, is a link or a folder, holds no whole number of
    images, or a class that is none.
    """
    found = {}
    with tarfile.open(archive, "r|gz") as stream:  # in one pass: the archive is compressed as a whole
        for member in stream:
            if member.name not in (*TRAIN, *TEST):
                continue
            content = stream.extractfile(member) if member.isreg() else None
            if content is None:
                raise ValueError(f"{archive}: {member.name}: expected a file, got a link, a folder or a device")
            found[member.name] = _images(content.read(), f"{archive}: {member.name}")
    missing = [name for name in (*TRAIN, *TEST) if name not in found]
    if missing:
        raise ValueError(f"{archive}: expected {len(TRAIN) + len(TEST)} files of images, missing {', '.join(missing)}")
    train, test = ([found[name] for name in names] for names in (TRAIN, TEST))
    return Images(*map(torch.cat, zip(*train, strict=True))), test[0]


@cache
def _task(archive: Path) -> Task:
    rest, test = read(archive)
    train, validation = split(rest, WEIGHTS)
    return classification(
        "cifar10",
        "CIFAR-10, photographs of ten kinds of things",
        classes=CLASSES,
        white=WHITE,
        train=train,
        validation=validation,
        test=split(test, (1,))[0],
    )


def _images(content: bytes, named: str) -> Images:
    if not content or len(content) % RECORD:
        raise ValueError(f"{named}: expected images of {RECORD} bytes, got {len(content)} bytes")
    records = np.frombuffer(content, np.uint8).reshape(-1, RECORD)
    answers = torch.from_numpy(records[:, 0].astype(np.int64))
    if answers.max() >= CLASSES:
        raise ValueError(f"{named}: expected classes 0 to {CLASSES - 1}, got {int(answers.max())}")
    return Images(torch.from_numpy(records[:, 1:].reshape(-1, *SHAPE).copy()), answers)
