"""From an exported graph to a functional one: no writes, no regions, no gradient switches.

torch.export's training IR keeps in-place ops, and puts ``torch.no_grad()`` blocks into subgraphs.
``run_decompositions`` would remove both, but takes longer than the export itself and forgets that no
gradient flows through a no_grad block. Here

    relu_(x)                                  relu(x), and later uses of x see it
    copy_(select(x, 0, 1), y)                 select_scatter(x, y, 0, 1)
    add_(buffer, 1)                           add(buffer, 1), recorded as the buffer's update
    wrap_with_set_grad_enabled(False, f, x)   detach(f(x))
    batch_norm(x, .., mean, var, True)        _native_batch_norm_legit_functional, which returns the updates
    again((x,), call=3, ..)                   the ops that call 3 repeats, on x (``repetition``)
    function((x,), number=2)                  the autograd function that call 2 of the recording calls

A tensor that is written is a *base*; a view of it remembers how it was made, and is made again from the
base's new value when it is next read.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from autopar.ir.autograd.recording import FUNCTION, Recorded, Recording
from autopar.ir.building import add_call, fake_call
from autopar.ir.errors import CaptureError
from autopar.ir.repetition import AGAIN, EDGE, Again
from autopar.ir.source import origin_of

aten = torch.ops.aten

# Ops that alias their input for some arguments and copy it for others.
_MAYBE_ALIAS = {
    aten.reshape.default,
    aten.contiguous.default,
    aten.flatten.using_ints,
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.device,
    aten.to.other,
    aten.view_as.default,
    aten.reshape_as.default,
    aten.type_as.default,
}


@dataclass(slots=True)
class _View:
    """How an aliasing value was made, and the version of its base that it shows."""

    base: fx.Node
    like: fx.Node
    target: Any
    rest: tuple[Any, ...]
    kwargs: dict[str, Any]
    version: int


@dataclass(slots=True)
class Functionaliser:
    """Copies an exported graph into ``graph``, node by node.

    repeats: what to run for each call of ``again``. recording: what ``function`` stands for. written: a base -> the
    first op that wrote to it.
    """

    graph: fx.Graph
    mode: FakeTensorMode
    module: torch.nn.Module
    repeats: Mapping[int, Again] = field(default_factory=dict)
    recording: Recording = field(default_factory=Recording)
    values: dict[fx.Node, Any] = field(default_factory=dict)
    views: dict[fx.Node, _View] = field(default_factory=dict)
    versions: dict[fx.Node, int] = field(default_factory=dict)
    written: dict[fx.Node, fx.Node] = field(default_factory=dict)
    writes: bool = False
    _repeated: dict[int, dict[int, Any]] = field(default_factory=dict)
    _moved: tuple[str, str] | None = None

    def run(self, source: fx.Graph, arguments: dict[fx.Node, Any]) -> Any:
        """Copy all ops of ``source``; returns the new values of its output."""
        self.values.update(arguments)
        self.writes = self.writes or _has_writes(source, self.module)
        result: Any = None
        for node in source.nodes:
            if node.op == "output":
                result = self._read(node.args[0])
            else:
                self._step(node)
        return result

    def _step(self, node: fx.Node) -> None:
        if node.op == "call_function":
            self._copy(node)
        elif node.op == "get_attr":
            self.values[node] = operator.attrgetter(str(node.target))(self.module)

    def _copy(self, node: fx.Node) -> None:
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            self._inline(node)
        elif node.target is EDGE:
            self.values[node] = self._read(node.args[0])
        elif node.target is AGAIN:
            self._repeat(node)
        elif node.target is FUNCTION:
            self._function(node)
        elif node.target is aten.batch_norm.default and node.args[5]:
            self._batch_norm(node)
        elif _writes(node):
            self._write(node)
        else:
            self._emit(node)
            if self.writes:
                self._note_alias(node)

    def _read(self, argument: Any) -> Any:
        return fx.node.map_arg(argument, self._read_node)

    def _read_node(self, node: fx.Node) -> Any:
        view = self.views.get(node)
        if view is not None and view.version != self._version(view.base):
            view.version = self._version(view.base)
            args = (self._read_node(view.base), *self._read(view.rest))
            self.values[node] = self._call(view.like, view.target, args, self._read(view.kwargs))
        return self.values[node]

    def _version(self, node: fx.Node) -> int:
        """Number of writes that a value has seen, through the chain of its bases."""
        own = self.versions.get(node, 0)
        view = self.views.get(node)
        return own if view is None else own + self._version(view.base)

    def _emit(self, node: fx.Node) -> None:
        args, kwargs = self._read(node.args), self._read(node.kwargs)
        if node.target is operator.getitem and not isinstance(args[0], fx.Node):
            self.values[node] = args[0][args[1]]  # of an inlined region
        else:
            self.values[node] = self._call(node, node.target, args, kwargs, node.meta.get("val"))

    def _call(self, like: fx.Node, target: Any, args: Any, kwargs: Any, value: Any = None) -> Any:
        if "path" not in like.meta:
            like.meta["path"], like.meta["source"] = origin_of(like)
        made = add_call(self.graph, self.mode, target, args, dict(kwargs), like=like, value=value)
        if self._moved is not None and f"{made.meta['path']}.".startswith(f"{self._moved[0]}."):
            made.meta["path"] = self._moved[1] + made.meta["path"].removeprefix(self._moved[0])
        return made

    def _note_alias(self, node: fx.Node) -> None:
        """Record that a value aliases its first operand, by its schema or, if that depends, by trying."""
        if not isinstance(node.target, torch._ops.OpOverload) or not node.args:
            return
        base = node.args[0]
        returns = node.target._schema.returns
        if not isinstance(base, fx.Node) or len(returns) != 1 or returns[0].alias_info is None:
            return
        if node.target in _MAYBE_ALIAS:
            result = fake_call(node.target, self._read(node.args), self._read(node.kwargs), self.mode)
            if result.untyped_storage()._cdata != self.values[base].meta["val"].untyped_storage()._cdata:
                return
        self.views[node] = _View(base, node, node.target, node.args[1:], dict(node.kwargs), self._version(base))

    def _write(self, node: fx.Node) -> None:
        """An in-place op: its functional twin, then the new value in the written tensor's place."""
        target = node.target
        assert isinstance(target, torch._ops.OpOverload)
        written = next(a for a, s in zip(node.args, target._schema.arguments, strict=False) if _is_write(s))
        if not isinstance(written, fx.Node) or len([s for s in target._schema.arguments if _is_write(s)]) != 1:
            raise _refused(node, "writes to several tensors at once")
        args, kwargs = self._read(node.args), self._read(node.kwargs)
        if target is aten.detach_.default:
            new = self._call(node, aten.detach.default, args, kwargs)
        elif target is aten.copy_.default:
            new = self._copied(node, *args[:2])
        elif target in (aten.zero_.default, aten.fill_.Scalar):
            filler = 0 if target is aten.zero_.default else args[1]
            new = self._call(node, aten.full_like.default, (args[0], filler), {})
        else:
            new = self._call(node, _functional_twin(node), args, kwargs)
            if new.meta["val"].dtype != args[0].meta["val"].dtype:
                new = self._call(node, aten._to_copy.default, (new,), {"dtype": args[0].meta["val"].dtype})
        self._assign(written, new, node)
        self.values[node] = new
        self.views[node] = _View(written, node, aten.alias.default, (), {}, self._version(written))

    def _copied(self, node: fx.Node, destination: fx.Node, source: Any) -> Any:
        value = destination.meta["val"]
        if not isinstance(source, fx.Node):
            return self._call(node, aten.full_like.default, (destination, source), {})
        if source.meta["val"].dtype != value.dtype:
            source = self._call(node, aten._to_copy.default, (source,), {"dtype": value.dtype})
        if source.meta["val"].shape != value.shape:
            source = self._call(node, aten.expand.default, (source, list(value.shape)), {})
        return source

    def _assign(self, node: fx.Node, new: fx.Node, write: fx.Node) -> None:
        """Make ``new`` the value of ``node`` and of the base that it views."""
        view = self.views.get(node)
        if view is not None:
            base = self._read_node(view.base)
            self._assign(view.base, self._scattered(view, base, new, write), write)
            view.version = self._version(view.base)
        else:
            self.versions[node] = self.versions.get(node, 0) + 1
            self.written.setdefault(node, write)
        self.values[node] = new

    def _scattered(self, view: _View, base: fx.Node, new: fx.Node, write: fx.Node) -> Any:
        """The base with ``new`` in the part that ``view`` shows."""
        inverse = _SCATTERS.get(view.target)
        if inverse is None:
            raise _refused(write, f"writes through a view made by {view.target}")
        target, args = inverse(base, new, self._read(view.rest))
        return self._call(write, target, args, self._read(view.kwargs)) if target is not None else new

    def _batch_norm(self, node: fx.Node) -> None:
        args = list(self._read(node.args[:8]))
        running = [a for a in node.args[3:5] if isinstance(a, fx.Node)]
        if not running:
            result = self._call(node, aten._native_batch_norm_legit.no_stats, (*args[:3], *args[5:]), {})
            self.values[node] = self._call(node, operator.getitem, (result, 0), {})
            return
        result = self._call(node, aten._native_batch_norm_legit_functional.default, tuple(args), {})
        self.values[node] = self._call(node, operator.getitem, (result, 0), {})
        for position, buffer in enumerate(running, start=3):
            self._assign(buffer, self._call(node, operator.getitem, (result, position), {}), node)

    def _repeat(self, node: fx.Node) -> None:
        """The body of a call that was followed, with what this call is given and the parameters of its own module."""
        given, number, place, _ = node.args
        assert isinstance(given, (list, tuple)) and isinstance(number, int) and isinstance(place, int)
        if number not in self._repeated:
            repeat = self.repeats[number]
            body = repeat.body
            for entry, value in enumerate(self._read(given)):
                if entry in body.entries:
                    self.values[body.entries[entry]] = value
            self._swap(repeat.twins)
            self._moved = (body.path, repeat.path)
            for inner in body.nodes:
                self._step(inner)
            results = {at: self._read(edge.args[0]) for at, edge in body.results.items()}
            self._moved = None
            self._swap(repeat.twins)
            self._repeated[number] = results
        self.values[node] = self._repeated[number][place]

    def _swap(self, pairs: Mapping[fx.Node, fx.Node]) -> None:
        """Exchange all that is known of the nodes of each pair."""
        known: tuple[dict[fx.Node, Any], ...] = (self.values, self.views, self.versions, self.written)
        for a, b in pairs.items():
            for table in known:
                of_a, of_b = table.pop(a, None), table.pop(b, None)
                table.update({node: value for node, value in ((a, of_b), (b, of_a)) if value is not None})

    def _function(self, node: fx.Node) -> None:
        """A call of an autograd function. A hook on a tensor takes its place for all that read it, before it too."""
        given, number = node.args
        assert isinstance(number, int)
        called = self.recording.calls[number]
        operands = self._read(given)
        if called.is_hook and operands[0].op == "placeholder":
            self.values[node] = operands  # a step input, whose gradient nobody asks for
            return
        if called.is_hook:
            self._hook(node, called, operands[0])
            return
        made = self._call(node, called.op, called.filled(operands), {})
        if called.op.num_results == 1:
            self.values[node] = [made]
        else:
            count = called.op.num_results
            self.values[node] = [self._call(node, operator.getitem, (made, place), {}) for place in range(count)]

    def _hook(self, node: fx.Node, called: Recorded, tensor: fx.Node) -> None:
        with self.graph.inserting_after(tensor):
            hooked = self._call(node, called.op, called.filled((tensor,)), {})
        tensor.replace_all_uses_with(hooked, delete_user_cb=lambda user: user is not hooked)
        for old, value in self.values.items():
            self.values[old] = pytree.tree_map(lambda leaf: hooked if leaf is tensor else leaf, value)
        self.values[node] = [hooked]

    def _inline(self, node: fx.Node) -> None:
        name = node.target.name()  # type: ignore[union-attr]
        regions = [a for a in node.args if isinstance(a, fx.Node) and a.op == "get_attr"]
        if name == "wrap_with_set_grad_enabled":
            enabled, region, *operands = node.args
        elif name == "wrap_with_autocast" and not node.args[2]:
            enabled, region, operands = True, node.args[4], list(node.args[5:])
        elif name == "wrap_with_autocast":
            inside = _first_op(self.values[regions[0]].graph)
            raise _refused(inside, "switches autocast on", "without it: the plan's precision takes its place")
        else:
            raise _refused(node, f"uses {name}", "plain tensor ops")
        assert isinstance(region, fx.Node)
        body = self.values[region]
        placeholders = [n for n in body.graph.nodes if n.op == "placeholder"]
        outer, self.module = self.module, body
        for inside, operand in zip(placeholders, operands, strict=True):
            if isinstance(operand, fx.Node):
                # A write inside is one to what is outside.
                self.views[inside] = _View(operand, node, aten.alias.default, (), {}, self._version(operand))
        result = self.run(body.graph, dict(zip(placeholders, self._read(operands), strict=True)))
        self.module = outer
        if not enabled:
            result = pytree.tree_map(lambda leaf: self._detached(node, leaf), result)
        self.values[node] = result

    def _detached(self, node: fx.Node, leaf: Any) -> Any:
        if not isinstance(leaf, fx.Node) or not leaf.meta["val"].dtype.is_floating_point:
            return leaf
        return self._call(leaf, aten.detach.default, (leaf,), {})


