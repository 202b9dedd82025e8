"""The blocks of a stage whose parameters, gradients and optimiser state a plan keeps on disk.

    forward of block 5      its parameters are here; those of block 6 are read ahead; those of block 4 go
    backward of block 5     the same the other way round; the gradients of block 6 are written
    step of block 5         its parameters, gradients and state are here; those of block 6 are read ahead, and what has
                            changed of block 4 is written

What is on disk when it is read is mapped there, so it has its values all the same, only later (``file``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from autopar.ir.primitives.read_parameter import local_of, placed_like
from autopar.runtime.disk.file import TensorFile, TensorLayout
from autopar.runtime.disk.mover import Mover
from autopar.runtime.torch_private import is_gathered, keep_parts_in
from autopar.runtime.zero import ZeroEngine

_State = dict[str, torch.Tensor]


class DiskBlock:
    """The files of one block on this rank: parameters, gradients, and the state that each optimiser has of it."""

    def __init__(
        self, module: FSDPModule, names: Mapping[torch.Tensor, str], summed: frozenset[str], mover: Mover
    ) -> None:
        """names: of all parameters that FSDP shards. summed: those whose gradients others sum in buckets of their own,
        and which stay in memory. Raises OSError."""
        self.module, self._mover = module, mover
        self.parameters: dict[str, nn.Parameter] = {}
        self._gradients: TensorFile | None = None
        self._states: WeakKeyDictionary[Optimizer, TensorFile] = WeakKeyDictionary()

        def keep(parts: Sequence[tuple[nn.Parameter, torch.Tensor]]) -> list[torch.Tensor]:
            layouts = [TensorLayout(names[own], tuple(part.shape), part.dtype) for own, part in parts]
            self._values = TensorFile(mover.folder, layouts)
            self.parameters = {names[own]: own for own, _ in parts}
            return [self._values.tensors[layout.name] for layout in layouts]

        keep_parts_in(module, keep)
        mover.made(self._values)
        self._trained = {name for name, own in self.parameters.items() if own.requires_grad} - summed
        for name in sorted(self._trained):
            # A parameter that its own hook keeps alive would never be freed.
            self.parameters[name].register_post_accumulate_grad_hook(partial(_moved, ref(self), name))

    @property
    def files(self) -> list[TensorFile]:
        """All that there are."""
        gradients = [] if self._gradients is None else [self._gradients]
        return [self._values, *gradients, *self._states.values()]

    # Parameters.

    def fetch_parameters(self) -> None:
        """Begin to read what FSDP is to gather, unless it has."""
        if not is_gathered(self.module):
            self._mover.fetch(self._values)

    def need_parameters(self) -> None:
        """Wait for what FSDP is to gather, unless it has."""
        if not is_gathered(self.module):
            self._mover.need(self._values)

    def release_parameters(self, *, changed: bool = False) -> None:
        """The parameters are gathered, or will be later."""
        self._mover.release(self._values, changed=changed)

    # Gradients.

    def take_gradient(self, name: str) -> None:
        """Have a gradient that was made in memory in the file instead."""
        parameter = self.parameters[name]
        if self._gradients is None:
            layouts = [_layout(one, self.parameters[one]) for one in sorted(self._trained)]
            self._gradients = TensorFile(self._mover.folder, layouts)
            self._mover.made(self._gradients)
        assert parameter.grad is not None, "it was accumulated"
        gradient, there = local_of(parameter.grad), self._gradients.tensors[name]
        if gradient.data_ptr() == there.data_ptr():
            return
        if any(other != name and self._is_in_file(other) for other in self._trained):
            self._mover.need(self._gradients)
        else:
            self._mover.take(self._gradients)
        there.copy_(gradient)
        parameter.grad = placed_like(parameter.grad, there)

    def _is_in_file(self, name: str) -> bool:
        """Whether the gradient of a parameter is there."""
        gradient = self.parameters[name].grad
        if gradient is None or self._gradients is None:
            return False
        return local_of(gradient).data_ptr() == self._gradients.tensors[name].data_ptr()

    def fetch_gradients(self) -> None:
        """Begin to read gradients that are there, to which more are added."""
        if self._gradients is not None and self._has_gradients:
            self._mover.fetch(self._gradients)

    def need_gradients(self) -> None:
        """Wait for gradients that are there."""
        if self._gradients is not None and self._has_gradients:
            self._mover.need(self._gradients)

    def release_gradients(self, *, changed: bool = True) -> None:
        """The gradients are not needed for now."""
        if self._gradients is not None:
            self._mover.release(self._gradients, changed=changed and self._has_gradients)

    @property
    def _has_gradients(self) -> bool:
        return any(self.parameters[name].grad is not None for name in self._trained)

    # A step of an optimiser.

    def fetch(self, optimizer: Optimizer) -> None:
        """Begin to read all that a step reads and changes."""
        self._mover.fetch(self._values)
        self.fetch_gradients()
        if optimizer in self._states:
            self._mover.fetch(self._states[optimizer])

    def need(self, optimizer: Optimizer) -> None:
        """Wait for all that a step reads and changes."""
        self._mover.need(self._values)
        self.need_gradients()
        if optimizer in self._states:
            self._mover.need(self._states[optimizer])

    def release(self, optimizer: Optimizer) -> None:
        """After a step: what has changed is written."""
        self._keep_state(optimizer)
        if optimizer in self._states:
            self._mover.release(self._states[optimizer], changed=True)
        self.release_parameters(changed=True)
        self.release_gradients(changed=False)

    def _keep_state(self, optimizer: Optimizer) -> None:
        """Have the state that an optimiser has made in memory in a file instead."""
        found: dict[str, tuple[_State, str]] = {}
        for name, parameter in self.parameters.items():
            state = optimizer.state.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                    found[f"{name}/{key}"] = state, key
        layouts = [_layout(name, state[key]) for name, (state, key) in found.items()]
        if layouts and (optimizer not in self._states or not self._states[optimizer].holds(layouts)):
            self._states[optimizer] = TensorFile(self._mover.folder, layouts)
            self._mover.made(self._states[optimizer])
        for name, (state, key) in found.items():
            there, value = self._states[optimizer].tensors[name], state[key]
            if local_of(value).data_ptr() != there.data_ptr():
                self._states[optimizer].tensors[name].copy_(local_of(value))
                state[key] = placed_like(value, there)


class DiskBlocks:
    """The blocks of one stage that are on disk, in order, and the hooks that bring them."""

    def __init__(self, blocks: Sequence[DiskBlock], zero: ZeroEngine, prefetch: int) -> None:
        """zero: of the stage. prefetch: blocks that FSDP gathers ahead."""
        self.blocks, self._zero, self._prefetch = tuple(blocks), zero, prefetch
        zero.before_sum = partial(_before_sum, ref(self))
        for number, block in enumerate(self.blocks):
            # FSDP has hooks in the same places, before which parameters have to be here.
            assert isinstance(block.module, nn.Module), "what FSDP makes of one"
            block.module.register_forward_pre_hook(partial(_before_forward, ref(self), number), prepend=True)
            block.module.register_forward_hook(partial(_after_forward, ref(self), number), prepend=True)

    def before_forward(self, number: int) -> None:
        """Block ``number`` runs its forward, and FSDP gathers it and those that it gathers ahead."""
        ahead = number + 1 + self._prefetch
        self._bring(self.blocks[number:ahead], self.blocks[ahead : ahead + 1])

    def after_forward(self, number: int) -> None:
        """What has been gathered may go."""
        for block in self.blocks[: number + 1]:
            block.release_parameters()

    def before_backward(self, number: int) -> None:
        """Block ``number`` runs its backward; those after it have theirs behind them, as autograd runs what was made
        last first, also where an output of this one is read by a later block alone."""
        for block in self.blocks[number + 1 :]:
            block.release_parameters()
            block.release_gradients()
        behind = max(0, number - self._prefetch)
        self._bring(self.blocks[behind : number + 1][::-1], self.blocks[max(0, behind - 1) : behind])
        if self._zero.sums(self.blocks[number].module):
            self.blocks[number].need_gradients()
            for block in self.blocks[max(0, number - 1) : number]:
                block.fetch_gradients()

    def before_sum(self, module: FSDPModule) -> None:
        """The gradients of a module are added to those that are there, without a backward of its block."""
        for block in self.blocks:
            if block.module is module:
                block.need_gradients()
            else:
                block.release_gradients()

    def _bring(self, needed: Iterable[DiskBlock], ahead: Iterable[DiskBlock]) -> None:
        needed = list(needed)
        for block in needed:
            block.fetch_parameters()
        for block in ahead:
            block.fetch_parameters()
        for block in needed:
            block.need_parameters()

    def finish(self) -> None:
        """After the last backward of a call, or a forward that has none."""
        for block in self.blocks:
            block.release_parameters()
            block.release_gradients()


def _layout(name: str, tensor: torch.Tensor) -> TensorLayout:
    part = local_of(tensor)
    return TensorLayout(name, tuple(part.shape), part.dtype)


def _moved(block: ReferenceType[DiskBlock], name: str, _: nn.Parameter) -> None:
    if (own := block()) is not None:
        own.take_gradient(name)


def _before_forward(blocks: ReferenceType[DiskBlocks], number: int, *_: Any) -> None:
    if (own := blocks()) is not None:
        own.before_forward(number)


def _after_forward(blocks: ReferenceType[DiskBlocks], number: int, module: nn.Module, args: Any, outputs: Any) -> None:
    if (own := blocks()) is None:
        return
    own.after_forward(number)
    for output in outputs:
        if output.requires_grad:
            output.register_hook(partial(_before_backward, blocks, number))


def _before_sum(blocks: ReferenceType[DiskBlocks], module: FSDPModule) -> None:
    if (own := blocks()) is not None:
        own.before_sum(module)


def _before_backward(blocks: ReferenceType[DiskBlocks], number: int, _: torch.Tensor) -> None:
    if (own := blocks()) is not None:
        own.before_backward(number)
