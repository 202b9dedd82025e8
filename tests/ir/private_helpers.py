"""What cases of private names of torch share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn


def exported(function: Callable[..., Any], *inputs: Tensor) -> list[fx.Node]:
    """The ops of a function as torch.export first has them, before any is made functional."""

    class Model(nn.Module):
        def forward(self, *args: Tensor) -> Any:
            return function(*args)

    return list(torch.export.export(Model(), inputs, strict=False).graph.nodes)


def targets(nodes: list[fx.Node]) -> set[Any]:
    return {node.target for node in nodes}


@contextmanager
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
