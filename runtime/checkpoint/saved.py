"""A saved state, wherever it is: in a folder on disk, or copied to the memory of hosts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import StorageReader


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """where: it is, for messages. state: everything that is not a tensor. metadata: its tensors and their chunks.

    reader: makes what reads tensors. check: raises CheckpointError unless all of the tensors it is given can be read.
    skipped: name -> what is wrong with each newer one that was passed over.
    """

    where: str
    state: dict[str, Any]
    metadata: Metadata
    reader: Callable[[], StorageReader]
    check: Callable[[Sequence[str]], None]
    skipped: dict[str, str] = field(default_factory=dict)
