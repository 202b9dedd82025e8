"""A checkpoint is read in full and compared with its checksums before anything of it is used.

The blocks of all files are divided over the ranks, so that each is read once; the two files that every rank needs, with
what is not tensors and with where the tensors are, are compared by each. All ranks come to the same result.
"""

from __future__ import annotations

import json
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata

from autopar.ir.errors import CheckpointError
from autopar.runtime.agreement import agree, from_first
from autopar.runtime.checkpoint.contents import METADATA, STATE, SafeReader, check_places, parse_metadata, parse_state
from autopar.runtime.checkpoint.folder import complete, latest
from autopar.runtime.checkpoint.manifest import MANIFEST, damaged, read_manifest
from autopar.runtime.checkpoint.saved import Saved

# The first format had no manifest.
FORMAT, _UNVERIFIED_FORMAT = 2, 1


class CheckpointWarning(UserWarning):
    """A checkpoint was not verified, or was passed over because it is damaged."""


def verified(path: Path, *, fall_back: bool = False) -> Saved:
    """The latest checkpoint under ``path``, of which every byte is what was written. All ranks call together.

    fall_back: take the newest one that is not damaged. Raises CheckpointError, the same on every rank.
    """
    names = json.loads(from_first(lambda: _candidates(path, fall_back)))
    skipped: dict[str, str] = {}
    for name in names:
        folder = path / name
        try:
            state, metadata = agree(partial(_open, folder))
        except CheckpointError as error:
            if not fall_back:
                raise CheckpointError(f"{error}{_instead([other for other in names if other != name])}") from error
            skipped[name] = str(error)
            continue
        _check_format(folder, state)  # one of a later version is not damaged, and not passed over
        _warn(folder, state, skipped)
        return Saved(
            where=f"the checkpoint {folder}",
            state=state,
            metadata=metadata,
            reader=partial(SafeReader, folder, metadata),
            check=partial(check_places, folder, metadata),
            skipped=skipped,
        )
    found = "\n".join(f"  {reason}" for reason in skipped.values())
    raise CheckpointError(f"{path} holds no checkpoint that is not damaged:\n{found}")


def _candidates(path: Path, fall_back: bool) -> str:
    """JSON of the names of checkpoints, the latest first, on rank 0. Raises CheckpointError."""
    others = list(complete(path))
    try:
        first = latest(path).name
    except CheckpointError as error:
        if fall_back and others:
            return json.dumps(others)
        raise CheckpointError(f"{error}{_instead(others)}") from error
    return json.dumps([first, *(name for name in others if name != first)])


def _open(folder: Path) -> tuple[dict[str, Any], Metadata]:
    """Everything but the tensors, this rank's share of the files verified."""
    manifest = read_manifest(folder)
    if manifest is None:
        return _open_unverified(folder)
    manifest.check_sizes(folder)
    state = parse_state(manifest.read(folder, STATE), folder)
    metadata = parse_metadata(manifest.read(folder, METADATA), folder)
    unknown = {where.relative_path for where in metadata.storage_data.values()} - manifest.files.keys()
    if unknown:
        raise damaged(folder, f"{MANIFEST} does not name {min(unknown)}")
    blocks, rank, ranks = manifest.blocks(besides=(STATE, METADATA)), dist.get_rank(), dist.get_world_size()
    manifest.check_blocks(folder, blocks[len(blocks) * rank // ranks : len(blocks) * (rank + 1) // ranks])
    return state, metadata


def _open_unverified(folder: Path) -> tuple[dict[str, Any], Metadata]:
    """The same of a checkpoint of an earlier version."""
    try:
        contents = [(folder / name).read_bytes() for name in (STATE, METADATA)]
    except OSError as error:
        raise damaged(folder, f"cannot read {error.filename} ({error.strerror})") from error
    state, metadata = parse_state(contents[0], folder), parse_metadata(contents[1], folder)
    if state.get("format") == FORMAT:
        raise damaged(folder, f"{MANIFEST} is missing")
    return state, metadata


def _check_format(folder: Path, state: dict[str, Any]) -> None:
    if state.get("format") not in (FORMAT, _UNVERIFIED_FORMAT):
        raise CheckpointError(
            f"{folder} has format {state.get('format')!r}; this version of autopar reads {_UNVERIFIED_FORMAT} and "
            f"{FORMAT}.\n  try: the version that wrote it"
        )


def _warn(folder: Path, state: dict[str, Any], skipped: dict[str, str]) -> None:
    if dist.get_rank() != 0:
        return
    for reason in skipped.values():
        warnings.warn(f"{reason}\n  going on from {folder} instead", CheckpointWarning, stacklevel=4)
    if state["format"] == _UNVERIFIED_FORMAT:
        warnings.warn(
            f"{folder} was written by an earlier version of autopar, without checksums: damage goes unnoticed",
            CheckpointWarning,
            stacklevel=4,
        )


def _instead(others: list[str]) -> str:
    if not others:
        return "\n  try: a copy of it, or another checkpoint"
    return (
        f"\n  kept beside it: {', '.join(others)}\n"
        "  try: load(..., fall_back=True), or autopar train --job, which go on from the newest that is not damaged"
    )
