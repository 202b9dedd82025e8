"""Counts the collectives that a program really issues, forward and backward.

    with CollectiveCounter() as counter:
        block(x).sum().backward()
    assert counter.count("all_reduce", phase="forward") == 1

It watches the dispatcher, so it sees ours, those of FSDP2, DDP and DTensor, and the sends of a pipeline, in
this process. Code compiled before it was entered is not seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from autopar.ir.primitives.group_communication import group_rank, group_size
from autopar.ir.torch_private import TorchDispatchMode, in_backward, pytree, schema_of

Phase = Literal["forward", "backward"]

# Names of ops in the namespaces c10d, _c10d_functional and autopar, without a trailing underscore.
_KINDS: dict[str, str | None] = {
    "all_reduce": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "_allgather_base": "all_gather",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "all_gather_as_all_to_all": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_as_all_to_all": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "alltoall_base": "all_to_all",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "send": "send",
    "recv": "recv",
    "recv_any_source": "recv",
    "isend": "send",
    "irecv": "recv",
    "barrier": "barrier",
    "monitored_barrier": "barrier",
    "wait_tensor": None,
}
_NAMESPACES = frozenset({"c10d", "_c10d_functional", "c10d_functional", "autopar"})


def kind_of_collective(func: Any) -> str | None:
    """Kind of collective of a dispatcher op; None if it sends nothing."""
    namespace = getattr(func, "namespace", None)
    if namespace not in _NAMESPACES:
        return None
    name = schema_of(func).name.split("::")[1].rstrip("_")
    assert name in _KINDS or namespace == "autopar", f"a collective that is not known: {func}"
    return _KINDS.get(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued:
    """One collective. ``payload_bytes``: of the whole tensor, before a scatter or after a gather.

    ``peer`` is the other rank of a send or a receive, within its group. ``kept_bytes``: of an all_to_all, the piece
    that stays on this rank, where the sizes of the pieces are known.
    """

    kind: str
    phase: Phase
    payload_bytes: int
    group: str
    group_size: int
    peer: int | None = None
    kept_bytes: int | None = None

    @property
    def sent_bytes(self) -> float:
        """Bytes that each rank sends, by a ring: 2 (N - 1) / N of the payload for an all_reduce.

        Of an all_to_all with the sizes of its pieces, what this rank really sends.
        """
        if self.kept_bytes is not None:
            return float(self.payload_bytes - self.kept_bytes)
        share = (self.group_size - 1) / self.group_size
        if self.kind == "all_reduce":
            return 2 * share * self.payload_bytes
        if self.kind in ("all_gather", "reduce_scatter", "all_to_all"):
            return share * self.payload_bytes
        return float(self.payload_bytes) if self.kind in ("send", "broadcast") else 0.0


class CollectiveCounter(TorchDispatchMode):
    """Context manager that records every collective issued within it, in order, in ``issued``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.issued: list[Issued] = []

    def select(
        self, kind: str | None = None, *, phase: Phase | None = None, group_size: int | None = None
    ) -> Iterator[Issued]:
        """Recorded collectives of this kind, phase and group size, barriers left out; None: any."""
        for one in self.issued:
            if kind is None and one.kind == "barrier":
                continue
            if kind in (None, one.kind) and phase in (None, one.phase) and group_size in (None, one.group_size):
                yield one

    def count(self, kind: str | None = None, *, phase: Phase | None = None, group_size: int | None = None) -> int:
        """Number of recorded collectives; arguments as for ``select``."""
        return sum(1 for _ in self.select(kind, phase=phase, group_size=group_size))

    def sent_bytes(
        self, kind: str | None = None, *, phase: Phase | None = None, group_size: int | None = None
    ) -> float:
        """Bytes that this rank sends in recorded collectives; arguments as for ``select``."""
        return sum(one.sent_bytes for one in self.select(kind, phase=phase, group_size=group_size))

    def __str__(self) -> str:
        """``forward: 1 all_reduce; backward: 1 all_reduce``."""
        parts = []
        for phase in ("forward", "backward"):
            kinds = Counter(one.kind for one in self.issued if one.phase == phase)
            parts.append(f"{phase}: " + (", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items())) or "none"))
        return "; ".join(parts)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        kind = kind_of_collective(func)
        if kind is None:
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if result is NotImplemented:  # a tensor subclass first turns it into collectives on plain tensors
            return result
        self.issued.append(_describe(kind, args, result))
        return result


def _describe(kind: str, args: tuple[Any, ...], result: Any) -> Issued:
    group, size = _group_of(args)
    tensors = [_bytes(a) for a in args if isinstance(a, (torch.Tensor, list, tuple))]
    payload = max([*tensors, _bytes(result)], default=0)
    kept = _kept_bytes(args[0], args[2], group) if kind == "all_to_all" and isinstance(args[0], torch.Tensor) else None
    if kept is not None:
        payload = _bytes(args[0])
    if kind == "barrier":
        payload = 0
    peer = int(args[2]) if kind in ("send", "recv") and len(args) > 2 and isinstance(args[2], int) else None
    return Issued(
        kind=kind,
        phase="backward" if in_backward() else "forward",
        payload_bytes=payload,
        group=group,
        group_size=size,
        peer=peer,
        kept_bytes=kept,
    )


def _kept_bytes(sent: torch.Tensor, counts: Any, group: str) -> int | None:
    """Bytes of an all_to_all that do not leave this rank; None where the sizes of the pieces are not given."""
    if not isinstance(counts, list) or not counts:
        return None
    return sent.nbytes // max(sum(counts), 1) * int(counts[group_rank(group)])


def _group_of(args: tuple[Any, ...]) -> tuple[str, int]:
    """Name and size of the group: an object for c10d ops, whose group comes before other objects; else its name."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject):
            group = dist.ProcessGroup.unbox(arg)
            return str(group.group_name), int(group.size())
        if isinstance(arg, dist.ProcessGroup):
            return str(arg.group_name), int(arg.size())
    name = [arg for arg in args if isinstance(arg, str)][-1]
    return name, group_size(name)


def _bytes(value: Any) -> int:
    return sum(leaf.nbytes for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))
