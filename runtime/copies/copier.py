"""After every step each rank's state is copied to memory of its host, and to that of a partner on another host.

    step 7           | optimiser | step 8: forward, backward          | optimiser |
    thread                        copy 7 -> here  -> partner  -> all?

A thread copies beside the next step, which reads the parameters and changes none until its optimiser; there the copy
on this host is waited for. What is sent to the partner is sent from that copy. At the end all ranks agree that the
step is safe: whatever ends now, a copy of each rank's state after it is left, unless a host and that of its partners
are lost together. Copies are written in turns to two files, so one is complete at any time.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopar.ir.errors import CheckpointError
from autopar.runtime.copies.partner import Partner
from autopar.runtime.copies.places import SLOTS, forget_others, slot_path
from autopar.runtime.copies.slot import Slot, placed
from autopar.runtime.copies.snapshot import Snapshot, Snapshots
from autopar.runtime.launch import this_device
from autopar.runtime.torch_private import copy_all, timeout_of

# The values of a step, as the state of a generator, may grow by this factor before a slot is made anew.
_ROOM = 2


@dataclass(frozen=True, slots=True)
class CopyPlaces:
    """Where a rank copies to. folder: in memory of this host. host: its name. generation: of the job."""

    folder: Path
    host: str
    generation: int


class Copier:
    """Copies the state of one rank. All ranks make one together, and call its methods in the same order."""

    def __init__(self, snapshots: Snapshots, places: CopyPlaces) -> None:
        self._snapshots, self._places = snapshots, places
        self._header = snapshots.header()
        world = dist.group.WORLD
        assert world is not None, "the default group is there"
        # A group of its own: its collectives are in no order with those of training.
        self._group = dist.new_group(backend="gloo", timeout=timeout_of(world, this_device()))
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        hosts: list[Any] = [None] * self._size
        dist.all_gather_object(hosts, places.host, group=self._group)
        self._partner = Partner(self._group, hosts, self._path)
        self._first_of_host = hosts.index(places.host) == self._rank
        self._slots: dict[int, Slot] = {}
        self._room = 0  # of a slot, for values, in bytes
        self._copied, self._thread = threading.Event(), threading.Thread()
        self._error: BaseException | None = None
        self.safe = -1
        """The last step of which every rank's state is copied, here and at its partner."""
        slot_path(places.folder, places.generation, 0, 0).parent.mkdir(parents=True, exist_ok=True)

    def begin(self, step: int, data: Any = None) -> None:
        """Copy the state after ``step`` steps. Parameters and optimiser may not change until ``wait_copied``."""
        self.finish()
        snapshot = self._snapshots.take(step, data)
        event = None
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            event = torch.cuda.Event()
            event.record()
        self._copied.clear()
        self._thread = threading.Thread(target=self._run, args=(snapshot, event), name="copies", daemon=True)
        self._thread.start()

    def wait_copied(self) -> None:
        """Wait until the state may change. Raises CheckpointError if it could not be copied."""
        if self._thread.ident is not None:
            self._copied.wait()
        self._raise()

    def finish(self) -> int:
        """Wait until the last step is safe; returns it. Raises CheckpointError if it could not be copied."""
        if self._thread.ident is not None:
            self._thread.join()
        self._raise()
        return self.safe

    def forget(self) -> None:
        """The state goes back to an earlier one: the copies of later steps count no more."""
        self.finish()
        for slot in self._slots.values():
            slot.begin()
        self._partner.forget()
        self.safe = -1

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise CheckpointError(
                f"the state could not be copied to {self._places.folder}: {error}\n"
                "  try: more memory there, or without --keep-alive, and with checkpoints (--job DIR)"
            ) from error

    def _run(self, snapshot: Snapshot, event: Any) -> None:
        try:
            slot = self._copy(snapshot, event)
            self._copied.set()
            self._partner.exchange(slot, snapshot.step)
            done = torch.zeros(1)
            dist.all_reduce(done, group=self._group)
            self.safe = snapshot.step
            if self._first_of_host:
                forget_others(self._places.folder, self._places.generation)
        except BaseException as error:
            self._error = error
        finally:
            self._copied.set()

    def _copy(self, snapshot: Snapshot, event: Any) -> Slot:
        slot = self._slot(snapshot)
        slot.begin()
        stream = None
        if event is not None:
            stream = torch.cuda.Stream()
            stream.wait_event(event)
        with torch.cuda.stream(stream), torch.no_grad():
            tensors = {key: tensor for (key, *_), tensor in zip(snapshot.parts, snapshot.tensors, strict=True)}
            copy_all(slot.tensors, [tensors[piece.key] for piece in slot.pieces])
        slot.finish(snapshot.step, snapshot.values)
        return slot

    def _slot(self, snapshot: Snapshot) -> Slot:
        """The slot of the step's turn. Both are made anew, with one size, where the tensors here or at the partner are
        others than before, or the values have no room."""
        if self._partner.agree(snapshot.parts, len(snapshot.values) > self._room):
            self._slots, self._room = {}, _ROOM * len(snapshot.values)
        turn = snapshot.step % SLOTS
        if turn not in self._slots:
            pieces = placed(snapshot.parts, self._partner.rank, self._partner.has)
            path = self._path(self._rank, snapshot.step)
            self._slots[turn] = Slot.create(path, self._header, pieces, self._room, self._rank, self._size)
        return self._slots[turn]

    def _path(self, rank: int, step: int) -> Path:
        return slot_path(self._places.folder, self._places.generation, rank, step)
