"""A pipeline stage as a module: blocks run in order over an environment of named values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.ir.kept_lists import INPUTS
from autopar.ir.lowered.random import is_random
from autopar.ir.ops.expert_ffn import recorded_loads
from autopar.ir.primitives.read_parameter import scale_gradient
from autopar.ir.program import StageProgram
from autopar.ir.program_sizes import SizeValues
from autopar.runtime.blocks import BlockModule, CodeLibrary, Slot, attach
from autopar.runtime.host_activations import HostMemory


@dataclass(frozen=True, slots=True)
class _Call:
    """One block call: values it reads, values it adds, values that nothing later reads."""

    block: BlockModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    dead: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Variant:
    """One program over the stage's parameters."""

    received: tuple[str, ...]
    constants: dict[str, torch.Tensor]
    calls: tuple[_Call, ...]
    results: tuple[str, ...]
    updates: Mapping[str, str]
    summed: frozenset[str]
    gives_loss: bool


class StageModule(nn.Module):
    """``forward(*received, **inputs)``: this rank's part of one microbatch.

    A parameter that one block uses is in that block, one that several use is in ``shared``, each nested under
    its original dotted name, so that FSDP can manage block by block. Results are the sent tensors, on the last
    stage the loss or the model's outputs.
    """

    def __init__(self, program: StageProgram, library: CodeLibrary, state: Mapping[str, torch.Tensor]) -> None:
        """state: this rank's part of every parameter and buffer of the stage, by original name."""
        super().__init__()
        self.program = program
        self.blocks = nn.ModuleList()
        self.shared = nn.Module()
        self._library = library
        self._by_name: dict[str, BlockModule] = {}
        self._owner: dict[str, nn.Module] = {}
        self._slots: dict[str, Slot] = {}
        self._variants: dict[str, _Variant] = {}
        self._selected = ""
        self.sizes: Sequence[SizeValues] = ()
        """Of each microbatch of the call at hand."""
        self.loss_scale = 1.0
        """Factor on the gradient of the loss, not on the loss."""
        self.updates: dict[str, torch.Tensor] = {}
        """New values of buffers, which stay as they are until all microbatches have run and their backward too."""
        self.is_random = False
        """Whether any block draws random numbers."""
        self.expert_loads: list[torch.Tensor] = []
        """Tokens of this rank that chose each expert, a tensor for each mixture of experts, since it was last
        cleared."""
        for block in program.blocks:
            module = self._block(block.name)
            for name in (*block.parameters, *block.buffers):
                self._own(module, name, state[name])
        for name, value in state.items():
            if name not in self._owner:
                self._own(self.shared, name, value)

    def _block(self, name: str) -> BlockModule:
        if name not in self._by_name:
            self._by_name[name] = BlockModule(name)
            self.blocks.append(self._by_name[name])
        return self._by_name[name]

    def _own(self, module: nn.Module, name: str, value: torch.Tensor) -> None:
        buffer = self.program.buffers.get(name)
        attach(module, name, value, persistent=buffer is None or buffer.persistent)
        self._owner[name] = module

    @property
    def host(self) -> HostMemory:
        """Where activations wait in host memory, of all stages of this rank."""
        return self._library.host

    def has(self, name: str) -> bool:
        """Whether the stage holds a parameter or buffer, by original name."""
        return name in self._owner

    def owner(self, name: str) -> nn.Module:
        """The block that holds a parameter or buffer, or ``shared`` if several blocks read it."""
        return self._owner[name]

    def slot(self, name: str) -> Slot:
        """The place of a parameter or buffer, by original name."""
        if name not in self._slots:
            self._slots[name] = Slot(self._owner[name], name)
        return self._slots[name]

    def drop_copies(self) -> None:
        """Let blocks read the parameters themselves again."""
        for slot in self._slots.values():
            slot.copy = None

    def add_variant(self, variant: str, program: StageProgram, results: tuple[str, ...], device: torch.device) -> None:
        """Add a program that returns the values called ``results``."""
        last_use: dict[str, int] = {}
        for number, block in enumerate(program.blocks):
            last_use.update(dict.fromkeys((*block.inputs, *block.outputs), number))
        for name in (*results, *program.buffer_updates.values()):
            last_use[name] = len(program.blocks)
        # What is received, given or constant is held elsewhere until the backward.
        made = {name for block in program.blocks if block.kind >= 0 for name in block.outputs}
        calls = []
        for number, block in enumerate(program.blocks):
            module = self._block(block.name)
            function, state, sizes, inputs = self._library.function(block, self._owner)
            first = len(state) + len(sizes)
            waiting = [first + n for n, name in enumerate(inputs) if INPUTS in block.host and name in made]
            call = self._library.callable(function, block.remat, tuple(waiting) if block.host else None)
            trained = [number for number, name in enumerate(state) if name in program.trained]
            module.add_variant(variant, function, call, [self.slot(name) for name in state], sizes, trained)
            self.is_random |= any(map(is_random, block.graph.nodes))
            dead = tuple(name for name, last in last_use.items() if last == number)
            calls.append(_Call(module, inputs, block.outputs, dead))
        self._variants[variant] = _Variant(
            received=tuple(spec.name for spec in program.received),
            constants={name: value.to(device) for name, value in program.constants.items()},
            calls=tuple(calls),
            results=results,
            updates=program.buffer_updates,
            summed=program.summed_updates,
            gives_loss=program.loss is not None,
        )
        self._selected = self._selected or variant

    def select(self, variant: str) -> None:
        """Choose the program that ``forward`` runs."""
        if variant != self._selected:
            self._selected = variant
            for call in self._variants[variant].calls:
                call.block.select(variant)

    def set_sizes(self, sizes: Sequence[SizeValues]) -> None:
        """Say what the sizes of the selected program are, in each microbatch."""
        self.sizes = sizes

    def begin(self, microbatch: int) -> None:
        """The next forward is that of this microbatch."""
        for block in self._by_name.values():
            block.sizes = self.sizes[microbatch]

    @property
    def code(self) -> str:
        """Source of the blocks, in order; identical ones once."""
        seen: dict[str, list[str]] = {}
        for call in self._variants[self._selected].calls:
            seen.setdefault(call.block.code.strip(), []).append(call.block.name)
        return "\n\n".join(f"# {', '.join(names)}\n{code}" for code, names in seen.items())

    def forward(self, *received: torch.Tensor, **inputs: torch.Tensor) -> Any:
        """Run the selected variant's blocks on local tensors, those received from other stages first."""
        variant = self._variants[self._selected]
        values: dict[str, torch.Tensor] = {**variant.constants, **inputs}
        values.update(zip(variant.received, received, strict=True))
        # The environment is all that keeps a value for later blocks; autograd keeps what backward needs.
        del received, inputs
        self.host.begin_forward()
        with recorded_loads() as loads:
            for call in variant.calls:
                results = call.block(*[values[name] for name in call.inputs])
                values.update(zip(call.outputs, results, strict=True))
                del results
                for name in call.dead:
                    values.pop(name, None)
        self.expert_loads = list(map(torch.add, self.expert_loads, loads)) if self.expert_loads else loads
        for buffer, name in variant.updates.items():
            value, kept = values[name].detach(), self.updates.get(buffer)
            self.updates[buffer] = kept + value if kept is not None and buffer in variant.summed else value
        found = tuple(values[name] for name in variant.results)
        if variant.gives_loss and self.loss_scale != 1.0:
            found = tuple(scale_gradient(value, self.loss_scale) for value in found)
        self.host.end_forward(found)
        return found
