"""Checkpoints: the state of a training run on disk, written whole, loaded without running code that a file holds."""

import hashlib
import io
from pathlib import Path
from typing import Any

import torch

from paper._files import written_whole

__all__ = ["CheckpointError", "load", "save"]


class CheckpointError(ValueError):
    """A file that is a damaged checkpoint, or not a checkpoint."""


def save(file: Path, state: dict[str, Any], identity: str) -> None:
    """Replace a checkpoint in one step; `identity` says of which run it is. `state` holds tensors, numbers, strings,
    and lists and dictionaries of them."""
    buffer = io.BytesIO()  # whole, before the file is touched
    torch.save({"identity": identity, "state": state}, buffer)
    content = buffer.getvalue()
    with written_whole(file) as stream:
        stream.write(hashlib.sha256(content).digest() + content)


def load(file: Path, identity: str) -> dict[str, Any] | None:
    """The state stored for this run, on the CPU; None if there is none, or if it is another run's.

    Raises CheckpointError, naming the file, if it is damaged. It is left as it is.
    """
    try:
        stored = file.read_bytes()
    except FileNotFoundError:
        return None
    digest, content = stored[:32], stored[32:]
    if hashlib.sha256(content).digest() != digest:
        raise CheckpointError(
            f"{file}: damaged or not a checkpoint: expected the sha256 of the rest in its first 32 bytes. "
            "It was left as it is; remove it to train anew."
        )
    found = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return found["state"] if found["identity"] == identity else None
