"""One GPU under NCCL: a step equals the plain model, for every level of rematerialisation, compiled, in tiles."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import autopar
from autopar.ir.lowered import row_tiles
from autopar.runtime.host_activations import BlockOnHost, HostMemory, OnHost
from tests.runtime.kept_plans import on_host

ROWS, SEQ, VOCABULARY = 4, 32, 128

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).cuda()


def _train(take_step: Any, model: Any) -> list[float]:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for number in range(5):
        tokens = torch.randint(0, VOCABULARY, (ROWS, SEQ), generator=torch.Generator().manual_seed(number)).cuda()
        losses.append(float(take_step({"input_ids": tokens, "labels": tokens})))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _compare(_: int, folder: str, options: dict[str, Any]) -> None:
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    if options.pop("tiles", False):
        row_tiles.TILE, row_tiles.LIMIT = 1 << 10, 1 << 11
    dist.init_process_group("nccl", init_method=f"file://{folder}/meet", rank=0, world_size=1)
    alone = _llama()

    def plain(batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = alone(**batch).loss
        loss.backward()
        return loss.detach()

    expected = _train(plain, alone)
    tokens = torch.zeros((ROWS, SEQ), dtype=torch.int64)
    inputs = {"input_ids": tokens, "labels": tokens}
    moves = options.pop("host", False)
    parallel = autopar.parallelize(_llama(), 1, example_inputs=inputs, **options)
    if moves:
        parallel = autopar.parallelize(_llama(), 1, example_inputs=inputs, plan=on_host(parallel.plan))
    losses = _train(lambda batch: parallel.step(**parallel.shard_batch(batch)), parallel)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=1e-5)
    state = parallel.full_state_dict()
    for name, value in alone.named_parameters():
        torch.testing.assert_close(state[name].cpu(), value.detach().cpu(), rtol=1e-4, atol=1e-5)
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "options",
    [
        {"remat": "none", "num_microbatches": 1},
        {"remat": "selective", "num_microbatches": 2},
        {"remat": "full", "num_microbatches": 4},
        {"remat": "full", "num_microbatches": 1, "tiles": True},
        {"remat": "none", "num_microbatches": 2, "compile": True},
        {"remat": 0.5, "num_microbatches": 2, "host": True},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_a_step_equals_the_plain_model(options: dict[str, Any], tmp_path: Path) -> None:
    mp.start_processes(_compare, args=(str(tmp_path), options), nprocs=1, start_method="spawn")


def test_host_memory_while_the_gpu_computes() -> None:
    """Tensors come back as they were though the device is busy, memory is free once a block is sent, and a copy does
    not wait for what is computed beside it."""
    device, count, size = torch.device("cuda", 0), 6, (64, 1 << 20)
    memory = HostMemory(device)
    busy = torch.randn(4096, 4096, device=device)
    for _ in range(2):
        memory.begin_forward()
        sent: list[Any] = []
        blocks: list[BlockOnHost] = []
        before = torch.cuda.memory_allocated(device)
        for number in range(count):
            value = torch.full(size, 0.0, device=device)
            for _ in range(8):
                busy = (busy @ busy).tanh()
            value += number + 1
            blocks.append(BlockOnHost(memory))
            sent.append(blocks[-1].put(value))
            value = value.new_empty(0)
            blocks[-1].end_forward()
            assert torch.cuda.memory_allocated(device) - before <= 1.1 * 4 * size[0] * size[1]
        assert all(isinstance(own, OnHost) for own in sent)
        for number in reversed(range(count)):
            blocks[number].begin_backward()
            value = sent[number].take()
            for _ in range(8):
                busy = (busy @ busy).tanh()
            assert bool((value == number + 1).all())
            del value
            assert torch.cuda.memory_allocated(device) - before <= 2.1 * 4 * size[0] * size[1]
    assert memory.num_bytes == count * 4 * size[0] * size[1]
