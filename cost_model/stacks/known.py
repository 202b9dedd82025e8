"""The software stacks that are known, by name."""

from __future__ import annotations

from difflib import get_close_matches

from autopar.cost_model.stacks.attention_kernels import (
    CUDNN_BLACKWELL,
    CUDNN_HOPPER,
    FLASH1_AMPERE,
    FLASH1_HOPPER,
    FLASH2_AMPERE,
    FLASH2_HOPPER,
)
from autopar.cost_model.stacks.stack import Stack
from autopar.ir.errors import InvalidCluster

AUTOPAR = Stack(
    name="autopar",
    attention={"ampere": FLASH2_AMPERE, "hopper": CUDNN_HOPPER, "blackwell": CUDNN_BLACKWELL},
    why="torch 2.11 takes cuDNN's attention on an H100 and an H200 of itself (benchmarks/kernels.py), else FlashAttention-2",
)
MEGATRON_CORE = Stack(
    name="megatron-core",
    attention={"ampere": FLASH2_AMPERE, "hopper": CUDNN_HOPPER, "blackwell": CUDNN_BLACKWELL},
    why="Transformer Engine takes cuDNN's attention on Hopper and later, FlashAttention-2 before (recalled: its "
    "documentation on attention backends)",
)
TORCHTITAN_2024 = Stack(
    name="torchtitan-2024",
    attention={"ampere": FLASH2_AMPERE, "hopper": FLASH2_HOPPER, "blackwell": CUDNN_BLACKWELL},
    why="scaled_dot_product_attention of torch 2.6: FlashAttention-2, after cuDNN's had been put behind it in 2.5.1 "
    "(recalled: release notes of torch 2.5.1)",
)
NANOTRON = Stack(
    name="nanotron",
    attention={"ampere": FLASH2_AMPERE, "hopper": FLASH2_HOPPER, "blackwell": CUDNN_BLACKWELL},
    why="nanotron calls flash_attn, version 2 (recalled: its requirements)",
)
LLM_FOUNDRY_2023 = Stack(
    name="llm-foundry-2023",
    attention={"ampere": FLASH1_AMPERE, "hopper": FLASH1_HOPPER, "blackwell": CUDNN_BLACKWELL},
    why="torch 1.13.1 with FlashAttention in Triton (scripts/train/benchmarking)",
)

STACKS = {stack.name: stack for stack in (AUTOPAR, MEGATRON_CORE, TORCHTITAN_2024, NANOTRON, LLM_FOUNDRY_2023)}


def find_stack(name: str) -> Stack:
    """The stack called ``name``. Raises InvalidCluster that lists what there is."""
    if name in STACKS:
        return STACKS[name]
    close = get_close_matches(name, STACKS, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise InvalidCluster(f"unknown software stack {name!r}{hint}\n  known: {', '.join(STACKS)}")
