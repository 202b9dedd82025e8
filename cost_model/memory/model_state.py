"""Bytes that one rank holds for parameters, gradients and optimiser state, by ZeRO stage and precision.

With ``n`` parameter elements on the rank before ZeRO, ``d`` data-parallel ranks and ``c`` bytes of compute
(4 or 2), AdamW:

    ZeRO    parameters      gradients   optimiser   16 bit, all together
    0       4n (+ 2n 16-bit) 4n         8n          18n
    1       4n/d + cn       4n          8n/d        6n + 12n/d
    2       4n/d + cn       4n/d        8n/d        2n + 16n/d
    3       4n/d            4n/d        8n/d        16n/d   + transient: gathered blocks

Parameters stay float32 and are their own master copy; bf16 and fp16 compute add 2n, the copies that matmuls read. So
fp32 and the float32 part of bf16 are 4 + 4 + 8 = 16 bytes a parameter, the same 16 as Megatron's mixed
precision (2 + 2 + 4 + 8: bf16 parameter and gradient, float32 master, two moments). ZeRO-0, 1 and 2 hold the
copies from the first microbatch to the last; ZeRO-3 gathers block by block and holds the one that runs and those that
are prefetched, one if the plan does not say more. A weight that is gathered in 8 bits has a copy of n bytes. With one
microbatch there is nothing to accumulate, and ZeRO-1 scatters each gradient as it comes, like ZeRO-2. Between steps
copies are gone: 16n under ZeRO-0, 16n/d under others.
``tests/runtime/test_memory_held.py`` measures all of it.

ZeRO-3 without resharding after forward holds cn like ZeRO-2, from a microbatch's forward to its backward. Offload
moves 4n/d parameters, 4n/d gradients and 8n/d moments to host memory; gathered parameters and unsharded gradients stay.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import add, attrgetter

from autopar.cost_model.hardware.device import ITEMSIZE
from autopar.cost_model.stacks.known_memory import AUTOPAR
from autopar.cost_model.stacks.memory import StackMemory

_MASTER = 4  # float32 parameters and gradients
_ADAM = 8  # two float32 moments


@dataclass(frozen=True, slots=True)
class MemoryParts:
    """Bytes on one rank at its peak.

    transient: gathered parameters, gradients of the largest op, what one block recomputes.
    workspace: allocator fragmentation.
    """

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    transient: float = 0.0
    workspace: float = 0.0

    @property
    def total(self) -> float:
        """Sum of all parts, in bytes."""
        return float(sum(_values(self)))

    def __add__(self, other: MemoryParts) -> MemoryParts:
        return MemoryParts(*map(add, _values(self), _values(other)))

    def __mul__(self, factor: float) -> MemoryParts:
        return MemoryParts(*(part * factor for part in _values(self)))

    __rmul__ = __mul__

    def as_bytes(self) -> dict[str, int]:
        """Part name -> whole bytes, rounded up."""
        return {f.name: int(-(-getattr(self, f.name) // 1)) for f in fields(self)}


_values = attrgetter(*(field.name for field in fields(MemoryParts)))


def state_memory(
    numel: float,
    *,
    zero: int,
    data_size: int,
    precision: str,
    num_microbatches: int | None = None,
    reshard: bool = True,
    offload: bool = False,
    itemsize: int = _MASTER,
    stack: StackMemory = AUTOPAR,
    reduced: bool = False,
    gathered: int | None = None,
) -> MemoryParts:
    """Bytes of ``numel`` parameter elements that this rank holds after tensor sharding, with AdamW.

    ``data_size``: ranks over which ZeRO shards. num_microbatches: None for many. reshard: whether ZeRO-3 reshards
    parameters after forward. offload: count only what stays on the device. itemsize: of a parameter as it is stored,
    which is narrower than a master if it is frozen and of a narrow model. stack: what the software keeps. reduced:
    whether data-parallel ranks reduce its gradient. gathered: bytes of an element that ZeRO has gathered, if not those
    of compute. Excludes parameters that ZeRO-3 gathers; see ``gathered_bytes``.
    """
    compute = ITEMSIZE[precision]
    copy = compute if compute < itemsize else 0
    if stack.lasting_gradients and zero < 3:
        held = 0.0 if offload and data_size > 1 else numel / data_size if zero else numel
        return _buffered(held, numel, precision, stack, reduced)
    if zero == 0 or data_size == 1:
        return MemoryParts(parameters=(itemsize + copy) * numel, gradients=_MASTER * numel, optimizer=_ADAM * numel)
    shard = 0.0 if offload else numel / data_size
    return MemoryParts(
        parameters=itemsize * shard + (min(gathered or compute, itemsize) * numel if zero < 3 or not reshard else 0.0),
        gradients=_MASTER * (numel if zero == 1 and num_microbatches != 1 else shard),
        optimizer=_ADAM * shard,
    )


def _buffered(shard: float, numel: float, precision: str, stack: StackMemory, reduced: bool) -> MemoryParts:
    """Of a stack that keeps the gradients of all parameters in a buffer, and shards the optimiser alone.

    With 16 bits a parameter is there as computed with, and the optimiser has a float32 one of its shard, and a float32
    gradient of it if the buffer is narrower.
    """
    compute, gradient = ITEMSIZE[precision], stack.gradient_bytes(precision)
    bucket = compute if stack.buckets and reduced else 0
    master = _MASTER if compute < _MASTER else 0
    own_gradient = _MASTER if gradient < _MASTER else 0
    return MemoryParts(
        parameters=compute * numel + master * shard,
        gradients=(gradient + bucket) * numel,
        optimizer=(_ADAM + own_gradient) * shard,
    )


def gathered_bytes(gathered: float, *, zero: int, reshard: bool = True) -> float:
    """Bytes of gathered parameters, ``gathered`` in all, that ZeRO-3 reshards when their block has run.

    It holds those of the block that runs and of prefetched blocks.
    """
    return gathered if zero == 3 and reshard else 0.0


def scattered_bytes(numel: float, *, zero: int, num_microbatches: int | None = None) -> float:
    """Bytes of the buffer of float32 gradients of ``numel`` elements that are reduce-scattered as they come; 0 for ZeRO
    stages that do not. A block's are sent while the next block runs."""
    return _MASTER * numel if zero >= 2 or (zero == 1 and num_microbatches == 1) else 0.0
