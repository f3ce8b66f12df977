"""Frozen matrices that are made from a seed, so that only the seed has to be stored."""

import hashlib
from collections.abc import Callable
from math import pi
from typing import Any

import numpy as np
import torch

from ortho._checks import checked, describe, expect
from ortho._typing import Float, Tensor
from ortho.projections.projection import Detached


class SeededProjection(Detached):
    """A frozen projection whose state dict holds only a seed, and a digest of the matrices made from it.

    The matrices follow the Haar law. They are made on the CPU, from the bits of a counter-based generator (Philox:
    Salmon et al. 2011, *Parallel random numbers*) in float64, and rounded to float32 once, so that every device and
    every dtype has the same. Only the last digits of the factorisation depend on the machine: a state dict whose
    matrices cannot be made again bit by bit is refused. `seed`, from 0 to 2^63 - 1, is drawn if it is not given.

    Raises TypeError or ValueError, naming the argument, for an invalid seed and for what `Projection` refuses. Loading
    raises ValueError, and changes nothing, unless the state is a seed and a digest, and the digest is the same.
    """

    @checked
    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        seed: int | None = None,
        stop_gradient: bool = False,
        head_dim: int | None = None,
        num_kv_heads: int | None = None,
        bias: bool = False,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(d_model, num_heads, head_dim=head_dim, num_kv_heads=num_kv_heads)
        expect(not bias, "bias", "False of a projection that is a seed", "True")
        self.stop_gradient = stop_gradient
        if seed is None:
            source = None if generator is None else generator.device
            seed = int(torch.randint(2**63 - 1, (), generator=generator, device=source))
        self.seed = _seed(seed)
        made, self.digest = self._make(self.seed)
        for name, matrix in zip("qk", made, strict=True):
            weight = matrix.to(dtype=dtype or torch.get_default_dtype(), device=device)
            self.register_buffer(f"weight_{name}", weight, persistent=False)
            self.register_buffer(f"bias_{name}", None)

    def _make(self, seed: int) -> tuple[list[Float[Tensor, "width d"]], bytes]:
        """W_Q and W_K, float32, and the SHA-256 digest of their bytes."""
        made, digest = [], hashlib.sha256()
        for key, width in enumerate((self.q_width, self.kv_width)):
            size = max(width, self.d_model), min(width, self.d_model)
            basis, triangle = torch.linalg.qr(_normals(seed, key, size))
            basis = basis * torch.where(triangle.diagonal() < 0, -1.0, 1.0)  # see `ortho.orthogonal.haar`
            matrix = (basis if width >= self.d_model else basis.mT).to(torch.float32).contiguous()
            made.append(matrix)
            digest.update(matrix.numpy().astype("<f4").tobytes())
        return made, digest.digest()

    def get_extra_state(self) -> Tensor:
        """Seed and digest as 40 bytes: a tensor, which every checkpoint format can hold and which is safe to load."""
        return torch.frombuffer(bytearray(self.seed.to_bytes(8, "little") + self.digest), dtype=torch.uint8).clone()

    def set_extra_state(self, state: Any) -> None:
        """Make the matrices of a stored seed."""
        if not isinstance(state, Tensor) or state.dtype != torch.uint8 or state.shape != (40,):
            raise ValueError(f"seed: expected a seed and a digest in 40 bytes, got {describe(state)}")
        stored = bytes(state.tolist())
        seed = _seed(int.from_bytes(stored[:8], "little"))
        self._make_again(seed, stored[8:])
        self.seed, self.digest = seed, stored[8:]

    def _make_again(self, seed: int, wanted: bytes) -> None:
        """Replace the matrices by those of this seed and this digest."""
        made, digest = self._make(seed)
        if digest != wanted:
            raise ValueError(
                f"digest: expected {wanted.hex():.16} of the matrices of seed {seed}, got {digest.hex():.16}; "
                "this machine makes others, and needs them stored, in a FrozenProjection"
            )
        for name, matrix in zip("qk", made, strict=True):
            weight = getattr(self, f"weight_{name}")
            if weight.is_meta:  # a load that assigns: there is no memory to copy into
                setattr(self, f"weight_{name}", matrix.to(weight.dtype))
            else:
                weight.copy_(matrix)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "SeededProjection":
        """Also make the matrices again for another dtype: it may be wider than the one that they were rounded to."""
        before = self.weight_q.dtype
        super()._apply(fn, recurse)
        if self.weight_q.dtype != before and not self.weight_q.is_meta:
            self._make_again(self.seed, self.digest)
        return self

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, seed={self.seed}, stop_gradient={self.stop_gradient}"


def _seed(value: int) -> int:
    expect(0 <= value < 2**63, "seed", "an integer from 0 to 2^63 - 1", value)
    return value


def _normals(seed: int, key: int, size: tuple[int, int]) -> Float[Tensor, "rows cols"]:
    """Independent normal numbers, float64, by Box and Muller's method; `key` numbers the matrices of a seed."""
    count = size[0] * size[1]
    bits = np.random.Philox(key=(key << 64) + seed).random_raw(2 * count) >> np.uint64(11)  # Philox's stream is stable
    u, v = ((bits.astype(np.float64) + 0.5) * 2.0**-53).reshape(2, count)  # within (0, 1)
    return torch.from_numpy(np.sqrt(-2 * np.log(u)) * np.cos(2 * pi * v)).reshape(size)