def _is_write(argument: torch._C.Argument) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _writes(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def _has_writes(graph: fx.Graph, module: torch.nn.Module) -> bool:
    """Whether any op of a graph writes, those in its regions included."""
    for node in graph.nodes:
        if node.op == "get_attr":
            region = operator.attrgetter(str(node.target))(module)
            if isinstance(region, fx.GraphModule) and _has_writes(region.graph, region):
                return True
        elif _writes(node):
            return True
    return False


def _functional_twin(node: fx.Node) -> torch._ops.OpOverload:
    """``aten.add.Tensor`` for ``aten.add_.Tensor``."""
    assert isinstance(node.target, torch._ops.OpOverload)
    namespace, name = node.target._schema.name.split("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    overload = getattr(packet, node.target._overloadname, None) if name.endswith("_") else None
    if overload is None:
        raise _refused(node, f"uses {node.target}, which writes in place and has no functional twin")
    assert isinstance(overload, torch._ops.OpOverload)
    return overload


def _first_op(graph: fx.Graph) -> fx.Node:
    first = next(node for node in graph.nodes if node.op == "call_function")
    assert isinstance(first, fx.Node)
    return first


def _refused(node: fx.Node, what: str, remedy: str = "an out-of-place version") -> CaptureError:
    path, source = origin_of(node)
    where = f"{source} (in {path})" if path else source
    return CaptureError(f"the model cannot be captured: it {what}.\n  at {where}\n  try: {remedy}")


_Inverse = Callable[[fx.Node, fx.Node, Any], tuple[Any, tuple[Any, ...]]]


def _like_base(base: fx.Node, new: fx.Node, rest: Any) -> tuple[Any, tuple[Any, ...]]:
    return aten.reshape.default, (new, list(base.meta["val"].shape))


def _same(base: fx.Node, new: fx.Node, rest: Any) -> tuple[Any, tuple[Any, ...]]:
    return None, ()


def _inverse_permute(base: fx.Node, new: fx.Node, rest: Any) -> tuple[Any, tuple[Any, ...]]:
    order = [d % len(rest[0]) for d in rest[0]]
    return aten.permute.default, (new, [order.index(d) for d in range(len(order))])


_SCATTERS: dict[Any, _Inverse] = {
    aten.alias.default: _same,
    aten.detach.default: _same,
    aten.detach_.default: _same,
    aten.contiguous.default: _same,
    aten.to.dtype: _same,
    aten.select.int: lambda base, new, rest: (aten.select_scatter.default, (base, new, *rest)),
    aten.slice.Tensor: lambda base, new, rest: (aten.slice_scatter.default, (base, new, *rest)),
    aten.view.default: _like_base,
    aten.reshape.default: _like_base,
    aten.flatten.using_ints: _like_base,
    aten.unsqueeze.default: _like_base,
    aten.squeeze.dim: _like_base,
    aten.transpose.int: lambda base, new, rest: (aten.transpose.int, (new, *rest)),
    aten.t.default: lambda base, new, rest: (aten.t.default, (new,)),
    aten.permute.default: _inverse_permute,
}
