"""A case for each private name of torch that stands for graphs, traces, modules and autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributions import Distribution
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.ir import torch_private as private
from autopar.ir.autograd.applied import functions_handled
from autopar.ir.autograd.replacing import replaced
from tests.ir.private_helpers import exported, one_rank
from tests.private_names import Cases

aten = torch.ops.aten
cases = Cases()
case = cases.of


# Graphs.


@case("LazyGraphModule", "lazy_graph_modules")
def _lazy() -> None:
    graph = fx.Graph()
    graph.output(graph.call_function(aten.neg.default, (graph.placeholder("x"),)))
    module = private.LazyGraphModule(nn.Module(), graph)
    assert isinstance(module, fx.GraphModule)
    assert module(torch.ones(1)).item() == -1.0
    with private.lazy_graph_modules():
        assert isinstance(make_fx(torch.neg)(torch.ones(1)), private.LazyGraphModule)
    assert not isinstance(make_fx(torch.neg)(torch.ones(1)), private.LazyGraphModule)


@case("never_compiled")
def _never_compiled() -> None:
    compiling = []

    @private.never_compiled
    def add_one(x: Tensor) -> Tensor:
        compiling.append(torch.compiler.is_compiling())
        return x + 1

    def double(x: Tensor) -> Tensor:
        return 2 * add_one(x)

    assert torch.compile(double, backend="eager")(torch.ones(2)).tolist() == [4, 4]
    assert compiling == [False]


@case("keep_lines_of")
def _lines() -> None:
    def loss(x: Tensor) -> Tensor:
        return x.exp().sum()

    private.keep_lines_of(loss)
    nodes = exported(loss, torch.ones(2))
    (exponential,) = (node for node in nodes if node.target is aten.exp.default)
    kept = hasattr(fx.proxy, "_register_stack_trace_anchor")
    assert ("x.exp().sum()" if kept else "function(*args)") in exponential.meta["stack_trace"]


@case("CONTROL_FLOW_FILES")
def _files() -> None:
    from torch._higher_order_ops import cond, while_loop

    files = [function.__code__.co_filename for function in (while_loop, cond)]
    assert [file.endswith(name) for file, name in zip(files, private.CONTROL_FLOW_FILES)] == [True, True]


# What a trace replaces.


def _through(entry: private.EntryPoint, call: Callable[[], Any]) -> bool:
    """Whether ``call`` goes through an entry point."""
    passed: list[bool] = []

    def note(*args: Any, **kwargs: Any) -> Any:
        passed.append(True)
        return original(*args, **kwargs)

    original = entry.original
    with replaced(*entry, note):
        call()
    return bool(passed)


@case("EntryPoint", "VMAP", "GRAD", "GRAD_AND_VALUE", "JVP", "VJP")
def _transforms() -> None:
    x = torch.ones(2)
    assert _through(private.VMAP, lambda: torch.vmap(torch.sin)(x))
    assert _through(private.GRAD, lambda: torch.func.grad(torch.sum)(x))
    assert _through(private.GRAD_AND_VALUE, lambda: torch.func.grad_and_value(torch.sum)(x))
    assert _through(private.JVP, lambda: torch.func.jvp(torch.sin, (x,), (x,)))
    assert _through(private.VJP, lambda: torch.func.vjp(torch.sin, x))


class Double(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


@case("CALL_FUNCTION")
def _function_in_transform() -> None:
    assert _through(private.CALL_FUNCTION, lambda: torch.vmap(Double.apply)(torch.ones(2)))
    assert not _through(private.CALL_FUNCTION, lambda: Double.apply(torch.ones(2)))


_double = Double.apply


class Triple(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        assert private.made_context_of(ctx, Triple)
        assert not private.made_context_of(ctx, Double)
        return 3 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 3 * grad


def called(call: Callable[[], Any]) -> list[type]:
    """The autograd functions that ``call`` calls."""
    found: list[type] = []

    def handle(function: type, args: tuple[Any, ...], as_torch: Callable[[], Any]) -> Any:
        found.append(function)
        return as_torch()

    with functions_handled(handle):
        call()
    return found


@case("APPLY_FUNCTION", "apply_is_native", "made_context_of")
def _apply() -> None:
    x = torch.ones(1, requires_grad=True)
    assert called(lambda: (Double.apply(x), _double(x), Triple.apply(x))) == [Double, Double, Triple]
    assert private.apply_is_native() is not hasattr(Double.apply, "__func__")


@case("SCAN")
def _scan() -> None:
    from torch._higher_order_ops import scan

    xs = torch.ones(3, 2)
    found: list[Any] = []

    def run(_: Any, step: Any, states: Any, sequences: Any) -> Any:
        found.append((states, sequences, step(*states, *(x[0] for x in sequences))))
        return step(*states, *(x[0] for x in sequences))

    with replaced(*private.SCAN, run):
        scan(lambda state, x: (state + x, state * x), torch.zeros(2), xs)
    ((states, sequences, results),) = found
    assert [tuple(t.shape) for t in (*states, *sequences)] == [(2,), (3, 2)]
    assert len(results) == 2


@case("ASSOCIATIVE_SCAN", "GENERIC_ASSOCIATIVE_SCAN")
def _associative_scan() -> None:
    from torch._higher_order_ops import associative_scan

    xs, found = torch.ones(4, 2), []

    def run(_: Any, combine: Any, sequences: Any) -> Any:
        found.append([tuple(x.shape) for x in sequences])
        return list(sequences)

    with replaced(*private.ASSOCIATIVE_SCAN, run), private.FakeTensorMode():
        associative_scan(torch.add, torch.ones(4, 2, device="cuda"), 0)
    assert found == [[(4, 2)]]
    generic = private.GENERIC_ASSOCIATIVE_SCAN
    assert _through(generic, lambda: associative_scan(torch.add, xs, 0, combine_mode="generic"))


@case("CHECKPOINT")
def _checkpoint() -> None:
    x = torch.ones(2, requires_grad=True)

    def run() -> None:
        torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False)

    assert _through(private.CHECKPOINT, run)
    order: list[str] = []

    def generator(*args: Any, **kwargs: Any) -> Iterator[None]:
        order.append("before")
        yield
        order.append("after")

    def forward(x: Tensor) -> Tensor:
        order.append("forward")
        return x

    with replaced(*private.CHECKPOINT, generator):
        torch.utils.checkpoint.checkpoint(forward, x, use_reentrant=False)
    assert order == ["before", "forward", "after"]


@case("NODE_OF_TENSOR")
def _node_of_tensor() -> None:
    x = torch.ones(2, requires_grad=True) * 2
    hook = torch.autograd.graph.register_multi_grad_hook
    assert _through(private.NODE_OF_TENSOR, lambda: hook([x], lambda grads: None))
    assert _through(private.NODE_OF_TENSOR, lambda: torch.autograd.graph.get_gradient_edge(x))


@case("CONVERT_MODULE")
def _convert() -> None:
    module = nn.Linear(2, 2)
    assert _through(private.CONVERT_MODULE, lambda: module.to(torch.float64))
    assert _through(private.CONVERT_MODULE, lambda: module.half())


@case("flex_attention_entries", "leaves_scores", "indexing_by_tensors")
def _flex() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    q = torch.rand(1, 1, 4, 8)
    op, check, uncompiled = private.flex_attention_entries()
    given: list[Any] = []

    def attention(query: Tensor, key: Tensor, value: Tensor, score_mod: Any, *rest: Any) -> tuple[Tensor, ...]:
        given.append(score_mod)
        return query, query[..., 0], query[..., 0]

    with replaced(*op, attention), replaced(*check, lambda *tensors: None), replaced(*uncompiled, True):
        flex_attention(q, q, q)
        flex_attention(q, q, q, score_mod=lambda score, b, h, i, j: score * 2)
    assert [private.leaves_scores(own) for own in given] == [True, False]
    with private.indexing_by_tensors():
        table = torch.arange(4.0)
        assert torch.vmap(lambda i: table[i])(torch.tensor([2, 0])).tolist() == [2.0, 0.0]


@case("is_of_dispatcher")
def _of_dispatcher() -> None:
    # A custom op with a derivative runs an autograd function that torch makes for it.
    own, made = called(lambda: (Double.apply(torch.ones(1)), _doubled(torch.ones(1, requires_grad=True))))
    assert not private.is_of_dispatcher(own)
    assert private.is_of_dispatcher(made)


@torch.library.custom_op("autopar_tests::doubled", mutates_args=())
def _doubled(x: Tensor) -> Tensor:
    return 2 * x


_doubled.register_autograd(lambda ctx, grad: 2 * grad)


# Tensors, modules, autograd.


@case("storage_of")
def _storage() -> None:
    for device in ("cpu", "meta"):
        x = torch.empty(4, device=device)
        assert private.storage_of(x) == private.storage_of(x[1:]) != private.storage_of(x.clone())


@case("writes_to")
def _writes() -> None:
    x = torch.zeros(4)
    before, view = private.writes_to(x), x[1:]
    view.add_(1)
    assert private.writes_to(x) == private.writes_to(view) == before + 1
    x + 1
    assert private.writes_to(x) == before + 1


@case("local_tensor", "placement_of", "placed")
def _dtensor() -> None:
    with one_rank():
        mesh = init_device_mesh("cpu", (1,))
        whole = distribute_tensor(torch.rand(4, 2), mesh, [Shard(0)])
        local = private.local_tensor(whole)
        assert not isinstance(local, DTensor)
        assert local.grad_fn is None
        other = private.placed(torch.zeros(4, 2), private.placement_of(whole))
        assert isinstance(other, DTensor)
        assert (other.placements, other.device_mesh, other.shape) == (whole.placements, mesh, whole.shape)
        assert not other.requires_grad
        assert private.local_tensor(other).tolist() == torch.zeros(4, 2).tolist()


@case("in_backward", "will_run")
def _backward() -> None:
    seen: list[Any] = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
            return x * y

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            seen.append((private.in_backward(), *(private.will_run(node) for node, _ in ctx.next_functions)))
            return grad, grad

    x, y = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    inner = x * 1
    result = Probe.apply(inner, y * 1)
    torch.autograd.grad(result, inner, retain_graph=True)
    torch.autograd.grad(result, [x, y])
    assert not private.in_backward()
    assert seen == [(True, True, False), (True, True, True)]


@case("PARAMETERS", "BUFFERS", "MODULES", "FORWARD_HOOKS", "own_parameters", "own_buffers", "own_modules", "with_own")
def _modules() -> None:
    module = nn.BatchNorm1d(2, affine=False)
    module.register_module("inner", nn.Linear(2, 2, bias=False))
    inner = module.get_submodule("inner")
    assert private.own_parameters(inner) == {"weight": inner.weight, "bias": None}
    assert set(private.own_buffers(module)) == {"running_mean", "running_var", "num_batches_tracked"}
    assert private.own_modules(module) == {"inner": inner}
    assert getattr(inner, private.PARAMETERS) is private.own_parameters(inner)
    assert getattr(module, private.BUFFERS) is private.own_buffers(module)
    assert getattr(module, private.MODULES) is private.own_modules(module)
    module.register_forward_hook(lambda *_: None)
    module.register_forward_pre_hook(lambda *_: None)
    assert [len(getattr(module, name)) for name in private.FORWARD_HOOKS] == [1, 1]
    other = private.with_own(inner, {"weight": None}, {"extra": torch.ones(1)})
    assert (list(other.parameters()), dict(other.named_buffers())["extra"].item()) == ([], 1.0)
    assert list(inner.parameters()) == [inner.weight]


@case("gradient_hooks", "hooks_after_gradient")
def _parameter_hooks() -> None:
    parameter = nn.Parameter(torch.ones(1))
    assert not list(private.gradient_hooks(parameter))
    assert not list(private.hooks_after_gradient(parameter))

    def before(grad: Tensor) -> None: ...

    def after(parameter: Tensor) -> None: ...

    parameter.register_hook(before)
    parameter.register_post_accumulate_grad_hook(after)
    assert list(private.gradient_hooks(parameter)) == [before, after]
    assert list(private.hooks_after_gradient(parameter)) == [after]


@case("backward_hooks", "hooks_on_all_modules", "same_hooks_on_all_modules", "BackwardHookFunction")
def _module_hooks() -> None:
    module = nn.Linear(2, 2)

    def hook(*_: Any) -> None: ...

    module.register_full_backward_hook(hook)
    module.register_full_backward_pre_hook(hook)
    assert list(private.backward_hooks(module)) == [hook, hook]
    found = called(lambda: module(torch.ones(1, 2, requires_grad=True)))
    assert set(found) == {private.BackwardHookFunction}
    assert not list(private.hooks_on_all_modules())
    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        assert list(private.hooks_on_all_modules()) == [("global_forward_hooks", hook)]
        with private.same_hooks_on_all_modules():
            nn.modules.module.register_module_forward_pre_hook(hook)
            assert len(list(private.hooks_on_all_modules())) == 2
        assert list(private.hooks_on_all_modules()) == [("global_forward_hooks", hook)]
    finally:
        handle.remove()


@case("distributions_check_values")
def _distributions() -> None:
    before = private.distributions_check_values()
    try:
        for value in (True, False):
            Distribution.set_default_validate_args(value)
            assert private.distributions_check_values() is value
    finally:
        Distribution.set_default_validate_args(before)
