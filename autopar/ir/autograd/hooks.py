"""Hooks that a model came with. Those on forwards are traced with the modules; those on gradients are refused.

A hook on a parameter sees the gradient of a process that has all of it. In a plan it would see parts, or partial sums,
or the gradient of a microbatch. What forward registers itself is seen in ``interception``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import nn

from autopar.ir.errors import CaptureError
from autopar.ir.source import line_of_code
from autopar.ir.torch_private import backward_hooks, gradient_hooks, hooks_on_all_modules

ON_PARAMETERS = "registering the hook on pm.parameters() once the model is parallel, for this rank's part"
ON_MODULES = "tensor.register_hook in forward, which runs exactly"
_OF_ALL_MODULES = "hooks on the modules of the model in place of hooks on all modules"


class _Found(NamedTuple):
    where: str
    hook: Callable[..., Any]
    remedy: str


def refuse_hooks(model: nn.Module, title: str) -> None:
    """Raise CaptureError, with the line of the hook, if the model has one that cannot be run exactly."""
    for where, hook, remedy in _hooks(model):
        raise CaptureError(f"{title} cannot be captured: {where}.\n  hook: {line_of_code(hook)}\n  try: {remedy}")


def _hooks(model: nn.Module) -> Iterator[_Found]:
    for name, parameter in model.named_parameters():
        for hook in gradient_hooks(parameter):
            yield _Found(f"a hook is on the gradient of parameter {name!r}", hook, ON_PARAMETERS)
    for name, part in model.named_modules():
        for hook in backward_hooks(part):
            yield _Found(f"a backward hook is on module {name or type(part).__name__!r}", hook, ON_MODULES)
    for kind, hook in hooks_on_all_modules():
        yield _Found(f"a hook is on all modules ({kind})", hook, _OF_ALL_MODULES)
