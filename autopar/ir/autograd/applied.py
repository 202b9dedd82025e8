"""Calls of autograd functions, whoever holds the ``apply`` and since when: ``reverse = Reverse.apply`` as well.

    torch 2.13    cls.apply, from wherever -> the apply of its base        replaced
    torch 2.14    cls.apply, native -> cls.setup_context, cls.forward      properties of the metaclass, which come first

A native ``apply`` begins by looking up ``setup_context``, and runs as the forward what it finds under that name,
without gradients and with the context that backward will be given.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionMeta

from autopar.ir.autograd.replacing import replaced
from autopar.ir.torch_private import APPLY_FUNCTION, apply_is_native, made_context_of, no_torch_functions, pytree

Function = type[torch.autograd.Function]
# (function, its arguments, what runs it as torch would) -> its results.
Handler = Callable[[Function, tuple[Any, ...], Callable[[], Any]], Any]


@contextmanager
def functions_handled(handle: Handler) -> Iterator[None]:
    """Within, ``handle`` answers every call of an autograd function, under the grad mode of the call."""
    with ExitStack() as stack:
        if apply_is_native():
            for name, value in _lookups(handle).items():
                stack.enter_context(replaced(FunctionMeta, name, value))
        else:
            stack.enter_context(replaced(*APPLY_FUNCTION, classmethod(_apply(handle))))
        yield


def _apply(handle: Handler) -> Callable[..., Any]:
    def apply(cls: Function, *args: Any) -> Any:
        return handle(cls, args, lambda: super(APPLY_FUNCTION.owner, cls).apply(*args))  # type: ignore[misc]

    return apply


def _lookups(handle: Handler) -> dict[str, property]:
    """Name -> what a class has under it."""
    grad_modes: dict[Function, bool] = {}

    def setup_context(cls: Function) -> Any:
        grad_modes[cls] = torch.is_grad_enabled()
        return _own(cls, "setup_context")[1]

    def forward(cls: Function) -> Any:
        own = _own(cls, "forward")[1]
        takes_context = _own(cls, "setup_context")[0] in torch.autograd.Function.__mro__

        @functools.wraps(own)
        def run(*args: Any) -> Any:
            if takes_context and not made_context_of(args[0], cls):
                return own(*args)  # called by the forward of another function
            return _handled(handle, cls, own, args, takes_context, grad_modes.get(cls, False))

        return run

    return {"setup_context": property(setup_context), "forward": property(forward)}


def _handled(
    handle: Handler, cls: Function, own: Callable[..., Any], args: tuple[Any, ...], takes_context: bool, grad_mode: bool
) -> Any:
    is_own = False

    def as_torch() -> Any:
        nonlocal is_own
        is_own = True
        with _grad_mode(False):
            return own(*args)

    with _grad_mode(grad_mode):
        result = handle(cls, args[1:] if takes_context else args, as_torch)
    if takes_context and not is_own:
        # What the forward would have said of its results.
        made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        given = {id(arg) for arg in args}
        args[0].mark_dirty(*(tensor for tensor in made if id(tensor) in given))
        args[0].mark_non_differentiable(*(t for t in made if not t.requires_grad and id(t) not in given))
    return result


@contextmanager
def _grad_mode(enabled: bool) -> Iterator[None]:
    """Within, gradients are on or off, of which a trace that goes on takes no note."""
    before = torch.is_grad_enabled()
    with no_torch_functions():
        torch.set_grad_enabled(enabled)
    try:
        yield
    finally:
        with no_torch_functions():
            torch.set_grad_enabled(before)


def _own(cls: Function, name: str) -> tuple[type, Any]:
    """The class that has ``name``, and what ``cls`` has under it, past the metaclass."""
    owner = next(base for base in cls.__mro__ if name in vars(base))
    return owner, vars(owner)[name].__get__(None, cls)
