"""Time of one forward and one backward pass, as a number or affine in the bytes of a tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OpTime:
    """Seconds that one rank spends in a forward and in a backward pass of an op, a redistribution or a sum of them."""

    forward_s: float = 0.0
    backward_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Seconds forward and backward."""
        return self.forward_s + self.backward_s

    def __add__(self, other: OpTime) -> OpTime:
        return OpTime(self.forward_s + other.forward_s, self.backward_s + other.backward_s)

    def __mul__(self, factor: float) -> OpTime:
        return OpTime(self.forward_s * factor, self.backward_s * factor)

    __rmul__ = __mul__

    def __iter__(self) -> Iterator[float]:
        """Unpacks as ``forward_s, backward_s = time``."""
        yield self.forward_s
        yield self.backward_s


ZERO = OpTime()


@dataclass(frozen=True, slots=True)
class Affine:
    """Seconds as ``fixed + per_byte * bytes``, forward and backward."""

    forward_fixed: float = 0.0
    forward_per_byte: float = 0.0
    backward_fixed: float = 0.0
    backward_per_byte: float = 0.0

    def at(self, num_bytes: float) -> OpTime:
        """Seconds for a tensor of ``num_bytes``."""
        return OpTime(
            self.forward_fixed + self.forward_per_byte * num_bytes,
            self.backward_fixed + self.backward_per_byte * num_bytes,
        )


NOTHING = Affine()
