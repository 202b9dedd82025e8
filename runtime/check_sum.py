"""A number that tells tensors apart whose values differ, the same in whatever order it is added up."""

from __future__ import annotations

import torch

# Integers as wide as an element, of which one pass over memory is enough.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_sum(tensor: torch.Tensor) -> int:
    """The sum of the bits of a plain tensor as integers, modulo 2 ** 64; of parts of it the sums add up."""
    part = tensor.detach().contiguous()
    if part.is_complex():
        part = torch.view_as_real(part)
    return int(part.view(_WORDS.get(part.element_size(), torch.uint8)).sum(dtype=torch.int64))
