"""What a plan lists of the tensors that a block keeps for its backward, and of those that wait in host memory.

kept: {keep20: [self_attn/attention, mlp.down_proj/linear]}
host: {keep20: [self_attn/attention, inputs]}       the results of attention, and what comes from blocks before
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.ir.rematerialisation import LEVELS

# In a list of what waits in host memory, the block's own inputs: what it reads of earlier blocks.
INPUTS = "inputs"


def check_lists(block: str, kept: Mapping[str, Sequence[str]], host: Mapping[str, Sequence[str]]) -> None:
    """Raise ValueError where a set has the name of a level, or something is to wait that is not kept. block: where it
    is in the plan."""
    for name in kept:
        if name in LEVELS:
            raise ValueError(f"{block}.kept.{name}: that is a level; expected another name")
    for name, listed in host.items():
        if name not in kept:
            raise ValueError(
                f"{block}.host.{name}: expected a name that the block lists under kept, which has "
                f"{', '.join(kept) or 'none'}.\n  try: kept: {{{name}: []}}, of a block that keeps its inputs alone"
            )
        for position, one in enumerate(listed):
            if one != INPUTS and one not in kept[name]:
                raise ValueError(
                    f"{block}.host.{name}.{position}: {one!r} is not kept; expected "
                    f"{', '.join((INPUTS, *kept[name]))}.\n  try: {one!r} under {block}.kept.{name} as well"
                )
