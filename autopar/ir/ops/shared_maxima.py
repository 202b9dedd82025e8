"""The largest magnitudes that scales follow from, over all ranks that hold pieces of what a scale is for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from autopar.ir.ops.narrow_tensor import NarrowTensor
from autopar.ir.ops.quantise import largest_of
from autopar.ir.ops.scalings import Scaling
from autopar.ir.primitives.group_communication import group_all_reduce

Groups = tuple[str, ...]
Shared = Literal["tensor", "row"]


class Side(NamedTuple):
    """One operand of a product. matrix: (r, d). rows, depth: groups that hold pieces of r and d. weight: whether it is
    one."""

    matrix: Tensor
    rows: Groups
    depth: Groups
    weight: bool = False

    def largest(self, shared: Shared) -> Tensor:
        """The largest magnitude of what is on this rank; of a ``NarrowTensor`` of the whole."""
        if isinstance(self.matrix, NarrowTensor):
            return self.matrix.largest
        return largest_of(self.matrix, by_row=shared == "row")

    def groups(self, shared: Shared) -> Groups:
        """Groups over which it is to be taken."""
        if isinstance(self.matrix, NarrowTensor):
            return ()
        return self.depth if shared == "row" else (*self.rows, *self.depth)


def shared_maxima(sides: Sequence[Side], scaling: Scaling) -> list[Tensor] | list[None]:
    """What ``largest_of`` finds of each operand, over all ranks that hold pieces of it; None of tiles.

    In each group one collective, of all that is in pieces there.
    """
    shared = scaling.shared
    if shared is None:
        return [None] * len(sides)
    found = [side.largest(shared) for side in sides]
    groups = [side.groups(shared) for side in sides]
    for group in dict.fromkeys(group for own in groups for group in own):
        numbers = [number for number, own in enumerate(groups) if group in own]
        pieces = [found[number].reshape(-1) for number in numbers]
        together = group_all_reduce(torch.cat(pieces), group, "max")
        for number, piece in zip(numbers, together.split([piece.numel() for piece in pieces]), strict=True):
            found[number] = piece.view_as(found[number])
    return found
