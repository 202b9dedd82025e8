"""Reading parameters: values, dtypes and gradients, plain and sharded."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from autopar.ir.primitives.read_parameter import read_parameter
from tests.harness import run_ranks


def test_plain_without_options_is_the_parameter_itself() -> None:
    parameter = nn.Parameter(torch.ones(2))
    assert read_parameter(parameter) is parameter


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_plain(dtype: torch.dtype | None) -> None:
    parameter = nn.Parameter(torch.ones(2))
    read = read_parameter(parameter, dtype=dtype, grad_scale=0.5)
    assert read.dtype == (dtype or torch.float32)
    read.sum().backward()
    assert parameter.grad is not None and parameter.grad.dtype == torch.float32
    assert parameter.grad.tolist() == [0.5, 0.5]


def _sharded() -> list[torch.Tensor]:
    mesh = init_device_mesh("cpu", (2,))
    rank = dist.get_rank()
    found = []
    for placement in (Shard(0), Replicate()):
        parameter = nn.Parameter(DTensor.from_local(torch.full((2,), float(rank)), mesh, [placement], run_check=False))
        read = read_parameter(parameter, dtype=torch.bfloat16, grad_scale=0.25)
        assert type(read) is torch.Tensor
        (read * (rank + 1)).sum().backward()
        gradient = parameter.grad
        assert isinstance(gradient, DTensor) and gradient.placements == (placement,)
        # Not summed over the ranks, though it may be a summand.
        found.append(gradient.to_local())
    return found


def test_sharded() -> None:
    for rank, gradients in enumerate(run_ranks(_sharded, 2)):
        for gradient in gradients:
            assert gradient.dtype == torch.float32
            assert gradient.tolist() == [0.25 * (rank + 1)] * 2
