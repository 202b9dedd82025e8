"""From an exported graph to a functional one: no writes, no regions, no gradient switches.

torch.export's training IR keeps in-place ops, and puts ``torch.no_grad()`` blocks into subgraphs.
``run_decompositions`` would remove both, but takes longer than the export itself and forgets that no
gradient flows through a no_grad block. Here

    relu_(x)                                  relu(x), and later uses of x see it
    copy_(select(x, 0, 1), y)                 select_scatter(x, y, 0, 1)
    add_(buffer, 1)                           add(buffer, 1), recorded as the buffer's update
    wrap_with_set_grad_enabled(False, f, x)   detach(f(x))
    batch_norm(x, .., mean, var, True)        _native_batch_norm_legit_functional, which returns the updates
    instance_norm(x, .., mean, var, True)     instance_norm(x, ..), and the updates made of mean(x) and var(x)
    again((x,), call=3, ..)                   the ops that call 3 repeats, on x (``repeated_modules``)
    function((x,), number=2)                  the autograd function that call 2 of the recording calls
    derivative((y,), (x,), ..)                the ops of the derivative of y by x (``autograd.derivatives``)
    steps((y,), (slot(x),), ..)               one op, a scan whose body is between x and y (``autograd.scans``)

A tensor that is written is a *base*; a view remembers how it was made, and is made anew of the base when it is read.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.ir.analysis.gradient_paths import carries_gradient
from autopar.ir.autograd.derivatives import DERIVATIVE, Derivative
from autopar.ir.autograd.function_op import below_hooks, is_hook
from autopar.ir.autograd.recording import FUNCTION, Recorded, Recording
from autopar.ir.autograd.scans import SLOT, STEPS, scan_op, writes_outside
from autopar.ir.building import add_call, fake_call, shape_of
from autopar.ir.capture.functional_twins import functional_twin, has_writes, writes, written
from autopar.ir.capture.noted_value import noted_value
from autopar.ir.capture.repeated_modules import EDGE, REPEATED_CALL, RepeatedCall
from autopar.ir.capture.strided_views import strided_view
from autopar.ir.capture.symbols import number_of
from autopar.ir.capture.view_writes import piece, written_base
from autopar.ir.errors import CaptureError
from autopar.ir.graph import has_gradient_dtype
from autopar.ir.source import origin_of
from autopar.ir.torch_private import (
    BATCH_NORM_OF_BATCH,
    BATCH_NORM_WITH_STATISTICS,
    TO_COPY,
    FakeTensorMode,
    HigherOrderOperator,
    OpOverload,
    pytree,
    schema_of,
    storage_of,
)
from autopar.ir.torch_private_symbols import is_symbolic

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

    repeats: what to run for each call of ``again``. recording: what ``function`` stands for. trained: placeholders of
    ``graph`` that require a gradient. written: a base -> the first op that wrote to it.
    """

    graph: fx.Graph
    mode: FakeTensorMode
    module: torch.nn.Module
    repeats: Mapping[int, RepeatedCall] = field(default_factory=dict)
    recording: Recording = field(default_factory=Recording)
    values: dict[fx.Node, Any] = field(default_factory=dict)
    views: dict[fx.Node, _View] = field(default_factory=dict)
    versions: dict[fx.Node, int] = field(default_factory=dict)
    written: dict[fx.Node, fx.Node] = field(default_factory=dict)
    trained: frozenset[fx.Node] = frozenset()
    writes: bool = False
    # Inside a region without gradients; what was computed in one; what regions returned, and whether without gradients.
    _frozen: bool = False
    _without_gradient: set[fx.Node] = field(default_factory=set)
    _returned: dict[fx.Node, tuple[Any, bool]] = field(default_factory=dict)
    _repeated: dict[int, dict[int, Any]] = field(default_factory=dict)
    _moved: tuple[str, str] | None = None
    # What a step of a scan is given, and the writes before it.
    _slots: dict[fx.Node, tuple[fx.Node, dict[fx.Node, int]]] = field(default_factory=dict)

    def run(self, source: fx.Graph, arguments: dict[fx.Node, Any]) -> Any:
        """Copy all ops of ``source``; returns the new values of its output."""
        self.values.update(arguments)
        self.writes = self.writes or has_writes(source, self.module)
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
        if isinstance(node.target, HigherOrderOperator):
            self._inline(node)
        elif node.target is EDGE:
            self.values[node] = self._read(node.args[0])
            self._note_view(node, node.args[0], aten.alias.default)
        elif node.target is REPEATED_CALL:
            self._repeat(node)
        elif node.target is FUNCTION:
            self._function(node)
        elif node.target is DERIVATIVE:
            self._derivative(node)
        elif node.target is SLOT:
            self._emit(node)
            self._slots[node] = self.values[node], dict(self.versions)
        elif node.target is STEPS:
            self._scan(node)
        elif node.target is aten.batch_norm.default and node.args[5]:
            self._batch_norm(node)
        elif node.target is aten.instance_norm.default and node.args[5] and node.args[3] is not None:
            self._instance_norm(node)
        elif writes(node):
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
        if self._frozen:
            self._without_gradient.add(node)
        if is_symbolic(node.meta.get("val")):
            self.values[node] = number_of(node.meta["val"])  # a size
        elif node.target is operator.getitem and not isinstance(args[0], fx.Node):
            self.values[node] = args[0][args[1]]  # of an inlined region
        else:
            self.values[node] = self._call(node, node.target, args, kwargs, noted_value(node))

    def _call(self, like: fx.Node, target: Any, args: Any, kwargs: Any, value: Any = None) -> Any:
        if target is aten.as_strided.default:
            return strided_view(like, args[0], lambda op, operands: self._call(like, op, operands, {}))
        if "path" not in like.meta:
            like.meta["path"], like.meta["source"] = origin_of(like)
        made = add_call(self.graph, self.mode, target, args, dict(kwargs), like=like, value=value)
        if self._moved is not None and f"{made.meta['path']}.".startswith(f"{self._moved[0]}."):
            made.meta["path"] = self._moved[1] + made.meta["path"].removeprefix(self._moved[0])
        return made

    def _note_alias(self, node: fx.Node) -> None:
        """Record that a value aliases an operand, by the schema of its op or, where that is silent, its storage."""
        if node.target is operator.getitem:
            self._note_piece(node)
            return
        if not isinstance(node.target, OpOverload) or not node.args:
            return
        base = node.args[0]
        returns = schema_of(node.target).returns
        if not isinstance(base, fx.Node) or len(returns) != 1 or not isinstance(self.values[node], fx.Node):
            return
        if node.target is aten.lift_fresh_copy.default:
            return  # a copy, which only in a trace is the constant itself
        if node.target in _MAYBE_ALIAS:
            result = fake_call(node.target, self._read(node.args), self._read(node.kwargs), self.mode)
            if not _share(result, self.values[base].meta["val"]):
                return
        elif returns[0].alias_info is None and not _share(node.meta.get("val"), base.meta.get("val")):
            return
        self._note_view(node, base, node.target, node.args[1:], dict(node.kwargs))

    def _note_piece(self, node: fx.Node) -> None:
        """One of several results: of a region, or of an op that makes several views at once."""
        producer, index = node.args
        assert isinstance(producer, fx.Node) and isinstance(index, int)
        if producer in self._returned:
            inside, frozen = self._returned[producer]
            self._note_view(node, inside[index], aten.detach.default if frozen else aten.alias.default)
        elif (found := piece(node)) is not None:
            self._note_view(node, producer.args[0], *found)

    def _note_view(self, node: fx.Node, base: Any, target: Any, rest: Any = (), kwargs: Any = None) -> None:
        if self.writes and isinstance(base, fx.Node):
            self.views[node] = _View(base, node, target, tuple(rest), kwargs or {}, self._version(base))

    def _write(self, node: fx.Node) -> None:
        """An op that writes: its functional twin, then the new values in the place of the written tensors."""
        target = node.target
        assert isinstance(target, OpOverload)
        places = written(node)
        args, kwargs = self._read(node.args), self._read(node.kwargs)
        if target is aten.copy_.default:
            made = self._copied(node, *args[:2])
        elif target in (aten.zero_.default, aten.fill_.Scalar):
            made = self._call(node, aten.full_like.default, (args[0], 0 if len(args) == 1 else args[1]), {})
        elif (twin := functional_twin(target)) is not None:
            names = {a.name for a in schema_of(twin).arguments}
            made = self._call(node, twin, args, {name: value for name, value in kwargs.items() if name in names})
        else:
            raise _refused(node, f"uses {target}, which writes in place and has no functional twin")
        if len(places) == 1:
            self._written(node, places[0], made)
            self.values[node] = self.values[places[0]]
            self.views[node] = _View(places[0], node, aten.alias.default, (), {}, self._version(places[0]))
        else:
            for number, place in enumerate(places):
                self._written(node, place, self._call(node, operator.getitem, (made, number), {}))
            self.values[node] = tuple(self.values[place] for place in places)

    def _written(self, node: fx.Node, place: fx.Node, new: fx.Node) -> None:
        """Make ``new`` the value of what ``place`` stands for, in its dtype."""
        old = self._read_node(place).meta["val"]
        assert isinstance(node.target, OpOverload), "an op that writes"
        if new.meta["val"].shape != old.shape and schema_of(node.target).arguments[-1].name == "out":
            raise _refused(node, f"resizes a tensor of shape {tuple(old.shape)} to {tuple(new.meta['val'].shape)}")
        if new.meta["val"].dtype != old.dtype:
            new = self._call(node, TO_COPY, (new,), {"dtype": old.dtype})
        self._assign(place, self._detached(node, new) if self._frozen else new, node, hidden=self._frozen)

    def _copied(self, node: fx.Node, destination: fx.Node, source: Any) -> Any:
        value = destination.meta["val"]
        if not isinstance(source, fx.Node):
            return self._call(node, aten.full_like.default, (destination, source), {})
        if source.meta["val"].dtype != value.dtype:
            source = self._call(node, TO_COPY, (source,), {"dtype": value.dtype})
        if source.meta["val"].shape != value.shape:
            source = self._call(node, aten.expand.default, (source, list(shape_of(destination))), {})
        return source

    def _assign(self, node: fx.Node, new: fx.Node, write: fx.Node, *, hidden: bool = False) -> None:
        """Make ``new`` the value of ``node`` and of the base that it views. hidden: autograd does not see the write."""
        view = self.views.get(node)
        if view is not None:
            base = self._read_node(view.base)
            hidden = hidden or view.target in (aten.detach.default, aten.detach_.default)
            self._assign(view.base, self._scattered(view, base, new, write), write, hidden=hidden)
            view.version = self._version(view.base)
        else:
            old = self.values[node]
            inner = hidden and node not in self._without_gradient and old.op != "placeholder"
            if inner and carries_gradient(old, self.trained):
                raise _refused(write, "changes a tensor whose gradient is needed where autograd does not see it")
            self.versions[node] = self.versions.get(node, 0) + 1
            self.written.setdefault(node, write)
        self.values[node] = new

    def _scattered(self, view: _View, base: fx.Node, new: fx.Node, write: fx.Node) -> Any:
        """The base with ``new`` in the part that ``view`` shows."""
        found = written_base(view.target, base, new, self._read(view.rest))
        if found is None:
            raise _refused(write, f"writes through a view made by {view.target}")
        target, args = found
        return self._call(write, target, args, self._read(view.kwargs)) if target is not None else new

    def _batch_norm(self, node: fx.Node) -> None:
        args = list(self._read(node.args[:8]))
        running = [a for a in node.args[3:5] if isinstance(a, fx.Node)]
        if not running:
            result = self._call(node, BATCH_NORM_OF_BATCH, (*args[:3], *args[5:]), {})
            self.values[node] = self._call(node, operator.getitem, (result, 0), {})
            return
        result = self._call(node, BATCH_NORM_WITH_STATISTICS, tuple(args), {})
        self.values[node] = self._call(node, operator.getitem, (result, 0), {})
        for position, buffer in enumerate(running, start=3):
            self._assign(buffer, self._call(node, operator.getitem, (result, position), {}), node)

    def _instance_norm(self, node: fx.Node) -> None:
        """Its running statistics are the means over the batch of those of each sample."""
        args = list(self._read(node.args))
        x, momentum = args[0], args[6]
        self.values[node] = self._call(node, node.target, (*args[:3], None, None, *args[5:]), {})
        inside = list(range(2, x.meta["val"].ndim))
        mean = self._call(node, aten.mean.dim, (x, inside), {})
        variance = self._call(node, aten.var.correction, (x, inside), {"correction": 1})
        for place, statistic in zip(node.args[3:5], (mean, variance), strict=True):
            assert isinstance(place, fx.Node)
            new = self._call(node, aten.detach.default, (self._call(node, aten.mean.dim, (statistic, [0]), {}),), {})
            old = self._call(node, aten.mul.Tensor, (self._read_node(place), 1 - momentum), {})
            self._written(node, place, self._call(node, aten.add.Tensor, (old, new), {"alpha": momentum}))

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
        if is_hook(called.op) and operands[0].op == "placeholder":
            self.values[node] = operands  # a step input, whose gradient nobody asks for
            return
        if is_hook(called.op):
            self._hook(node, called, operands[0])
            return
        made = self._call(node, called.op, called.filled(operands), {})
        if called.op.num_results == 1:
            self.values[node] = [made]
        else:
            count = called.op.num_results
            self.values[node] = [self._call(node, operator.getitem, (made, place), {}) for place in range(count)]

    def _hook(self, node: fx.Node, called: Recorded, tensor: fx.Node) -> None:
        tensor = below_hooks(tensor)  # the earlier of two hooks gets the gradient first
        with self.graph.inserting_after(tensor):
            hooked = self._call(node, called.op, called.filled((tensor,)), {})
        tensor.replace_all_uses_with(hooked, delete_user_cb=lambda user: user is not hooked)
        for old, value in self.values.items():
            self.values[old] = pytree.tree_map(lambda leaf: hooked if leaf is tensor else leaf, value)
        self.values[node] = [hooked]

    def _derivative(self, node: fx.Node) -> None:
        outputs, inputs, grads, create = self._read(node.args)
        derivative = Derivative(
            outputs=outputs,
            inputs=[below_hooks(tensor) for tensor in inputs],  # what autograd gives has been through its hooks
            grads=grads,
            create=create,
            refuse=lambda what, remedy: _refused(node, what, remedy),
        )
        self.values[node] = derivative.emit(lambda target, args, kwargs: self._call(node, target, args, kwargs))

    def _scan(self, node: fx.Node) -> None:
        outs, slots, *others = node.args
        places = [slot for slot in slots if isinstance(slot, fx.Node)]  # type: ignore[union-attr]  # a list of them
        if writes_outside(places[0], self._slots[places[0]][1], self.versions):
            raise _refused(node, "scans with a step that writes to a tensor outside of it", "a state of the scan")
        steps = (self._read(outs), [self._slots[slot][0] for slot in places], *self._read(others))
        self.values[node] = scan_op(node, steps, lambda target, args: self._call(node, target, args, {}))

    def _inline(self, node: fx.Node) -> None:
        name = node.target.name()  # type: ignore[union-attr]
        regions = [a for a in node.args if isinstance(a, fx.Node) and a.op == "get_attr"]
        if name == "wrap_with_set_grad_enabled":
            enabled, region, *operands = node.args
        elif name == "wrap_with_autocast" and not node.args[2]:
            enabled, region, operands = True, node.args[4], list(node.args[5:])
        elif name == "wrap_with_autocast":
            inside = next(n for n in self.values[regions[0]].graph.nodes if n.op == "call_function")
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
                self._note_view(inside, operand, aten.alias.default)
        around, self._frozen = self._frozen, not enabled
        result = self.run(body.graph, dict(zip(placeholders, self._read(operands), strict=True)))
        self.module, self._frozen = outer, around
        self._returned[node] = (body.graph.output_node().args[0], not enabled)
        if not enabled:
            result = pytree.tree_map(lambda leaf: self._detached(node, leaf), result)
        self.values[node] = result

    def _detached(self, node: fx.Node, leaf: Any) -> Any:
        if not isinstance(leaf, fx.Node) or not has_gradient_dtype(leaf.meta["val"]):
            return leaf
        return self._call(leaf, aten.detach.default, (leaf,), {})


def _share(x: Any, y: Any) -> bool:
    """Whether two fake tensors have one storage."""
    return isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) and storage_of(x) == storage_of(y)


def _refused(node: fx.Node, what: str, remedy: str = "an out-of-place version") -> CaptureError:
    path, source = origin_of(node)
    where = f"{source} (in {path})" if path else source
    return CaptureError(f"the model cannot be captured: it {what}.\n  at {where}\n  try: {remedy}")
