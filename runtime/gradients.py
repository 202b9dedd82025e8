"""Sums of gradients over ranks, overlapped with backward.

Gradients are summands over the mesh axes ``partial_axes`` of their parameter, and of a tied parameter also over
the stages that hold it. Summed once a step, in the order in which backward completes them:

    backward   ... dW9   dW8   b8   dW7 ...
    bucket           \\_____|____|     \\_ a large gradient goes by itself, in place
    all_reduce              ~~~~~~~~    ~~~~~~

Small gradients live in flat buckets: after the first microbatch ``parameter.grad`` is a view into its bucket
(one copy, which replaces the allocation), later ones accumulate in place. It does not matter whether the user
zeroes gradients in place or sets them to None.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
from torch import nn

from autopar.ir.primitives.read_parameter import ALONE_BYTES, local_of, placed_like
from autopar.runtime.torch_private import scale_all

# Bytes of a bucket: at most as in DistributedDataParallel. The first is small so that communication starts early, and
# none is so large that there would be fewer of them.
FIRST_BUCKET_BYTES = 1 << 20
MOST_BUCKET_BYTES = 25 << 20
LEAST_BUCKETS = 8


@dataclass(slots=True, eq=False)
class _Slot:
    """A parameter whose gradient is summed over ``group``. stage: whose last backward completes it, if it is one."""

    parameter: nn.Parameter
    group: dist.ProcessGroup | None
    over_stages: dist.ProcessGroup | None
    stage: int | None
    bucket: _Bucket | None = None
    view: torch.Tensor | None = None
    grad: torch.Tensor | None = None
    arrived: bool = False

    @property
    def num_summands(self) -> int:
        groups = (self.group, self.over_stages)
        count = 1
        for group in groups:
            count *= 1 if group is None else group.size()
        return count


@dataclass(slots=True, eq=False)
class _Bucket:
    """Gradients that one all-reduce sums. flat: None for a gradient by itself."""

    group: dist.ProcessGroup
    slots: list[_Slot]
    flat: torch.Tensor | None = None
    waiting: int = 0


@dataclass
class GradientReducer:
    """Sums the gradients of one step.

    ``begin`` before the first backward of a step, ``arm`` before the last of each stage, ``finish`` after all. The
    buckets are laid out in the first step, in the order in which gradients arrived, which is the same on all ranks
    that hold the same stages because they run the same program; what first arrives in a later step, as another program
    runs, gets buckets of its own then. A parameter to which no program gives a gradient has none. Gradients in host
    memory are summed on ``device``, that of the groups.
    """

    device: torch.device
    _slots: list[_Slot] = field(default_factory=list)
    _order: list[_Slot] = field(default_factory=list)
    _buckets: list[_Bucket] | None = None
    _armed: set[int] = field(default_factory=set)
    _next: int = 0
    _works: list[dist.Work] = field(default_factory=list)
    _staged: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def add(
        self,
        parameter: nn.Parameter,
        group: dist.ProcessGroup | None,
        over_stages: dist.ProcessGroup | None,
        stage: int | None,
    ) -> None:
        """Sum the gradient of ``parameter`` over ``group`` (None: it is whole) and over the stages that hold it.

        stage: the stage of this rank that uses it; None if several do. Ranks add shared parameters in one order.
        """
        if group is None and over_stages is None:
            return
        slot = _Slot(parameter, group, over_stages, stage)
        self._slots.append(slot)
        if group is not None:
            # A parameter that its own hook keeps alive would never be freed: the garbage collector does not see it.
            parameter.register_post_accumulate_grad_hook(partial(_tell, ref(self), len(self._slots) - 1))

    def begin(self) -> None:
        """Start a step. Gradients left from earlier steps are whole: divided, they survive the coming sum."""
        self._next = 0
        for bucket in self._buckets or ():
            bucket.waiting = len(bucket.slots)
        by_count: dict[int, list[torch.Tensor]] = {}
        for slot in self._slots:
            gradient = slot.parameter.grad
            if gradient is not None:
                by_count.setdefault(slot.num_summands, []).append(local_of(gradient))
        for count, gradients in by_count.items():
            scale_all(gradients, 1.0 / count)

    def arm(self, stage: int) -> None:
        """The next backward of ``stage`` is its last of the step: sum what it completes."""
        self._armed.add(stage)

    def _on_gradient(self, slot: _Slot, parameter: torch.Tensor) -> None:
        if parameter.grad is None:
            return  # an autograd function gave it None
        bucket = slot.bucket
        if bucket is None:
            if slot.stage in self._armed and not slot.arrived:
                slot.arrived = True
                self._order.append(slot)
            return
        self._into_bucket(slot)
        if slot.stage in self._armed and not slot.arrived:
            slot.arrived = True
            bucket.waiting -= 1
            if bucket.waiting == 0:
                self._launch_complete()

    def _launch_complete(self) -> None:
        """Launch complete buckets, in order: collectives must be the same sequence on every rank."""
        assert self._buckets is not None
        while self._next < len(self._buckets) and self._buckets[self._next].waiting == 0:
            self._launch(self._buckets[self._next])
            self._next += 1

    def _launch(self, bucket: _Bucket) -> None:
        if bucket.flat is not None:
            tensor = bucket.flat
        else:
            (slot,) = bucket.slots
            if slot.parameter.grad is None:
                return
            tensor = local_of(slot.parameter.grad)
            if not tensor.is_contiguous():
                tensor = _replace_local(slot.parameter, tensor.contiguous())
        self._sum(tensor, bucket.group)

    def _sum(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Start a sum."""
        here = tensor.to(self.device)
        if here is not tensor:
            self._staged.append((tensor, here))
        work = dist.all_reduce(here, group=group, async_op=True)
        assert work is not None
        self._works.append(work)

    def _wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works.clear()
        for tensor, here in self._staged:
            tensor.copy_(here)
        self._staged.clear()

    def finish(self, *, in_any_order: bool = False) -> None:
        """Wait until every gradient of the step is whole. in_any_order: it may have arrived in another on some rank,
        which runs other ops (of no rows)."""
        # Gradients that several stages complete, or that came before the last backward, are summed last.
        new = [slot for slot in self._slots if slot.group is not None and slot.bucket is None]
        self._order += [slot for slot in new if not slot.arrived and slot.parameter.grad is not None]
        if in_any_order:
            self._order.sort(key=self._slots.index)
        self._buckets = [*(self._buckets or ()), *_make_buckets(self._order)]
        for slot in self._order:
            self._into_bucket(slot)
            slot.arrived = True
        self._order.clear()
        for bucket in self._buckets[self._next :]:
            self._complete(bucket)
            self._launch(bucket)
        self._wait()
        self._sum_over_stages()
        for slot in self._slots:
            slot.arrived = False
        self._armed.clear()

    def _into_bucket(self, slot: _Slot) -> None:
        """Move a gradient that is not in its bucket yet there."""
        if slot.view is not None and slot.parameter.grad is not slot.grad:
            assert slot.parameter.grad is not None
            slot.view.copy_(local_of(slot.parameter.grad))
            slot.parameter.grad = slot.grad

    def _complete(self, bucket: _Bucket) -> None:
        """Zeros in the place of gradients that this step did not produce; a parameter without one stays without."""
        for slot in bucket.slots:
            if slot.view is None:
                continue
            if slot.parameter.grad is None:
                slot.view.zero_()
            else:
                self._into_bucket(slot)

    def _sum_over_stages(self) -> None:
        for slot in self._slots:
            if slot.over_stages is None:
                continue
            if slot.parameter.grad is None:
                slot.parameter.grad = torch.zeros_like(slot.parameter)
            gradient = local_of(slot.parameter.grad)
            if not gradient.is_contiguous():
                gradient = _replace_local(slot.parameter, gradient.contiguous())
            self._sum(gradient, slot.over_stages)
        self._wait()


