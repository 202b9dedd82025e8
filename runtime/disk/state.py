"""What a rank keeps on a local disk: the blocks of all its stages, one mover, and the steps of their optimisers."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

from autopar.ir.errors import DiskError, PlanMismatch
from autopar.runtime.disk.blocks import DiskBlock, DiskBlocks
from autopar.runtime.disk.mover import Mover, Traffic
from autopar.runtime.disk.steps import BlockSteps
from autopar.runtime.freed_memory import give_back_freed_memory, keep_freed_memory
from autopar.runtime.local_stage import LocalStage
from autopar.runtime.mesh import JobMesh
from autopar.runtime.state import Stored
from autopar.runtime.zero import ZeroEngine

# Seconds between two times that what has changed is brought to the disk while a checkpoint is read.
_FLUSH_S = 0.5

T = TypeVar("T")


class DiskState:
    """Parameters, gradients and optimiser state of a rank's blocks that are in files on a local disk."""

    def __init__(self, folder: str | os.PathLike[str] | None) -> None:
        """folder: where the files are, which have no names there. Raises PlanMismatch or DiskError."""
        if folder is None:
            raise PlanMismatch(
                "the plan keeps parameters and optimiser state on disk (stages.on_disk), and no folder is given.\n"
                "  try: parallelize(..., disk=FOLDER) or --disk FOLDER, on a local disk of every node"
            )
        self._mover = Mover(disk_folder(Path(folder)))
        # Says where, if a page cannot be read that nothing has read ahead.
        faulthandler.enable()
        give_back_freed_memory()
        self._stages: list[DiskBlocks] = []
        self._steps: BlockSteps | None = None
        self._to_fill: dict[DiskBlock, set[str]] = {}
        """Blocks of which some parameters have got their first values, and the names of the others."""

    @property
    def traffic(self) -> Traffic:
        """Of this rank, from the start."""
        return self._mover.traffic

    def add(self, zero: ZeroEngine, names: Mapping[torch.Tensor, str], summed: frozenset[str], prefetch: int) -> None:
        """The blocks of a stage. names: of the parameters that ZeRO shards. summed: those whose gradients stay in
        memory. prefetch: blocks that FSDP gathers ahead. Raises DiskError."""
        try:
            blocks = [DiskBlock(module, names, summed, self._mover) for module in zero.on_disk]
        except OSError as error:
            raise DiskError(
                f"{self._mover.folder}: no room for what the plan keeps on disk: {error.strerror or error}\n"
                "  try: another folder, a plan for more ranks, or fewer blocks on disk (stages.on_disk)"
            ) from error
        self._stages.append(DiskBlocks(blocks, zero, prefetch))

    def start(self) -> None:
        """All stages are added."""
        self._steps = BlockSteps(self._blocks, self._mover)

    @property
    def _blocks(self) -> list[DiskBlock]:
        return [block for stage in self._stages for block in stage.blocks]

    def filled(self, name: str) -> None:
        """A parameter has got its first values. Those of a block are written when it has all of them."""
        block = next((one for one in self._blocks if name in one.parameters), None)
        if block is None:
            return
        left = self._to_fill.setdefault(block, set(block.parameters))
        left.discard(name)
        if not left:
            del self._to_fill[block]
            block.release_parameters(changed=True)

    def finish(self) -> None:
        """After a call of the model, or after its parameters have got their values."""
        for block in self._to_fill:
            block.release_parameters(changed=True)
        self._to_fill = {}
        for stage in self._stages:
            stage.finish()
        self._mover.settle()

    def portions(
        self, parameters: Sequence[tuple[nn.Parameter, T]], *, changed: bool
    ) -> Iterator[list[tuple[nn.Parameter, T]]]:
        """Parameters in portions, whose gradients are in memory until the next one is asked for. changed: they are
        changed meanwhile."""
        blocks = {id(parameter): block for block in self._blocks for parameter in block.parameters.values()}
        found: dict[DiskBlock | None, list[tuple[nn.Parameter, T]]] = {None: []}
        for one in parameters:
            found.setdefault(blocks.get(id(one[0])), []).append(one)
        yield found.pop(None)
        order = [block for block in found if block is not None]
        for number, block in enumerate(order):
            for later in order[number : number + 2]:
                later.fetch_gradients()
            block.need_gradients()
            yield found[block]
            block.release_gradients(changed=changed)
        self._mover.settle()

    def names_by_block(self, names: Sequence[str]) -> list[list[str]]:
        """Names of parameters, of each block on disk apart; those of others first."""
        found: dict[DiskBlock | None, list[str]] = {None: []}
        for name in names:
            found.setdefault(next((one for one in self._blocks if name in one.parameters), None), []).append(name)
        return list(found.values())

    @contextmanager
    def flushing(self) -> Iterator[None]:
        """While tensors are read into parameters and optimiser state in any order, what is there is written again and
        again, so that it does not fill the memory. Raises DiskError."""
        files = [file for block in self._blocks for file in block.files]
        done = threading.Event()
        failures: list[OSError] = []

        def flush() -> None:
            try:
                while not done.wait(_FLUSH_S):
                    for file in files:
                        file.flush()
            except OSError as error:
                failures.append(error)

        thread = threading.Thread(target=flush, name="autopar-disk-flush")
        for file in files:
            self._mover.release(file, changed=False)
        self._mover.settle()
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
        if failures:
            raise DiskError(f"{self._mover.folder}: the disk failed: {failures[0].strerror}") from failures[0]


def disk_state(
    folder: str | os.PathLike[str] | None,
    stages: Sequence[LocalStage],
    stored: Mapping[str, Stored],
    mesh: JobMesh,
    prefetch: int,
) -> DiskState | None:
    """What the plan keeps on disk of a rank's stages; None for nothing, and then the process keeps what it frees.

    folder: where. stored: every parameter of the rank. Raises PlanMismatch or DiskError.
    """
    if dist.get_backend() == "fake":
        return None
    on_disk = [stage for stage in stages if stage.zero is not None and stage.zero.on_disk]
    if not on_disk:
        keep_freed_memory()
        return None
    found = DiskState(folder)
    # Gradients that are summed by other means are in buckets.
    summed = frozenset(name for name, how in stored.items() if any(group is not None for group in how.sums(mesh)))
    for stage in on_disk:
        assert stage.zero is not None, "it has blocks on disk"
        names = {stage.module.slot(name).get(): name for name in stage.zero.managed}
        found.add(stage.zero, names, summed, prefetch)
    found.start()
    return found


def disk_folder(path: Path) -> Path:
    """``path``, if it is a folder on a disk. Raises DiskError."""
    if not sys.platform.startswith("linux"):
        raise DiskError(f"state on disk needs Linux, and this is {sys.platform}.\n  try: a plan without on_disk")
    if not path.is_dir():
        raise DiskError(f"{path}: no such folder.\n  expected: one on a local disk of every node")
    if not os.access(path, os.W_OK):
        raise DiskError(f"{path}: no file can be made there.\n  expected: a folder on a local disk of every node")
    best, kind = "", ""
    try:
        mounts = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return path
    resolved = os.fspath(path.resolve())
    for line in mounts:
        _, point, own, *_ = line.split(" ")
        point = point.replace("\\040", " ")
        inside = point == "/" or resolved == point or resolved.startswith(point + "/")
        if inside and len(point) >= len(best):
            best, kind = point, own
    if kind in ("tmpfs", "ramfs"):
        raise DiskError(
            f"{path} is in memory ({kind} at {best}), which is not where state on disk is to be.\n"
            "  try: a folder on a local disk"
        )
    return path
