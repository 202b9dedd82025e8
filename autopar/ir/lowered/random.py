"""Random ops on shards: different numbers on different shards, equal ones on replicas.

Every op draws one number from the CPU generator and derives from it, and from the place of its shard, the seed
of the numbers that it needs. The CPU generator has to be in one state on all ranks: ``shared_randomness`` puts
it there, and its state is the base seed and the count of calls. A block that is recomputed begins in the state that its
forward began in, so that it draws the same numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx

from autopar.ir.autograd.function_op import FunctionOp
from autopar.ir.lowered.shards import Groups, axes_sharded, shard_index
from autopar.ir.mesh import Mesh
from autopar.ir.rule import Assignment, FactorRule
from autopar.ir.torch_private import FakeTensor, OpOverload, pytree


def derive_seed(*parts: int) -> int:
    """A seed of 63 bits from integers; other integers give an unrelated one."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Default generator of ``device`` starts at ``seed`` within, and afterwards goes on where it was."""
    generator = _default_generator(device)
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


@contextmanager
def shared_randomness(*seed: int, devices: Sequence[torch.device] = ()) -> Iterator[None]:
    """Within, the CPU generator and those of ``devices`` start from ``seed``, afterwards they go on as before.

    The runtime enters it around each forward, on every rank of a stage with the same ``seed``: base seed, step,
    stage, microbatch.
    """
    start = derive_seed(*seed)
    with _seeded(start, torch.device("cpu")):
        others = [(_default_generator(device), device) for device in devices if device.type != "cpu"]
        states = [generator.get_state() for generator, _ in others]
        for generator, _ in others:
            generator.manual_seed(start)
        try:
            yield
        finally:
            for (generator, _), state in zip(others, states, strict=True):
                generator.set_state(state)


@contextmanager
def shard_randomness(operands: Any, groups: Groups) -> Iterator[None]:
    """Within, random ops on the device of ``operands`` draw the numbers of this rank's shard over ``groups``."""
    leaves = [leaf for leaf in pytree.tree_leaves(operands) if isinstance(leaf, (Tensor, torch.device))]
    devices = [leaf.device if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    device = devices[0] if devices else torch.device("cpu")
    if device.type == "meta" or any(isinstance(leaf, FakeTensor) for leaf in leaves):
        yield  # shapes only
        return
    base = torch.randint(2**62, ())
    if isinstance(base, FakeTensor):
        yield  # an op without operands, for its shape
        return
    with _seeded(derive_seed(int(base), shard_index(groups)), device):
        yield


def seeded(op: OpOverload, *args: Any, groups: Groups, **kwargs: Any) -> Any:
    """``op(*args, **kwargs)`` with the random numbers of this rank's shard over ``groups``.

    ``torch.compile`` breaks its graph here: a compiled graph would keep the seed.
    """
    with shard_randomness((args, kwargs), groups):
        return op(*args, **kwargs)


def is_random(node: fx.Node) -> bool:
    """Whether a call draws random numbers, so that running it again gives another result."""
    if node.target is seeded or "random_groups" in node.kwargs:
        return True
    if isinstance(node.target, FunctionOp):
        return node.target.draws
    return isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def build(node: fx.Node, rule: FactorRule, assignment: Assignment, mesh: Mesh) -> tuple[Any, Any, dict[str, Any]]:
    """The call that replaces a random op, sharded or not."""
    return seeded, (node.target, *node.args), {**node.kwargs, "groups": axes_sharded(rule, assignment, mesh)}
