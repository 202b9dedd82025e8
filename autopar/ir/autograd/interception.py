"""Calls of autograd in a forward while it is traced: recorded, made plain, or refused with its line.

    Function.apply                      one op (``recording``)
    tensor.register_hook                one op in the tensor's place
    torch.autograd.grad                 the ops of the derivative (``derivatives``)
    vmap, torch.func, flex_attention    the ops that they come down to (``transforms``, ``flex``)
    scan, associative_scan              one op (``scans``)
    ctc_loss                            one op (``ir.ctc``)
    checkpoint, save_on_cpu             what is inside: the plan says what is kept
    backward hooks of modules,
    saved_tensors_hooks, retain_grad,
    hooks on several tensors,
    backward, hooks of parameters,      refused
    requires_grad of parameters,
    forward-mode differentiation,
    seeds of random numbers

torch's own entry points are replaced while the trace runs, at the place that all ways to them go through, so that
``reverse = Reverse.apply`` of an import long ago is seen as well.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils import checkpoint
from torch.utils.hooks import RemovableHandle

from autopar.ir.autograd.applied import Handler, functions_handled
from autopar.ir.autograd.derivatives import recorded_gradients
from autopar.ir.autograd.flex import flex_attention_made_plain
from autopar.ir.autograd.function_op import Hooked
from autopar.ir.autograd.hooks import ON_MODULES, ON_PARAMETERS
from autopar.ir.autograd.recording import Recording, recorded
from autopar.ir.autograd.replacing import replaced
from autopar.ir.autograd.scans import scans_recorded
from autopar.ir.autograd.transforms import transforms_made_plain
from autopar.ir.autograd.trial import is_apart
from autopar.ir.errors import CaptureError
from autopar.ir.ops.ctc import ctc_loss_is_one_op
from autopar.ir.source import is_library, user_line
from autopar.ir.torch_private import (
    CHECKPOINT,
    NODE_OF_TENSOR,
    BackwardHookFunction,
    is_of_dispatcher,
    writes_to,
)

_register_hook: Callable[..., Any] = Tensor.register_hook
_get_requires_grad: Callable[[Tensor], bool] = Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_write_requires_grad: Callable[[Tensor, bool], None] = Tensor.requires_grad.__set__  # type: ignore[attr-defined]
_get_grad_fn: Callable[[Tensor], Any] = Tensor.grad_fn.__get__  # type: ignore[union-attr]  # a descriptor


@contextmanager
def intercepted(model: nn.Module) -> Iterator[Recording]:
    """Within, what a forward of ``model`` asks of autograd is recorded or refused."""
    with ExitStack() as stack:
        recording = stack.enter_context(recorded())
        for plain in (transforms_made_plain, flex_attention_made_plain, scans_recorded, ctc_loss_is_one_op):
            stack.enter_context(plain())

        def replace(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(replaced(owner, name, value))

        stack.enter_context(functions_handled(_call(recording, model)))
        replace(Tensor, "register_hook", _hook(recording))
        replace(torch.autograd, "grad", recorded_gradients)
        replace(Tensor, "grad_fn", property(_grad_fn))
        replace(Tensor, "requires_grad_", _requires_grad_)
        replace(Tensor, "requires_grad", property(_get_requires_grad, _set_requires_grad))
        replace(*CHECKPOINT, _checkpointed(model))
        replace(torch.autograd.graph.saved_tensors_hooks, "__enter__", _enter_saved_tensors_hooks)
        replace(torch.autograd.graph.saved_tensors_hooks, "__exit__", _exit_saved_tensors_hooks)
        for owner, name, what, remedy in _REFUSED:
            replace(owner, name, _refusing(getattr(owner, name), what, remedy))
        for owner, name in ((torch, "manual_seed"), (torch.random, "manual_seed"), (torch, "set_rng_state")):
            replace(owner, name, _seeding(getattr(owner, name)))
        yield recording


def _call(recording: Recording, model: nn.Module) -> Handler:
    def call(cls: type[torch.autograd.Function], args: tuple[Any, ...], as_torch: Callable[[], Any]) -> Any:
        if not is_apart() and not is_of_dispatcher(cls):
            if cls is checkpoint.CheckpointFunction:
                before = _versions(model)
                result = _checkpointed_reentrantly(*args)
                _refuse_written(model, before)
                return result
            if cls is BackwardHookFunction:
                raise _refused("calls backward hooks of a module", "removing them, or a hook on a tensor in forward")
            # Without a gradient there is no backward.
            if torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args):
                return recording.call(cls, args)
        return as_torch()

    return call


def _hook(recording: Recording) -> Callable[..., Any]:
    def register_hook(self: Tensor, hook: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
        if is_apart() or not self.requires_grad:
            handle: RemovableHandle = _register_hook(self, hook)  # which says what is wrong
            return handle
        if isinstance(self, nn.Parameter):
            raise _refused("registers a hook on a parameter", ON_PARAMETERS)
        recording.call(Hooked, (self, hook))
        return _Unremovable()

    return register_hook


class _Unremovable(RemovableHandle):
    """The handle of a hook that a graph holds."""

    def __init__(self) -> None:
        super().__init__(OrderedDict())

    def remove(self) -> None:
        raise _refused("removes a hook on a tensor", "registering the hook only where it is wanted")


class _Node:
    """A node of autograd that takes no hooks."""

    def __init__(self, node: Any) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        if name.startswith("register_"):
            raise _refused("registers a hook on a node of autograd", "tensor.register_hook, which runs exactly")
        return getattr(self._node, name)


def _grad_fn(tensor: Tensor) -> Any:
    node = _get_grad_fn(tensor)
    return node if node is None or is_apart() else _Node(node)


def _requires_grad_(tensor: Tensor, requires_grad: bool = True) -> Tensor:
    _set_requires_grad(tensor, requires_grad)
    return tensor


def _set_requires_grad(tensor: Tensor, requires_grad: bool) -> None:
    if isinstance(tensor, nn.Parameter) and tensor.requires_grad != requires_grad and not is_apart():
        raise _refused(
            "freezes a parameter or has it train again",
            "freezing it before the model is made parallel, or parameter.detach() where no gradient is wanted",
        )
    _write_requires_grad(tensor, requires_grad)


def _checkpointed_reentrantly(run: Callable[..., Any], preserve: bool, *args: Any) -> Any:
    """What ``torch.utils.checkpoint`` runs. Where no argument requires a gradient, nothing inside gets one."""
    if any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
        return run(*args)
    with torch.no_grad():
        return run(*args)


def _checkpointed(model: nn.Module) -> Callable[..., Iterator[None]]:
    """In place of what packs and unpacks saved tensors: a generator that yields before the forward."""

    def generator(*args: Any, **kwargs: Any) -> Iterator[None]:
        before = _versions(model)
        yield
        _refuse_written(model, before)

    return generator


def _versions(model: nn.Module) -> dict[str, tuple[Tensor, int]]:
    """Every buffer, and how often it has been written."""
    return {name: (buffer, writes_to(buffer)) for name, buffer in model.named_buffers()}


def _refuse_written(model: nn.Module, before: dict[str, tuple[Tensor, int]]) -> None:
    """Refuse buffers that were written since, where one process writes them once more in its backward."""
    if not torch.is_grad_enabled():
        return
    for name, (buffer, version) in _versions(model).items():
        known = before.get(name)
        if known is None or known[0] is not buffer or known[1] != version:
            raise _refused(
                f"writes the buffer {name} inside of torch.utils.checkpoint, which writes it a second time in backward",
                "no checkpoint around it: the plan says what is kept for the backward and what is computed again",
            )


def _enter_saved_tensors_hooks(self: torch.autograd.graph.saved_tensors_hooks) -> None:
    if not is_apart() and not isinstance(self, torch.autograd.graph.save_on_cpu):
        raise _refused("packs what autograd saves", "a plan that rematerialises, which keeps less")


def _exit_saved_tensors_hooks(self: torch.autograd.graph.saved_tensors_hooks, *args: object) -> None:
    pass


def _refusing(original: Callable[..., Any], what: str, remedy: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        if is_apart():
            return original(*args, **kwargs)
        raise _refused(what, remedy)

    return refuse


def _seeding(original: Callable[..., Any]) -> Callable[..., Any]:
    def seed(*args: Any, **kwargs: Any) -> Any:
        if is_library(sys._getframe(1).f_code.co_filename):  # which puts back what it found
            return original(*args, **kwargs)
        raise _refused(
            "sets the state of torch's random numbers",
            "drawing what is to be the same in every step in __init__, into a buffer",
        )

    return seed


_REFUSED: tuple[tuple[Any, str, str, str], ...] = (
    (Tensor, "backward", "runs a backward", "torch.autograd.grad with create_graph=True, or returning the loss"),
    (torch.autograd, "backward", "runs a backward", "torch.autograd.grad, or returning the loss"),
    (
        Tensor,
        "retain_grad",
        "keeps the gradient of an activation",
        "dropping retain_grad(): a plan keeps no activation",
    ),
    (
        Tensor,
        "register_post_accumulate_grad_hook",
        "registers a hook on a parameter",
        ON_PARAMETERS,
    ),
    (
        *NODE_OF_TENSOR,
        "registers a hook on several tensors, or asks for a node of autograd",
        "tensor.register_hook, which runs exactly",
    ),
    (forward_ad.dual_level, "__enter__", "uses forward-mode differentiation", "torch.func.jvp"),
    (torch.func, "linearize", "linearises a function", "torch.func.jvp"),
    (nn.Module, "register_full_backward_hook", "registers a backward hook on a module", ON_MODULES),
    (nn.Module, "register_full_backward_pre_hook", "registers a backward hook on a module", ON_MODULES),
    (nn.Module, "register_backward_hook", "registers a backward hook on a module", ON_MODULES),
)


def _refused(what: str, remedy: str) -> CaptureError:
    return CaptureError(f"the model cannot be captured: forward {what}.\n  at {user_line()}\n  try: {remedy}")
