"""The largest magnitudes that scales follow from, over all ranks that hold pieces of what a scale is for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from autopar.ir.ops.quantise import largest_of
from autopar.ir.ops.scalings import Scaling
from autopar.ir.primitives.group_communication import group_all_reduce

Groups = tuple[str, ...]


class Side(NamedTuple):
    """One operand of a product. matrix: (r, d). rows, depth: groups that hold pieces of r and d. weight: whether it is
    one."""

    matrix: Tensor
    rows: Groups
    depth: Groups
    weight: bool = False


def shared_maxima(sides: Sequence[Side], scaling: Scaling) -> list[Tensor] | list[None]:
    """What ``largest_of`` finds of each operand, over all ranks that hold pieces of it; None of tiles.

    In each group one collective, of all that is in pieces there.
    """
    shared = scaling.shared
    if shared is None:
        return [None] * len(sides)
    found = [largest_of(side.matrix, by_row=shared == "row") for side in sides]
    groups = [side.depth if shared == "row" else (*side.rows, *side.depth) for side in sides]
    for group in dict.fromkeys(group for own in groups for group in own):
        numbers = [number for number, own in enumerate(groups) if group in own]
        pieces = [found[number].reshape(-1) for number in numbers]
        together = group_all_reduce(torch.cat(pieces), group, "max")
        for number, piece in zip(numbers, together.split([piece.numel() for piece in pieces]), strict=True):
            found[number] = piece.view_as(found[number])
    return found
