"""Classification of images: the split, the digits of the package, and CIFAR-10 from an archive made here."""

import hashlib
import io
import tarfile

import numpy as np
import pytest
import torch
from seeded import generator

from paper.tasks import images
from paper.tasks.download import RemoteFile


def random_images(count, classes=10, shape=(3, 32, 32)):
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (count, *shape), dtype=np.uint8)
    return images.Images(torch.from_numpy(pixels), torch.from_numpy(rng.integers(0, classes, count)))


def rows(drawn):
    return [(pixels.numpy().tobytes(), int(answer)) for pixels, answer in zip(*drawn, strict=True)]


def test_a_split_keeps_each_image_once_and_the_shares_of_the_classes():
    every = random_images(997)
    parts = images.split(every, (3, 1, 1))
    assert sorted(rows(every)) == sorted(row for part in parts for row in rows(part))
    for label in range(10):
        count = int((every.answers == label).sum())
        for part, share in zip(parts, (3, 1, 1), strict=True):
            assert abs(int((part.answers == label).sum()) - count * share / 5) < 1
    for part in parts:  # in the order of the hashes, in which the classes are mixed
        digests = [hashlib.sha256(pixels).digest() for pixels, _ in rows(part)]
        assert digests == sorted(digests)


def test_a_split_does_not_depend_on_the_order_of_the_images():
    every = random_images(100, shape=(1, 2, 2))
    shuffled = every.taken(torch.randperm(100, generator=generator()))
    for one, two in zip(images.split(every, (9, 1)), images.split(shuffled, (9, 1)), strict=True):
        assert rows(one) == rows(two)


def check_images(task, train, validation, test, white):
    """Check that a task's draws show the images of their part, scaled, with their answers."""
    for draw, part in ((task.train, train), (task.validation, validation), (task.tests["test"], test)):
        count = len(part.answers)
        (pixels,), answers = draw(count, generator())
        assert pixels.dtype == torch.float32 and pixels.min() >= 0 and pixels.max() <= 1
        assert answers.dtype == torch.long and answers.max() < task.vocab_size
        # Division by `white` is undone exactly: the product is off by less than 1/2.
        drawn = images.Images((pixels * white).round().to(torch.uint8), answers)
        assert set(rows(drawn)) <= set(rows(part))
        if part is not train:
            assert rows(drawn) == rows(part)
            again = draw(count // 2, generator(1))
            assert torch.equal(again.inputs[0], pixels[: count // 2]) and torch.equal(
                again.answers, answers[: count // 2]
            )
            with pytest.raises(ValueError, match=f"count: expected at most {count}, all examples .* got {count + 1}"):
                draw(count + 1, generator())
        with pytest.raises(ValueError, match="count: expected an integer of at least 1, got 0"):
            draw(0, generator())
    first, again, other = (task.train(50, generator(seed)).answers.tolist() for seed in (1, 1, 2))
    assert first == again != other


def test_digits_are_those_of_the_published_set():
    every = images.digit_images()
    assert every.pixels.shape == (1797, 1, 8, 8) and every.pixels.dtype == torch.uint8
    assert every.pixels.min() == 0 and every.pixels.max() == images.INK
    # The numbers of test examples of each class that the data set's own description states.
    assert torch.bincount(every.answers).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert len(set(rows(every))) == 1797  # no image twice


def test_digits_equal_those_of_scikit_learn():
    published = pytest.importorskip("sklearn.datasets").load_digits()
    every = images.digit_images()
    assert np.array_equal(every.pixels[:, 0].numpy(), published.images)
    assert np.array_equal(every.answers.numpy(), published.target)


def test_the_task_of_digits_shows_its_parts():
    parts = images.split(images.digit_images(), images.DIGITS)
    assert [len(part.answers) for part in parts] == [1074, 359, 364]
    check_images(images.digits(), *parts, white=16)
    # As when the split was fixed: a changed split makes stored results incomparable.
    fixed = [hashlib.sha256(part.pixels.numpy().tobytes()).hexdigest()[:16] for part in parts]
    assert fixed == ["87b2e07a4058469b", "fd3ef3a21241c822", "fdcf4ceb891b8772"]


def record(pixels, label):
    """An image as the author's page describes the binary version: its class, then red, green, blue, row by row."""
    return bytes([label]) + b"".join(bytes([value]) for plane in pixels.tolist() for row in plane for value in row)


def archive(path, contents):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as stream:
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            stream.addfile(member, io.BytesIO(content))
    return path


@pytest.fixture(scope="module")
def photographs():
    """Images to train on and to test with, and the files of an archive of them, in which the test images come first."""
    every = random_images(60)
    records = [record(*image) for image in zip(*every, strict=True)]
    files = {"cifar-10-batches-bin/readme.html": b"not read", images.TEST[0]: b"".join(records[50:])}
    files |= {name: b"".join(records[10 * i : 10 * i + 10]) for i, name in enumerate(images.TRAIN)}
    return every.taken(torch.arange(50)), every.taken(torch.arange(50, 60)), files


def test_photographs_are_read_as_they_were_written(tmp_path, photographs):
    train, test, contents = photographs
    for read, written in zip(images.read(archive(tmp_path / "a.tar.gz", contents)), (train, test), strict=True):
        assert torch.equal(read.pixels, written.pixels) and torch.equal(read.answers, written.answers)


def test_the_task_of_photographs_keeps_the_published_test(tmp_path, monkeypatch, photographs):
    train, test, contents = photographs
    path = archive(tmp_path / images.ARCHIVE.name, contents)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr(images, "ARCHIVE", RemoteFile(images.ARCHIVE.name, "http://127.0.0.1:1/", sha256))
    task = images.cifar10(tmp_path)
    check_images(task, *images.split(train, images.PHOTOGRAPHS), *images.split(test, (1,)), white=255)
    assert task.vocab_size == 10 and task.longest == 32 * 32


@pytest.mark.bad_input
def test_a_damaged_archive_is_refused(tmp_path, photographs):
    contents = photographs[2]
    name = images.TRAIN[2]
    for change, message in (
        ({name: contents[name][:-1]}, "data_batch_3.bin: expected images of 3073 bytes, got 30729 bytes"),
        ({name: b""}, "data_batch_3.bin: expected images of 3073 bytes, got 0 bytes"),
        ({name: b"\x0a" + contents[name][1:]}, "data_batch_3.bin: expected classes 0 to 9, got 10"),
    ):
        with pytest.raises(ValueError, match=message):
            images.read(archive(tmp_path / "a.tar.gz", contents | change))
    without = {key: content for key, content in contents.items() if key != name}
    with pytest.raises(ValueError, match=f"a.tar.gz: expected 6 files of images, missing {name}"):
        images.read(archive(tmp_path / "a.tar.gz", without))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE])
def test_an_archive_with_links_is_refused(tmp_path, kind):
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as stream:
        member = tarfile.TarInfo(images.TRAIN[0])
        member.type, member.linkname = kind, "/etc/passwd"
        stream.addfile(member)
    with pytest.raises(ValueError, match="a.tar.gz: .*/data_batch_1.bin: expected a file, got a link, a folder or a"):
        images.read(tmp_path / "a.tar.gz")
