"""Sums over the whole batch that each of its microbatches needs.

A loss that averages over the tokens that count divides by their number in the whole batch. Such a sum is made of step
inputs alone, so it is had before the first microbatch runs: the ops before ``whole_batch`` run on every microbatch in
turn, their results are added up, and each microbatch is given the sum as it is given its inputs.

    count = sum(ne(labels, -100))        of one microbatch
    total = whole_batch(count)           of all
    loss = div(cross_entropy(logits, labels, reduction='sum'), total)
"""

from __future__ import annotations

import torch


def whole_batch(value: torch.Tensor) -> torch.Tensor:
    """Marks ``value``, a summand that one microbatch contributes; the runtime adds them up."""
    return value.clone()
