"""A run of an autograd function on fake tensors of its own, forward and backward, apart from any trace.

It tells shapes, which results have gradients and which arguments are written, and finds what cannot be one op: a
function that reads tensors it is not given (a parameter of a module that it holds), or keeps something of a call.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from autopar.ir.autograd.function_op import FunctionOp, Hooked, number_like, separated, without_log
from autopar.ir.capture.fake_twins import fake_like
from autopar.ir.capture.module_equality import plain
from autopar.ir.errors import CaptureError
from autopar.ir.source import line_of_code, user_line
from autopar.ir.torch_private import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    no_functions_of_traces,
    no_modes,
    pytree,
    writes_to,
)

# Elements of all tensors up to which a function that cannot run on fake tensors is run on numbers.
_MAX_ELEMENTS = 1 << 24

_gradients = torch.autograd.grad


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Findings of a trial run. template: (is a tensor, otherwise what) of every flat result. written: result -> the
    argument that it is, written in place. without_gradient: results that are constants to autograd. unreached:
    arguments to which backward gives None.
    """

    op: FunctionOp
    arguments: tuple[Any, ...]
    results: tuple[Tensor, ...]
    template: tuple[tuple[bool, Any], ...]
    out_spec: pytree.TreeSpec
    written: Mapping[int, int]
    without_gradient: frozenset[int]
    unreached: frozenset[int]


_apart: ContextVar[bool] = ContextVar("autopar apart from the trace", default=False)


@contextmanager
def apart() -> Iterator[None]:
    """Within, nothing is traced."""
    token = _apart.set(True)
    try:
        with no_modes(), no_functions_of_traces():
            yield
    finally:
        _apart.reset(token)


def is_apart() -> bool:
    """Whether ops that run are apart from the trace."""
    return _apart.get()


