"""Checkpoints that are damaged, in the files that ``autopar.load`` reads, and folders of safetensors."""

from __future__ import annotations

import json
import pickle
import random
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import autopar
from autopar.huggingface.pretrained import open_pretrained
from autopar.runtime.checkpoint.contents import parse_metadata, parse_state
from autopar.runtime.checkpoint.safetensors_files import TensorFiles
from tests.fuzz.harness import Read, failures, none_of
from tests.fuzz.models import Net
from tests.fuzz.mutation import as_json, changed_bytes, changed_value


@cache
def trained() -> tuple[Any, Any]:
    """A model under a plan for one rank, and its optimiser."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = autopar.parallelize(Net(), 1, example_inputs=(torch.zeros(8, 16),))
    optimizer = torch.optim.AdamW(model.parameters())
    model.step(torch.zeros(8, 16))
    optimizer.step()
    return model, optimizer


@cache
def saved(folder: Path) -> dict[str, bytes]:
    """The files of a checkpoint, by their paths."""
    autopar.save(*trained(), folder / "saved", step=3, data={"epoch": 1})
    return {
        str(path.relative_to(folder / "saved")): path.read_bytes()
        for path in sorted((folder / "saved").rglob("*"))
        if path.is_file()
    }


def read_checkpoint(chance: random.Random, folder: Path) -> None:
    files = saved(folder)
    shutil.rmtree(folder / "run", ignore_errors=True)
    damaged = chance.choice(sorted(files))
    for name, content in files.items():
        path = folder / "run" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name != damaged:
            path.write_bytes(content)
        elif chance.random() < 0.9:
            path.write_bytes(_damaged(name, content, chance))
    autopar.load(*trained(), folder / "run")


def _damaged(name: str, content: bytes, chance: random.Random) -> bytes:
    if not name.endswith("state.pt") or chance.random() < 0.5:
        return changed_bytes(content, chance)
    from io import BytesIO

    state = torch.load(BytesIO(content), weights_only=True)
    written = BytesIO()
    torch.save(changed_value(state, chance), written)
    return written.getvalue()


def read_pickles(chance: random.Random, folder: Path) -> None:
    """Metadata and state of pickles alone, which may ask for anything."""
    name = chance.choice((".metadata", "state.pt"))
    content = next(content for path, content in saved(folder).items() if path.endswith(name))
    odd = pickle.dumps(chance.choice(({}, [1], 3, "x", {"storage_data": {}}, {1: {}})), protocol=chance.randrange(6))
    (folder / name).write_bytes(chance.choice((odd, changed_bytes(odd, chance), changed_bytes(content, chance))))
    (parse_metadata if name == ".metadata" else parse_state)((folder / name).read_bytes(), folder)


@cache
def weights(folder: Path) -> dict[str, bytes]:
    """The files of a folder that transformers writes."""
    from transformers import GPT2Config, GPT2LMHeadModel

    made = folder / "made"
    made.mkdir()
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=8, n_layer=2, n_head=2, n_positions=16))
    model.save_pretrained(made, max_shard_size="5KB")
    return {path.name: path.read_bytes() for path in sorted(made.iterdir())}


def read_weights(chance: random.Random, folder: Path) -> None:
    files = weights(folder)
    shutil.rmtree(folder / "weights", ignore_errors=True)
    (folder / "weights").mkdir()
    damaged = chance.choice(sorted(files))
    for name, content in files.items():
        if name == damaged:
            changed = (
                as_json(changed_value(json.loads(content), chance), chance)
                if name.endswith("json")
                else _tensors(content, chance)
            )
            (folder / "weights" / name).write_bytes(changed)
        else:
            (folder / "weights" / name).write_bytes(content)
    if chance.random() < 0.2:
        found = open_pretrained(str(folder / "weights"), torch.float32)
        files, values = found.files, found.values
    else:
        files = TensorFiles(folder / "weights")
        values = files.tensors
    try:
        for value in values.values():
            value.read()
    finally:
        files.close()


def _tensors(content: bytes, chance: random.Random) -> bytes:
    """A file of safetensors whose header has changed, or any byte."""
    length = int.from_bytes(content[:8], "little")
    if chance.random() < 0.4:
        return changed_bytes(content, chance, first=chance.choice((8, 8 + length, None)))
    header = as_json(changed_value(json.loads(content[8 : 8 + length]), chance), chance)
    return len(header).to_bytes(8, "little") + header + content[8 + length :]


KINDS = [("checkpoint", read_checkpoint, 150), ("pickle", read_pickles, 600), ("weights", read_weights, 200)]


@pytest.mark.parametrize(("kind", "read", "count"), KINDS)
def test_an_input_is_read_or_refused(kind: str, read: Read, count: int, tmp_path: Path) -> None:
    none_of(failures(kind, read, count, tmp_path))