def _tell(reducer: ReferenceType[GradientReducer], number: int, parameter: torch.Tensor) -> None:
    """A hook: the gradient of a reducer's slot was accumulated."""
    known = reducer()
    if known is not None:
        known._on_gradient(known._slots[number], parameter)


def _make_buckets(slots: Iterable[_Slot]) -> list[_Bucket]:
    """Buckets over gradients in the order of ``slots``, listed in the order in which they complete."""
    slots = list(slots)
    totals: dict[tuple[Any, ...], int] = {}
    for slot in slots:
        totals[_key(slot)] = totals.get(_key(slot), 0) + _nbytes(slot)
    open_buckets: dict[tuple[Any, ...], list[_Slot]] = {}
    opened: set[tuple[Any, ...]] = set()
    buckets: list[_Bucket] = []

    def close(key: tuple[Any, ...]) -> None:
        members = open_buckets.pop(key)
        assert members[0].group is not None
        buckets.append(_flat_bucket(members[0].group, members))
        opened.add(key)

    for slot in slots:
        assert slot.group is not None
        if _nbytes(slot) >= ALONE_BYTES:
            bucket = _Bucket(slot.group, [slot])
            slot.bucket = bucket
            buckets.append(bucket)
            continue
        key = _key(slot)
        members = open_buckets.setdefault(key, [])
        members.append(slot)
        limit = FIRST_BUCKET_BYTES
        if key in opened:
            limit = max(limit, min(MOST_BUCKET_BYTES, totals[key] // LEAST_BUCKETS))
        if sum(_nbytes(member) for member in members) >= limit:
            close(key)
    for key in list(open_buckets):
        close(key)
    return buckets


def _key(slot: _Slot) -> tuple[Any, ...]:
    """What gradients of one bucket have in common."""
    assert slot.group is not None and slot.parameter.grad is not None
    gradient = local_of(slot.parameter.grad)
    return slot.group.group_name, gradient.dtype, gradient.device, slot.stage


def _flat_bucket(group: dist.ProcessGroup, slots: list[_Slot]) -> _Bucket:
    gradients = [local_of(slot.parameter.grad) for slot in slots if slot.parameter.grad is not None]
    flat = torch.zeros(sum(g.numel() for g in gradients), dtype=gradients[0].dtype, device=gradients[0].device)
    bucket = _Bucket(group, slots, flat)
    start = 0
    for slot, gradient in zip(slots, gradients, strict=True):
        slot.bucket = bucket
        slot.view = flat[start : start + gradient.numel()].view(gradient.shape)
        slot.grad = placed_like(slot.parameter, slot.view)
        start += gradient.numel()
    return bucket


def _nbytes(slot: _Slot) -> int:
    return 0 if slot.parameter.grad is None else local_of(slot.parameter.grad).nbytes


def _replace_local(parameter: nn.Parameter, local: torch.Tensor) -> torch.Tensor:
    parameter.grad = placed_like(parameter, local)
    return local