class _Watch(TorchDispatchMode):
    """Sees every op of a run."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self.mode = mode
        self.draws = False
        self.foreign: Tensor | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in pytree.tree_leaves((args, kwargs)):
            foreign = isinstance(leaf, FakeTensor) and leaf.fake_mode is not self.mode
            # A parameter itself, of the model that was captured or another: its value here will not be trained.
            if foreign or (isinstance(leaf, torch.nn.Parameter) and not isinstance(leaf, FakeTensor)):
                self.foreign = leaf
                raise RuntimeError("a tensor of the model")
        self.draws |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def try_function(function: type[torch.autograd.Function], leaves: Sequence[Any], spec: pytree.TreeSpec) -> Trial:
    """Run ``function`` on shapes like ``leaves``. Raises CaptureError if it cannot be one op."""
    size = sum(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor))
    before = _state(function, leaves)
    try:
        trial = _run(function, leaves, spec, by_value=False)
    except CaptureError:
        raise
    except Exception as error:  # whatever the user's code raises
        if size > _MAX_ELEMENTS:
            raise _refused(function, f"cannot run on shapes alone: {_first_line(error)}", _SHAPES) from error
        try:
            trial = _run(function, leaves, spec, by_value=True)
        except CaptureError:
            raise
        except Exception as second:  # as above
            raise _refused(function, f"cannot run on shapes alone: {_first_line(error)}", _SHAPES) from second
    if _state(function, leaves) != before:
        raise _refused(
            function,
            "keeps something of a call in its attributes or in what it closes over, which a plan would run in parts",
            "a function of its arguments alone",
        )
    return trial


_SHAPES = "torch ops on its tensors, without .item(), .tolist() or .numpy()"


def _run(
    function: type[torch.autograd.Function], leaves: Sequence[Any], spec: pytree.TreeSpec, *, by_value: bool
) -> Trial:
    with apart(), without_log(), torch.enable_grad():
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        watch = _Watch(mode)
        own: dict[int, Tensor] = {}
        given = list(leaves)
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                own[place] = number_like(leaf) if by_value else fake_like(leaf, mode)
                own[place].requires_grad_(leaf.requires_grad)
        flops = FlopCounterMode(display=False)
        try:
            with _Modes([] if by_value else [mode], watch):
                for place, leaf in own.items():
                    # No leaf of autograd, so that it may be written.
                    given[place] = leaf.clone() if leaf.requires_grad else leaf
                versions = {place: writes_to(given[place]) for place in own}
                with flops:
                    result = function.apply(*pytree.tree_unflatten(given, spec))  # type: ignore[no-untyped-call]
                draws, watch.draws = watch.draws, False
                flat, out_spec = pytree.tree_flatten(result)
                tensors = [leaf for leaf in flat if isinstance(leaf, Tensor)]
                unreached = _backward(function, tensors, {p: t for p, t in own.items() if t.requires_grad})
        except RuntimeError as error:
            if watch.foreign is None:
                raise
            raise _foreign(function, watch.foreign) from error
        if watch.draws:
            raise _refused(
                function,
                "draws random numbers in its backward, which would differ between ranks",
                "drawing them in forward and keeping them in ctx",
            )
        touched = [place for place in own if writes_to(given[place]) != versions[place]]
        written = {n: place for n, t in enumerate(tensors) for place in touched if t is given[place]}
        if set(touched) != set(written.values()):
            raise _refused(function, "writes to an argument in place without ctx.mark_dirty", "returning a new tensor")
        if not tensors:
            raise _refused(function, "returns no tensor", "an ordinary function")
        arguments, objects = separated(leaves)
        op = FunctionOp(
            function=function,
            spec=spec,
            objects=objects,
            num_results=len(tensors),
            written=frozenset(written.values()),
            by_value=by_value,
            draws=draws,
            flops=float(flops.get_total_flops()),
        )
        return Trial(
            op=op,
            arguments=arguments,
            results=tuple(
                torch.empty_strided(tuple(t.shape), t.stride(), dtype=t.dtype, device="meta") for t in tensors
            ),
            template=tuple((isinstance(leaf, Tensor), None if isinstance(leaf, Tensor) else leaf) for leaf in flat),
            out_spec=out_spec,
            written=written,
            without_gradient=frozenset(
                n for n, t in enumerate(tensors) if not t.requires_grad and t.dtype.is_floating_point
            ),
            unreached=unreached,
        )


@contextmanager
def _Modes(modes: Sequence[Any], watch: _Watch) -> Iterator[None]:
    if modes:
        with modes[0], watch:
            yield
    else:
        with watch:
            yield


def _backward(
    function: type[torch.autograd.Function], results: Sequence[Tensor], given: Mapping[int, Tensor]
) -> frozenset[int]:
    """Runs the backward; the places of ``given`` to which it gives None."""
    flowing = [t for t in results if t.requires_grad]
    if not flowing or not given:
        return frozenset()
    found = _gradients(flowing, tuple(given.values()), [torch.ones_like(t) for t in flowing], allow_unused=True)
    if function is Hooked and found[0] is None:
        raise _refused(
            function,
            "returns nothing: what it does with a gradient, every rank would do with its part",
            "a hook that returns the new gradient, or dropping it",
        )
    return frozenset(place for place, gradient in zip(given, found, strict=True) if gradient is None)


def _state(function: type[torch.autograd.Function], leaves: Sequence[Any]) -> Hashable:
    """What a function could keep of a call: attributes of its class and of its objects, and what they close over."""
    found: list[Hashable] = [_plain_dict(vars(function))]
    for value in (*vars(function).values(), *leaves):
        value = getattr(value, "__func__", value) if isinstance(value, staticmethod) else value
        if isinstance(value, (Tensor, type)):
            continue
        owners = (value, getattr(value, "__self__", None))
        found += [_plain_dict(vars(o)) for o in owners if hasattr(o, "__dict__") and not isinstance(o, type)]
        found += map(_cell, getattr(value, "__closure__", None) or ())
    return tuple(found)


def _cell(cell: Any) -> Hashable:
    try:
        value = cell.cell_contents
    except ValueError:  # empty
        return None
    own = _plain_dict(vars(value)) if hasattr(value, "__dict__") and not isinstance(value, (type, Tensor)) else None
    return (plain(value), own)


def _plain_dict(values: Mapping[str, Any]) -> Hashable:
    return tuple((name, plain(value)) for name, value in values.items())


def _foreign(function: type[torch.autograd.Function], tensor: Tensor) -> CaptureError:
    if function is Hooked:
        what, remedy = "besides the gradient", "a torch.autograd.Function that is given it as an argument"
    else:
        what = "that is not among its arguments"
        remedy = "passing it to apply, so that its gradient is summed with those of the other ranks"
    return _refused(function, f"reads a tensor of the model of shape {tuple(tensor.shape)} {what}", remedy)


def _refused(function: type[torch.autograd.Function], what: str, remedy: str) -> CaptureError:
    if function is Hooked:
        return CaptureError(
            f"the model cannot be captured: a gradient hook {what}.\n  at {user_line()}\n  try: {remedy}"
        )
    return CaptureError(
        f"the model cannot be captured: the autograd function {function.__name__} {what}.\n  at {user_line()}\n"
        f"  forward: {line_of_code(function.forward)}\n  try: {remedy}"
    )


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"
