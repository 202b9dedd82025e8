"""Transforms of functions (``torch.vmap``, ``torch.func``) inside forward, as the plain ops that they come down to.

    torch.vmap(lambda a, b: (a * b).sum())(h, x)        mul(h, x), sum(.., [1])

The transformed call is traced on its own, below autograd and below the transforms, and what was found runs in the
trace of the model. Tensors that the function closes over (parameters, activations) are constants of the inner trace and
themselves in the outer one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from autopar.ir.autograd.plain import traced
from autopar.ir.autograd.recording import current_recording
from autopar.ir.autograd.replacing import replaced
from autopar.ir.autograd.trial import apart
from autopar.ir.errors import CaptureError
from autopar.ir.source import user_line
from autopar.ir.torch_private import CALL_FUNCTION, GRAD, GRAD_AND_VALUE, JVP, VJP, VMAP, FakeTensor, pytree


@dataclass(slots=True)
class _Inner:
    """What a transformed function did. differentiates: took derivatives. switches: switched gradients off. functions:
    the autograd functions that it called.
    """

    differentiates: bool = False
    detaches: bool = False
    switches: bool = False
    functions: list[type[torch.autograd.Function]] = field(default_factory=list)


_inner: ContextVar[_Inner | None] = ContextVar("autopar the transformed call that is traced", default=None)


@contextmanager
def transforms_made_plain() -> Iterator[None]:
    """Within, calls of transformed functions run as plain ops."""
    with ExitStack() as stack:

        def replace(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(replaced(owner, name, value))

        replace(*VMAP, _plain(_whole(VMAP.original), differentiates=False))
        for entry in (GRAD, GRAD_AND_VALUE, JVP):
            replace(*entry, _plain(entry.original))
        replace(*VJP, _vjp(VJP.original))
        replace(*CALL_FUNCTION, _without_backward(CALL_FUNCTION.original))
        replace(Tensor, "detach", _noting("detaches", Tensor.detach))
        replace(torch.no_grad, "__enter__", _noting("switches", torch.no_grad.__enter__))
        yield


def _whole(original: Callable[..., Any]) -> Callable[..., Any]:
    """vmap of all at once: chunks save memory, which the plan sees to, and would cut across the rows of ranks."""

    def whole(
        func: Any, in_dims: Any, out_dims: Any, randomness: str, chunk_size: Any, *args: Any, **kwargs: Any
    ) -> Any:
        return original(func, in_dims, out_dims, randomness, None, *args, **kwargs)

    return whole


def _plain(original: Callable[..., Any], *, differentiates: bool = True) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        inner = _inner.get()
        if inner is not None:
            inner.differentiates |= differentiates
            return original(*args, **kwargs)
        return plain_ops(original, args, kwargs, differentiates=differentiates)

    return run


def _vjp(original: Callable[..., Any]) -> Callable[..., Any]:
    """The value now; each call of the function that takes cotangents runs forward and backward again."""

    def vjp(func: Callable[..., Any], *primals: Any, argnums: Any = None, has_aux: bool = False) -> Any:
        inner = _inner.get()
        if inner is not None:
            inner.differentiates = True
            return original(func, *primals, argnums=argnums, has_aux=has_aux)

        def pull(*cotangents: Any, **options: Any) -> Any:
            def both(primals: Any, cotangents: Any) -> Any:
                return original(func, *primals, argnums=argnums, has_aux=has_aux)[1](*cotangents, **options)

            if (inner := _inner.get()) is not None:
                inner.differentiates = True
                return both(primals, cotangents)
            return plain_ops(both, (primals, cotangents), {}, differentiates=True)

        value = func(*primals)
        return (value[0], pull, value[1]) if has_aux else (value, pull)

    return vjp


def _noting(what: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*args: Any, **kwargs: Any) -> Any:
        inner = _inner.get()
        if inner is not None:
            setattr(inner, what, True)
        return original(*args, **kwargs)

    return noted


def _without_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    """The ops of its forward are all that an inner trace would hold of an autograd function."""

    def call(function: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        inner = _inner.get()
        if inner is not None and not function.__module__.startswith("torch."):
            inner.functions.append(function)
        return original(function, *args, **kwargs)

    return call


def plain_ops(function: Callable[..., Any], args: Any, kwargs: Any, *, differentiates: bool) -> Any:
    """``function(*args, **kwargs)`` by ops that no transform has a part in.

    Raises CaptureError where the transformed function cuts gradients off in a way that the ops do not tell.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    inner = _Inner(differentiates=differentiates)
    out_spec: list[pytree.TreeSpec] = []
    others: list[Any] = []

    def flat(*tensors: Tensor) -> list[Tensor]:
        given = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            given[place] = tensor
        own_args, own_kwargs = pytree.tree_unflatten(given, spec)
        found, found_spec = pytree.tree_flatten(function(*own_args, **own_kwargs))
        out_spec.append(found_spec)
        others.extend(None if isinstance(leaf, Tensor) else (leaf,) for leaf in found)
        return [leaf for leaf in found if isinstance(leaf, Tensor)]

    tensors = [leaves[place] for place in places]
    with apart(), _mode_of(tensors):
        values = [tensor.detach() for tensor in tensors]
        token = _inner.set(inner)
        try:
            module = traced(flat, values)
        finally:
            _inner.reset(token)
    if torch.is_grad_enabled() and (inner.switches or (inner.detaches and inner.differentiates)):
        raise CaptureError(
            "the model cannot be captured: a function that torch.func or vmap transforms detaches a tensor or runs "
            f"under no_grad.\n  at {user_line()}\n  try: detaching outside of it and passing the tensor"
        )
    if torch.is_grad_enabled() and inner.functions:
        raise CaptureError(
            f"the model cannot be captured: the autograd function {inner.functions[0].__name__} is called in what "
            f"torch.func or vmap transforms, where its backward is lost.\n  at {user_line()}\n"
            "  try: calling it outside of vmap, on all samples at once, or plain ops in its place"
        )
    current_recording().differentiates |= inner.differentiates
    replay = _Replay(module) if inner.differentiates else fx.Interpreter(module)
    supply = iter(replay.run(*tensors))
    return pytree.tree_unflatten([next(supply) if other is None else other[0] for other in others], out_spec[0])


class _Replay(fx.Interpreter):
    """Runs the ops of an inner trace in the outer one. What autograd detached to keep it is not detached."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.aten.detach.default:
            return args[0]
        return super().call_function(target, args, kwargs)


@contextmanager
def _mode_of(tensors: list[Tensor]) -> Iterator[None]:
    fake = next((tensor for tensor in tensors if isinstance(tensor, FakeTensor)), None)
    if fake is None:
        yield
    else:
        with fake.fake_mode:
            yield
