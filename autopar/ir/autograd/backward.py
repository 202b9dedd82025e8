"""Whether a captured model has a backward at all: derivatives inside forward may use ops that have none themselves."""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import Tensor, fx

from autopar.ir.autograd.trial import apart
from autopar.ir.building import fake_mode_of
from autopar.ir.errors import CaptureError
from autopar.ir.torch_private import OpOverload, schema_of


def check_backward(title: str, module: fx.GraphModule, trained: Container[str]) -> None:
    """Raise CaptureError, with the line of the op, if torch cannot differentiate the loss, the first output.

    Runs forward and backward on fake tensors. trained: placeholders that require a gradient.
    """
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    with apart(), torch.enable_grad(), fake_mode_of(module.graph):
        values = [node.meta["val"].detach().requires_grad_(node.name in trained) for node in placeholders]
        loss = fx.Interpreter(module).run(*values)[0]
        leaves = [value for value in values if value.requires_grad]
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            return
        try:
            torch.autograd.grad(loss, leaves, torch.ones_like(loss), allow_unused=True)
        except RuntimeError as error:
            said = str(error).splitlines()[0]
            where = next((f"\n  at {n.meta['source']}" for n in module.graph.nodes if _named(n) in said.split()), "")
            raise CaptureError(
                f"{title} cannot be captured: its backward differentiates twice what torch cannot.{where}\n"
                f"  {said}\n  try: other ops where forward takes a derivative"
            ) from error


def _named(node: fx.Node) -> str:
    target = node.target
    return str(schema_of(target).name) if isinstance(target, OpOverload) else ""
