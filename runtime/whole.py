"""Whole tensors of the original model, gathered from the ranks one at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autopar.ir.graph import Parameter
from autopar.runtime.engine import Engine
from autopar.runtime.lazy_tensor import Box, LastRead, LazyTensor, cut
from autopar.runtime.state import gather_full, join_pieces


def whole_tensors(engine: Engine) -> dict[str, LazyTensor]:
    """The whole model's state dict, each tensor gathered when it is read. All ranks read together, in one order.

    Tied parameters come under all of their names, as the same object. The last tensor read is kept for reads of other
    parts of it.
    """
    engine.reshard()
    nodes = {node.name: node.meta["val"] for node in engine.captured.graph.nodes if node.op == "placeholder"}
    groups: dict[str, list[Parameter]] = {}
    for parameter in engine.captured.parameters.values():
        groups.setdefault(parameter.whole_names[0], []).append(parameter)
    for node, buffer in engine.captured.buffers.items():
        if buffer.persistent:
            shape, dtype = tuple(nodes[node].shape), nodes[node].dtype
            names = (buffer.name, *buffer.aliases)
            groups[buffer.name] = [Parameter(names=names, shape=shape, dtype=dtype, requires_grad=False)]
    sources = stages_of(engine)

    def gathered(pieces: Sequence[Parameter]) -> torch.Tensor:
        full = gather_full(pieces, sources, engine.tensor, engine.stored, engine.mesh, engine.device)
        (whole,) = join_pieces(pieces, full).values()
        return whole

    read = LastRead(gathered)

    def lazy(pieces: Sequence[Parameter]) -> LazyTensor:
        def fetch(box: Box) -> torch.Tensor:
            return cut(read(pieces), box)

        part = pieces[0].part
        return LazyTensor(pieces[0].shape if part is None else part.shape, pieces[0].dtype, fetch)

    found: dict[str, LazyTensor] = {}
    for pieces in groups.values():
        found.update(dict.fromkeys(pieces[0].whole_names, lazy(pieces)))
    return {name: found[name] for name in ordered(engine, found)}


def stages_of(engine: Engine) -> dict[str, int]:
    """The stage that has each parameter and buffer; the first one has those that no stage reads."""
    captured = engine.captured
    names = [*(p.name for p in captured.parameters.values()), *(b.name for b in captured.buffers.values())]
    return {name: engine.stages.get(name, 0) for name in names}


def ordered(engine: Engine, found: Mapping[str, Any]) -> list[str]:
    """The names in ``found`` in the order of the original model's state dict, pieces in the place of their whole."""
    pieces: dict[str, list[str]] = {}
    for parameter in engine.captured.parameters.values():
        for whole, name in zip(parameter.whole_names, parameter.names, strict=True):
            pieces.setdefault(whole, []).append(name)
    order = [n for whole in engine.state_order for n in dict.fromkeys((whole, *pieces.get(whole, ())))]
    known = [name for name in order if name in found]
    return known + [name for name in found if name not in set(known)]
