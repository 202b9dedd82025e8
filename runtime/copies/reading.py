"""A state read from its copies: what every host has of it, sent to where it is needed, and read as a checkpoint is."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from autopar.ir.errors import CheckpointError
from autopar.ir.plan import Plan
from autopar.runtime.checkpoint.loading import is_plan
from autopar.runtime.checkpoint.saved import Saved
from autopar.runtime.copies.copier import CopyPlaces
from autopar.runtime.copies.places import copies_in, slot_path, usable
from autopar.runtime.copies.slot import BODY, Piece, Slot, set_step

_Where = tuple[Slot, Piece]


def open_copies(places: CopyPlaces, step: int, generation: int, plan: Plan) -> Saved:
    """The state after ``step`` steps of a generation, of which there is a copy of every rank on some host.

    All ranks call together. Where each host has what its ranks had under this plan nothing is sent; else every host is
    sent what it has not. Raises CheckpointError, on every rank, if a copy is missing.
    """
    own = [copy for copy in copies_in(places.folder) if (copy.step, copy.generation) == (step, generation)]
    where = f"the copies of step {step} in {places.folder}"
    mine = next((Slot(copy.path) for copy in own if copy.rank == dist.get_rank() and copy.rest is None), None)
    stays = mine is not None and mine.world_size == dist.get_world_size() and is_plan(mine.header["plan"], plan)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (places.host, own, stays))
    if mine is not None and all(stays for *_, stays in found):
        return saved_of([mine], where)
    size = max((copy.world_size for _, copies, _ in found for copy in copies), default=0)
    hosts = [host for host, *_ in found]
    first = {host: hosts.index(host) for host in hosts}
    # Tensors that were not sent with a copy are in the whole copy of its partner, which every host has or is sent.
    known = [copy for rank in first.values() for copy in found[rank][1]]
    held = {host: {copy.rank: copy for copy in usable(found[rank][1], known)} for host, rank in first.items()}
    missing = sorted(set(range(size)) - set().union(*held.values()))
    if missing or not size:
        raise CheckpointError(f"{where}: no host has that of rank {', '.join(map(str, missing)) or '0'}")
    for rank in range(size):
        _, source = min((there[rank].rest is not None, first[host]) for host, there in held.items() if rank in there)
        for host, there in held.items():
            if rank not in there:
                _send(slot_path(places.folder, generation, rank, step), step, source, first[host])
    dist.barrier()
    return saved_of([Slot(slot_path(places.folder, generation, rank, step)) for rank in range(size)], where)


def _send(path: Path, step: int, source: int, target: int) -> None:
    """A file from one host to another."""
    if dist.get_rank() == source:
        data = Slot(path).data
        dist.send_object_list([data.numel()], target)
        dist.send(data[BODY:], target)
    elif dist.get_rank() == target:
        size: list[Any] = [None]
        dist.recv_object_list(size, source)
        path.parent.mkdir(parents=True, exist_ok=True)
        data = Slot.empty(path, size[0])
        dist.recv(data[BODY:], source)
        set_step(data, step)


def saved_of(slots: Sequence[Slot], where: str) -> Saved:
    """The state that copies of every rank hold between them."""
    states = [_loaded(slot.values, str(slot.path)) for slot in slots]
    header, first = slots[0].header, states[0]
    settings: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for state in states:
        settings.update(_loaded(state["settings"], where))
        values.update(state["values"])
    own = {name: first[name] for name in ("step", "data", "scheduler", "scaler", "random")}
    chunks: dict[str, list[ChunkStorageMetadata]] = {}
    pieces: dict[MetadataIndex, _Where] = {}
    wholes: dict[str, Piece] = {}
    for slot in slots:
        for piece in slot.pieces:
            wholes[piece.key] = piece
            there = chunks.setdefault(piece.key, [])
            index = MetadataIndex(piece.key, torch.Size(piece.offsets))
            if piece.nbytes and index not in pieces:
                pieces[index] = slot, piece
                there.append(ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes)))
    tensors = {
        key: TensorStorageMetadata(TensorProperties(dtype=piece.torch_dtype), torch.Size(piece.shape), chunks[key])
        for key, piece in wholes.items()
    }
    metadata = Metadata(dict(tensors), storage_data=pieces)
    return Saved(
        where=where,
        state={**header, **own, "settings": settings or None, "values": values, "frozen": None},
        metadata=metadata,
        reader=lambda: CopyReader(metadata, pieces),
        check=lambda names: None,
    )


def _loaded(content: bytes, where: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = torch.load(io.BytesIO(content), weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{where} is broken: {error}") from error
    return found


class CopyReader(StorageReader):
    """Reads tensors out of slots for torch.distributed.checkpoint, which knows what a rank needs of which chunk."""

    def __init__(self, metadata: Metadata, pieces: Mapping[MetadataIndex, _Where]) -> None:
        self._metadata, self._pieces = metadata, pieces

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """None is read by its name."""
        return False

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept from one read to the next."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The tensors and their chunks."""
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The slots are open."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy what the plan asks for."""
        for item in plan.items:
            slot, piece = self._pieces[MetadataIndex(item.storage_index.fqn, item.storage_index.offset)]
            part = slot.tensor(piece)
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                part = part.narrow(dim, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(part)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done
