"""Which losses are computed in chunks of tokens, and how many tokens a chunk has. ``chunked_loss`` computes them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import fx

from autopar.ir.ops import composite

# Logits of one rank that are there at once in a chunk, and from how many on there are chunks: 2 and 4 GiB in float32.
# The weight's gradient passes through memory once more for each chunk; the larger a chunk, the less that is.
CHUNK = 1 << 29
LIMIT = 1 << 30


def rows_at_once(rows: float, classes: float) -> int | None:
    """Tokens of a chunk, if a rank's ``rows`` tokens with ``classes`` logits each are computed in chunks."""
    return max(int(CHUNK // classes), 1) if rows * classes > LIMIT else None


class Pair(NamedTuple):
    """A linear layer, and the loss that alone reads its result."""

    linear: fx.Node
    loss: fx.Node


def pair_of(
    loss: fx.Node, targets: tuple[object, ...] = (composite.cross_entropy,), *, step: bool = True
) -> Pair | None:
    """The pair that ``loss`` ends, if it is a cross entropy that is a sum or a mean over the tokens of a linear layer.

    targets: the cross entropies. step: of a captured model in a training step, which does not compute what else the
    model returns.
    """
    if loss.target not in targets or loss.kwargs.get("reduction", "mean") == "none":
        return None
    linear = loss.args[0]
    if not isinstance(linear, fx.Node) or linear.target is not torch.ops.aten.linear.default:
        return None
    alone = all(user is loss or (step and user.op == "output") for user in linear.users)
    return Pair(linear, loss) if alone else None
