"""Modules that are alike are traced a few times, however many there are.

    for layer in self.layers:          80 layers, ``module_equality``
        x = layer(x, mask)

torch.export follows the first two calls and those of the last module. Every other call is one op for each result

    x_3 = again((x_2, mask), call=3, position=0, like=x_1)

in whose place functionalisation puts the ops of the second call, with the parameters of ``layers.3``. All that is
outside of the modules is traced for every call, as it is, so the captured graph is the same as without this, provided
that the calls that were followed run the same ops, read nothing but parameters and what they are given, and hand on
nothing but their results. ``Repetition.resolve`` checks it. Where it is not so, NotAlike is raised, and the model is
traced whole.

What a followed call is given, and what it returns, goes through the op ``edge``: the edges enclose its body.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopar.ir.capture.module_equality import Group, groups_alike, is_plain, plain, shape_key, state_of
from autopar.ir.torch_private import pytree, storage_of, writes_to
from autopar.ir.torch_private_symbols import expression_of_symbol, is_symbolic

# With fewer modules alike there is nothing to save.
_AT_LEAST = 4


# What Python itself does with every object.
_ALLOWED = frozenset(
    ("__class__", "__new__", "__init__", "__init_subclass__", "__subclasshook__", "__doc__", "__getattribute__")
    + ("__setattr__", "__delattr__", "__dir__", "__sizeof__", "__getstate__")
)


class NotAlike(Exception):
    """Modules that look alike do not run alike."""


def _refuse(self: object, *args: object) -> Any:
    raise NotAlike("modules that look alike make use of their number")


# In place of an integer that counts modules: it may be handed around, but nothing may come of it. It is no integer
# itself, or ``table[count]`` would go unnoticed.
_COUNT = type(
    "Count",
    (),
    {name: _refuse for name in (*vars(int), *vars(object)) if name.startswith("__") and name not in _ALLOWED},
)()


@torch.library.custom_op("autopar::edge", mutates_args=())
def _edge(x: Tensor, call: int, position: int, leaving: bool) -> Tensor:
    return x.clone()


@torch.library.custom_op("autopar::repeated_call", mutates_args=())
def _repeated_call(given: Sequence[Tensor], call: int, position: int, like: Tensor) -> Tensor:
    return like.clone()


@_edge.register_fake
def _(x: Tensor, call: int, position: int, leaving: bool) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


@_repeated_call.register_fake
def _(given: Sequence[Tensor], call: int, position: int, like: Tensor) -> Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)


EDGE = torch.ops.autopar.edge.default
REPEATED_CALL = torch.ops.autopar.repeated_call.default


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """A call that was traced. returned: its result, flat, with edges for tensors."""

    number: int
    path: str
    returned: tuple[Any, ...]
    out_spec: pytree.TreeSpec

    @property
    def results(self) -> list[Tensor]:
        """The tensors of the result."""
        return [leaf for leaf in self.returned if isinstance(leaf, Tensor)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """The ops of a followed call of the module at ``path``. entries, results: its edges by position."""

    path: str
    nodes: tuple[fx.Node, ...]
    entries: Mapping[int, fx.Node]
    results: Mapping[int, fx.Node]

    def reads(self) -> list[fx.Node]:
        """Placeholders that it reads."""
        operands = dict.fromkeys(operand for node in self.nodes for operand in node.all_input_nodes)
        return [node for node in operands if node.op == "placeholder"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedCall:
    """A call of the module at ``path`` that runs ``body``. twins: placeholder that the body reads -> its own."""

    path: str
    body: Body
    twins: Mapping[fx.Node, fx.Node]


@dataclass(slots=True)
class Repetition:
    """The calls of one trace.

    followed: by what the calls have in common. repeats: number of a call that was not followed -> path of its module,
    and number of the followed call that it repeats.
    """

    followed: dict[object, list[Followed]] = field(default_factory=dict)
    repeats: dict[int, tuple[str, int]] = field(default_factory=dict)
    _refused: set[object] = field(default_factory=set)
    _count: int = 0
    _inside: bool = False

    def watch(self, model: nn.Module) -> None:
        """Have every module of ``model`` that others are like record its calls, or repeat theirs."""
        for group in groups_alike(model, at_least=_AT_LEAST):
            for path, module in group.members:
                module.forward = self._watched(module, path, group)
                for name in group.counts:
                    owner, _, attribute = name.rpartition(".")
                    vars(module.get_submodule(owner))[attribute] = _COUNT

    def _watched(self, module: nn.Module, path: str, group: Group) -> Any:
        forward = module.forward
        first, last = group.members[0][0], group.members[-1][0]

        @functools.wraps(forward)
        def watched(*args: Any, **kwargs: Any) -> Any:
            leaves, spec = pytree.tree_flatten((args, kwargs))
            key = (first, str(spec), _common(leaves))
            # An object may hold other things by the next call.
            compared = all(isinstance(leaf, Tensor) or is_plain(leaf) for leaf in leaves)
            if self._inside or key in self._refused or not compared:
                return forward(*args, **kwargs)
            number, self._count = self._count, self._count + 1
            calls = self.followed.setdefault(key, [])
            if len(calls) >= 2 and path != last:
                return self._repeat(number, path, calls[1], leaves)
            before = state_of(module)
            followed, result = self._follow(number, path, module, forward, leaves, spec)
            if state_of(module) != before:
                raise NotAlike(f"{path} keeps something of a call in its attributes")
            if followed is None:
                self._refused.add(key)
                return forward(*args, **kwargs)
            calls.append(followed)
            return result

        return watched

    def _repeat(self, number: int, path: str, call: Followed, leaves: list[Any]) -> Any:
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self.repeats[number] = (path, call.number)
        results = iter([REPEATED_CALL(given, number, place, like) for place, like in enumerate(call.results)])
        flat = [next(results) if isinstance(leaf, Tensor) else leaf for leaf in call.returned]
        return pytree.tree_unflatten(flat, call.out_spec)

    def _follow(
        self, number: int, path: str, module: nn.Module, forward: Any, leaves: list[Any], spec: pytree.TreeSpec
    ) -> tuple[Followed | None, Any]:
        """Run a call between edges. None if it returns what it is given: a write to the one would be to the other."""
        inner = _edges_of(leaves, number, leaving=False)
        given = [(leaf, writes_to(leaf)) for leaf in inner if isinstance(leaf, Tensor)]
        args, kwargs = pytree.tree_unflatten(inner, spec)
        self._inside = True
        try:
            out = forward(*args, **kwargs)
        finally:
            self._inside = False
        if any(writes_to(leaf) != version for leaf, version in given):
            raise NotAlike(f"{path} writes to what it is given")
        returned, out_spec = pytree.tree_flatten(out)
        results = {storage_of(leaf) for leaf in returned if isinstance(leaf, Tensor)}
        if results & set(map(storage_of, (*module.parameters(), *module.buffers()))):
            raise NotAlike(f"{path} returns a tensor of its own, to which others may write")
        if not results or results & {storage_of(leaf) for leaf, _ in given}:
            if any(True for _ in module.buffers()):
                raise NotAlike(f"{path} may write to its buffers, and would be run twice")
            return None, None
        edges = _edges_of(returned, number, leaving=True)
        followed = Followed(number=number, path=path, returned=tuple(edges), out_spec=out_spec)
        return followed, pytree.tree_unflatten(edges, out_spec)

    def resolve(self, program: torch.export.ExportedProgram, root: str) -> dict[int, RepeatedCall]:
        """The body to run for each call that was not followed, by number. root: path of the model in the program.

        Raises NotAlike unless all that it takes from a followed call is the same in every one of them.
        """
        targets = {
            spec.arg.name: spec.target.removeprefix(f"{root}.")
            for spec in program.graph_signature.input_specs
            if spec.target is not None
        }
        placeholder = {targets[n.name]: n for n in program.graph.nodes if n.op == "placeholder" and n.name in targets}
        constants = {name.removeprefix(f"{root}."): value for name, value in program.constants.items()}
        bodies = self._bodies(program.graph, _Comparison(targets=targets, constants=constants))
        found: dict[int, RepeatedCall] = {}
        for number, (path, call) in self.repeats.items():
            body = bodies[call]
            # Constants are those of the body.
            read = {n: targets.get(n.name, "") for n in body.reads() if targets.get(n.name) not in constants}
            inside = {n: name for n, name in read.items() if name.startswith(f"{body.path}.")}
            own = {n: path + name.removeprefix(body.path) for n, name in inside.items()}
            if not placeholder.keys() >= set(own.values()):
                raise NotAlike(f"{path} does not have what {body.path} has")
            found[number] = RepeatedCall(path=path, body=body, twins={n: placeholder[name] for n, name in own.items()})
        present = {node.args[1] for node in program.graph.nodes if node.target is REPEATED_CALL}
        if present != set(found):
            raise NotAlike("calls of modules that are alike are in regions of their own, or have no effect")
        return found

    def _bodies(self, graph: fx.Graph, compared: _Comparison) -> dict[int, Body]:
        """Bodies of the followed calls that others repeat, by number."""
        wanted = {call for _, call in self.repeats.values()}
        edges = _edges(graph)
        found: dict[int, Body] = {}
        for calls in self.followed.values():
            if not any(call.number in wanted for call in calls):
                continue
            bodies = [_body(call, graph, edges) for call in calls]
            for call, body in zip(calls, bodies, strict=True):
                if call.out_spec != calls[0].out_spec or _constants(call) != _constants(calls[0]):
                    raise NotAlike(f"{call.path} does not return what {calls[0].path} returns")
                compared.check(bodies[0], body)
                if call.number in wanted:
                    found[call.number] = body
        return found


def _common(leaves: Sequence[Any]) -> object:
    """What calls have to have in common besides the structure of their arguments."""
    first: dict[int, int] = {}
    described = [
        (first.setdefault(id(leaf), place), shape_key(leaf)) if isinstance(leaf, Tensor) else plain(leaf)
        for place, leaf in enumerate(leaves)
    ]
    return (torch.is_grad_enabled(), tuple(described))


def _edges_of(leaves: Sequence[Any], call: int, *, leaving: bool) -> list[Any]:
    """Leaves with an edge for every tensor."""
    places = count()
    return [EDGE(leaf, call, next(places), leaving) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def _constants(call: Followed) -> list[object]:
    return [None if isinstance(leaf, Tensor) else plain(leaf) for leaf in call.returned]


def _edges(graph: fx.Graph) -> dict[tuple[int, bool], dict[int, fx.Node]]:
    """The edges by call, entering or leaving, and position."""
    found: dict[tuple[int, bool], dict[int, fx.Node]] = {}
    for node in graph.nodes:
        if node.target is EDGE:
            _, call, position, leaving = node.args
            found.setdefault((call, leaving), {})[position] = node
    return found


def _body(call: Followed, graph: fx.Graph, edges: Mapping[tuple[int, bool], dict[int, fx.Node]]) -> Body:
    """The ops between the edges of a call. An edge that nothing reads is not in the graph."""
    entries, results = edges.get((call.number, False), {}), edges.get((call.number, True), {})
    if not entries or not results:
        raise NotAlike(f"{call.path} does not compute its results from what it is given")
    ends = set(results.values())
    node = list(entries.values())[-1].next
    nodes: list[fx.Node] = []
    while node not in ends:
        if node.op == "output":
            raise NotAlike(f"the results of {call.path} come before what it is given")
        if not is_symbolic(node.meta.get("val")):  # a size, which is the same in all calls or compared with others
            nodes.append(node)
        node = node.next
    inside = {*nodes, *ends, *entries.values()}
    for own in (*nodes, *entries.values()):
        if not inside.issuperset(own.users):
            raise NotAlike(f"{own} of {call.path} is used outside of it")
    return Body(path=call.path, nodes=tuple(nodes), entries=entries, results=results)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Comparison:
    """Whether bodies are the same.

    targets: placeholder -> name of its parameter, buffer or constant. constants: their values.
    """

    targets: Mapping[str, str]
    constants: Mapping[str, Any]

    def check(self, a: Body, b: Body) -> None:
        if a is b:
            return
        same = {a.entries[place]: node for place, node in b.entries.items() if place in a.entries}
        paths = (f"{a.path}.", f"{b.path}.")
        if not self._same_nodes(a.nodes, b.nodes, same, paths) or not all(
            place in a.results and self._same_leaf(a.results[place].args[0], edge.args[0], same, paths)
            for place, edge in b.results.items()
        ):
            raise NotAlike(f"{a.path} and {b.path} look alike, and run different ops")

    def _same_nodes(
        self, a: Sequence[fx.Node], b: Sequence[fx.Node], same: dict[fx.Node, fx.Node], paths: tuple[str, str]
    ) -> bool:
        if len(a) != len(b):
            return False
        for x, y in zip(a, b, strict=True):
            if not self._same_node(x, y, same, paths):
                return False
            same[x] = y
        return True

    def _same_node(self, x: fx.Node, y: fx.Node, same: dict[fx.Node, fx.Node], paths: tuple[str, str]) -> bool:
        if x.op != y.op:
            return False
        if x.op == "placeholder":
            return True  # of regions, whose operands are compared where they are called
        if x.op == "get_attr":
            return self._same_region(_attribute(x), _attribute(y), paths)
        mine, spec = pytree.tree_flatten((x.args, x.kwargs))
        theirs, other = pytree.tree_flatten((y.args, y.kwargs))
        return (
            x.target == y.target
            and spec == other
            and all(self._same_leaf(p, q, same, paths) for p, q in zip(mine, theirs, strict=True))
        )

    def _same_region(self, x: Any, y: Any, paths: tuple[str, str]) -> bool:
        if isinstance(x, fx.GraphModule) and isinstance(y, fx.GraphModule):
            return self._same_nodes(list(x.graph.nodes), list(y.graph.nodes), {}, paths)
        return isinstance(x, Tensor) and isinstance(y, Tensor) and _equal(x, y)

    def _same_leaf(self, p: Any, q: Any, same: Mapping[fx.Node, fx.Node], paths: tuple[str, str]) -> bool:
        if not isinstance(p, fx.Node) or not isinstance(q, fx.Node):
            return plain(p) == plain(q)
        if is_symbolic(p.meta.get("val")) and is_symbolic(q.meta.get("val")):
            return bool(expression_of_symbol(p.meta["val"]) == expression_of_symbol(q.meta["val"]))
        if p in same:
            return same[p] is q
        if p.op != "placeholder" or q.op != "placeholder":
            return False
        mine, theirs = self.targets.get(p.name), self.targets.get(q.name)
        if mine is None or theirs is None:
            return p is q
        if mine in self.constants and theirs in self.constants:
            return _equal(self.constants[mine], self.constants[theirs])
        if mine.startswith(paths[0]):
            return theirs == paths[1] + mine.removeprefix(paths[0])
        return mine == theirs


def _attribute(node: fx.Node) -> Any:
    return operator.attrgetter(str(node.target))(node.graph.owning_module)


def _equal(x: Any, y: Any) -> bool:
    return isinstance(x, Tensor) and isinstance(y, Tensor) and x.dtype == y.dtype and torch.equal(x, y)
