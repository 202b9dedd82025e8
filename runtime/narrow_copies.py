"""16-bit copies of float32 parameters, kept over the microbatches of one step.

    parameter, float32       ── cast, once a step ──>              copy, 16 bit: what blocks read
    parameter.grad, float32  <── added, every microbatch ──        gradient of the copy, 16 bit

The copy is a leaf of its own, so a microbatch casts nothing, and its gradient is added in one pass over memory. Where
ZeRO applies, FSDP does the same for the parameters that it manages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import nn

from autopar.ir.primitives.read_parameter import local_of, placed_like, read_parameter
from autopar.ir.program import StageProgram
from autopar.ir.torch_private import hooks_after_gradient
from autopar.runtime.stage_module import StageModule


def cast_reads(programs: Iterable[StageProgram]) -> dict[str, torch.dtype]:
    """Parameters that blocks read in one other dtype alone -> that dtype."""
    found: dict[str, set[torch.dtype | None]] = {}
    for program in programs:
        for block in program.blocks:
            names = {}
            inputs = iter(block.inputs)
            for node in block.graph.nodes:
                if node.op == "placeholder":
                    names[node] = next(inputs)
                elif node.op == "get_attr":
                    names[node] = str(node.target)
                elif node.target is read_parameter:
                    found.setdefault(names[node.args[0]], set()).add(node.kwargs.get("dtype"))
    return {name: dtype for name, dtypes in found.items() if len(dtypes) == 1 for dtype in dtypes if dtype is not None}


class NarrowCopies:
    """Makes the copies of one rank's parameters and puts them where its stages read."""

    def __init__(self, stages: Iterable[StageModule], find: Callable[[str], torch.Tensor]) -> None:
        """find: gives a parameter by name."""
        self._stages, self._find = tuple(stages), find

    def make(self, reads: dict[str, torch.dtype]) -> None:
        """Copy the parameters that ``reads`` names, of the values that they have now."""
        for name, dtype in reads.items():
            parameter = self._find(name)
            if parameter.dtype == dtype:
                continue
            copy = local_of(parameter.detach()).to(dtype).requires_grad_(parameter.requires_grad)
            if parameter.requires_grad:
                assert isinstance(parameter, nn.Parameter)
                copy.register_post_accumulate_grad_hook(partial(_add_gradient, parameter))
            for stage in self._stages:
                if stage.has(name):
                    stage.slot(name).copy = copy

    def drop(self) -> None:
        """Forget the copies. A backward that is still to come has its own hold on them."""
        for stage in self._stages:
            stage.drop_copies()


def _add_gradient(parameter: nn.Parameter, copy: torch.Tensor) -> None:
    """Add the gradient of ``copy`` to that of ``parameter``, whose hooks then run as after a backward of its own."""
    gradient, copy.grad = copy.grad, None
    assert gradient is not None
    if parameter.grad is None:
        parameter.grad = placed_like(parameter, gradient.to(parameter.dtype))
    else:
        local_of(parameter.grad).add_(gradient)
    for hook in hooks_after_gradient(parameter):
        hook(parameter)
