"""Records of a program's communications and memory, op by op."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from autopar.ir.primitives.collective_counter import kind_of_collective
from autopar.ir.torch_private import (
    FUNCTIONAL_COLLECTIVES,
    TorchDispatchMode,
    local_tensor,
    process_group,
    pytree,
    schema_of,
)


@dataclass(frozen=True, slots=True)
class Communication:
    """One collective, or one side of a send. ranks: that take part, global and ascending; of a send or a receive, the
    other one. numel, dtype: of what this rank puts in (of what it gets, for a receive)."""

    kind: str
    ranks: tuple[int, ...]
    numel: int
    dtype: torch.dtype
    reduction: str = ""

    @property
    def is_point_to_point(self) -> bool:
        """Whether it is a send or a receive."""
        return self.kind in ("send", "recv")

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        what = f"{self.kind} of {self.numel:,} {dtype}" + (f" ({self.reduction})" if self.reduction else "")
        return f"{what} {'with' if self.is_point_to_point else 'over'} {_listed(self.ranks)}"


def _listed(ranks: tuple[int, ...]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    step = ranks[1] - ranks[0]
    if len(ranks) > 2 and all(b - a == step for a, b in pairwise(ranks)):
        return f"ranks {ranks[0]} to {ranks[-1]}" + (f" in steps of {step}" if step > 1 else "")
    return "ranks " + ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")


@dataclass(slots=True)
class Memory:
    """Bytes of the storages that are alive. peak: the most of them at once since ``reset``.

    sizes: of every storage, as a list that is emptied when it is gone: FSDP resizes the storages of gathered parameters
    to nothing, and back.
    """

    now: int = 0
    peak: int = 0
    _sizes: weakref.WeakKeyDictionary[Any, list[int]] = field(default_factory=weakref.WeakKeyDictionary)

    def add(self, values: Iterable[Any]) -> None:
        """Count the storages of tensors among ``values`` for as long as they live."""
        for value in values:
            if not isinstance(value, torch.Tensor):
                continue
            if isinstance(value, torch.distributed.tensor.DTensor):
                value = local_tensor(value)
            storage = value.untyped_storage()
            if storage not in self._sizes:
                size = self._sizes[storage] = [0]
                weakref.finalize(storage, self._set, size, 0)
                self._set(size, storage.nbytes())

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count a storage by the size that it has now."""
        if storage in self._sizes:
            self._set(self._sizes[storage], storage.nbytes())

    def _set(self, size: list[int], nbytes: int) -> None:
        self.now += nbytes - size[0]
        size[0] = nbytes
        self.peak = max(self.peak, self.now)

    def reset(self) -> None:
        """Set the peak to the bytes held now."""
        self.peak = self.now


class Recorder(TorchDispatchMode):
    """Records ``communications`` and ``memory`` while it is active. Inside it, ops run as they would without."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives it no annotations
        self.communications: list[Communication] = []
        self.memory = Memory()
        self._resize = torch.UntypedStorage.resize_

    def __enter__(self) -> Recorder:
        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            found = self._resize(storage, size)
            self.memory.resized(storage)
            return found

        # It is no op, which the mode would see.
        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]  # until __exit__
        super().__enter__()  # type: ignore[no-untyped-call]  # torch gives it no annotations
        return self

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]  # what __enter__ replaced
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch gives it no annotations

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        kind = kind_of_collective(func)
        if kind is not None and kind != "barrier":
            self._record(kind, func, args, kwargs)
        # To wait makes no tensor; of a fake one it would be another.
        result = args[0] if func is FUNCTIONAL_COLLECTIVES.wait_tensor.default else func(*args, **kwargs)
        self.memory.add(pytree.tree_leaves(result))
        return result

    def _record(self, kind: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = dict(zip((argument.name for argument in schema_of(func).arguments), args, strict=False)) | kwargs
        group = _group_of(given)
        tensors = _tensors_of(given)
        ranks = tuple(sorted(dist.get_process_group_ranks(group)))
        if kind in ("send", "recv"):
            place = given.get("dst", given.get("src"))
            assert place is not None
            ranks = (dist.get_global_rank(group, int(place)),)
        elif len(ranks) == 1:
            return
        reduction = given.get("reduce_op", "")
        self.communications.append(
            Communication(
                kind=kind,
                ranks=ranks,
                numel=sum(tensor.numel() for tensor in tensors),
                dtype=tensors[0].dtype,
                reduction=_reduction(reduction),
            )
        )


def _group_of(given: dict[str, Any]) -> dist.ProcessGroup:
    named: Any = given.get("group_name", given.get("process_group"))
    if isinstance(named, str):
        named = process_group(named)
    found: dist.ProcessGroup = named if isinstance(named, dist.ProcessGroup) else dist.ProcessGroup.unbox(named)
    return found


def _tensors_of(given: dict[str, Any]) -> list[torch.Tensor]:
    """What goes in: the second of (output, input), or the only one there is."""
    for name in ("input", "input_tensor", "input_tensors", "inputs", "self", "tensors"):
        if name in given:
            return [leaf for leaf in pytree.tree_leaves(given[name]) if isinstance(leaf, torch.Tensor)]
    raise AssertionError(f"a collective without tensors: {sorted(given)}")


def _reduction(given: Any) -> str:
    """A boxed one shows nothing of itself to Python."""
    return given.lower() if isinstance(given, str) else ""
