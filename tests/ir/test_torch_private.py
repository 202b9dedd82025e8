"""What is private in torch is still there and does what is relied on: a case for each name of ``ir.torch_private``."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributions import Distribution
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from autopar.ir import torch_private as private
from autopar.ir.autograd.applied import functions_handled
from autopar.ir.autograd.replacing import replaced
from tests.private_names import Cases, public_names

aten = torch.ops.aten
cases = Cases()
case = cases.of


def test_every_name_has_a_case() -> None:
    assert set(cases) == public_names(private)


@pytest.mark.parametrize("name", sorted(public_names(private)))
def test_torch_has(name: str) -> None:
    cases[name]()


def exported(function: Callable[..., Any], *inputs: Tensor) -> list[fx.Node]:
    """The ops of a function as torch.export first has them, before any is made functional."""

    class Model(nn.Module):
        def forward(self, *args: Tensor) -> Any:
            return function(*args)

    return list(torch.export.export(Model(), inputs, strict=False).graph.nodes)


def targets(nodes: list[fx.Node]) -> set[Any]:
    return {node.target for node in nodes}


@contextmanager
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Seen(private.TorchDispatchMode):
    """The ops that run within."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


# Types and ops.


@case("OpOverload", "schema_of", "overload_of", "FunctionSchema", "Argument")
def _ops() -> None:
    assert isinstance(aten.add.Tensor, private.OpOverload)
    assert not isinstance(aten.add, private.OpOverload)
    assert (private.overload_of(aten.add.Tensor), private.overload_of(aten.linear.default)) == ("Tensor", "default")
    schema = private.schema_of(aten.add_.Tensor)
    assert isinstance(schema, private.FunctionSchema)
    assert schema.name == "aten::add_"
    assert schema.is_mutable
    assert not private.schema_of(aten.add.Tensor).is_mutable
    first, second, alpha = schema.arguments
    assert isinstance(first, private.Argument)
    assert first.alias_info is not None
    assert first.alias_info.is_write
    assert second.alias_info is None
    assert (alpha.name, alpha.kwarg_only, alpha.has_default_value(), alpha.default_value) == ("alpha", True, True, 1)
    assert str(first.type) == "Tensor"
    view = private.schema_of(aten.select.int).returns[0].alias_info
    assert view is not None
    assert not view.is_write


@case("HigherOrderOperator")
def _regions() -> None:
    def forward(x: Tensor) -> Tensor:
        with torch.no_grad():
            y = x * 2
        return x + y

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return forward(x)

    program = torch.export.export(Model(), (torch.ones(2),), strict=False)
    assert any(isinstance(node.target, private.HigherOrderOperator) for node in program.graph.nodes)


@case("TO_COPY", "ASSERT_METADATA")
def _casts() -> None:
    def cast(x: Tensor) -> Tensor:
        return x.to(torch.float64)

    assert private.ASSERT_METADATA in targets(exported(cast, torch.ones(2)))
    assert private.TO_COPY in targets(list(make_fx(cast)(torch.ones(2)).graph.nodes))


@case("UNSAFE_VIEW")
def _unsafe_view() -> None:
    module = make_fx(lambda x, y: x @ y)(torch.ones(2, 3, 4), torch.ones(4, 5))
    assert private.UNSAFE_VIEW in targets(list(module.graph.nodes))


@case("SAFE_SOFTMAX")
def _safe_softmax() -> None:
    assert private.SAFE_SOFTMAX(torch.full((1, 2), -math.inf), -1).tolist() == [[0.0, 0.0]]
    assert private.SAFE_SOFTMAX(torch.zeros(1, 2), -1).tolist() == [[0.5, 0.5]]


@case("SOFTMAX_BACKWARD", "LOG_SOFTMAX_BACKWARD", "decompositions")
def _softmax_backward() -> None:
    packets = (private.SOFTMAX_BACKWARD, private.LOG_SOFTMAX_BACKWARD)
    table = private.decompositions(packets)
    assert {packet.default for packet in packets} <= set(table)
    assert not private.decompositions(())

    def gradients(x: Tensor) -> list[Tensor]:
        x = x.detach().requires_grad_()
        return [torch.autograd.grad(f(x, -1)[0, 0], x)[0] for f in (torch.softmax, torch.log_softmax)]

    x = torch.rand(2, 3)
    whole, plain = make_fx(gradients)(x), make_fx(gradients, decomposition_table=table)(x)
    assert {packet.default for packet in packets} <= targets(list(whole.graph.nodes))
    assert not {packet.default for packet in packets} & targets(list(plain.graph.nodes))
    torch.testing.assert_close(plain(x), gradients(x))


@case("BATCH_NORM_WITH_STATISTICS", "BATCH_NORM_OF_BATCH")
def _batch_norm() -> None:
    x, mean, var = torch.rand(4, 3), torch.zeros(3), torch.ones(3)
    out, own_mean, inverse, new_mean, _ = private.BATCH_NORM_WITH_STATISTICS(x, None, None, mean, var, True, 0.5, 1e-5)
    torch.testing.assert_close(new_mean, 0.5 * x.mean(0))
    assert not mean.any()
    other, other_mean, other_inverse = private.BATCH_NORM_OF_BATCH(x, None, None, True, 0.5, 1e-5)
    torch.testing.assert_close((other, other_mean, other_inverse), (out, own_mean, inverse))
    torch.testing.assert_close(out, torch.nn.functional.batch_norm(x, None, None, training=True))


@case("FUSED_RMS_NORM")
def _rms_norm() -> None:
    x = torch.rand(4, 3)
    result, scale = private.FUSED_RMS_NORM(x, (3,), None, 1e-5)
    torch.testing.assert_close(result, torch.rms_norm(x, (3,), eps=1e-5))
    torch.testing.assert_close(result, x * scale)


@case("ASSERTIONS")
def _assertions() -> None:
    def forward(x: Tensor) -> Tensor:
        torch._assert_async(x.sum() > 0)
        torch._assert_async(x.sum() > 0, "a message")
        return x

    seen = targets(exported(forward, torch.ones(2)))
    assert set(private.ASSERTIONS[:2]) <= seen
    assert {str(op) for op in private.ASSERTIONS} == {
        "aten._assert_async.default", "aten._assert_async.msg", "aten._assert_scalar.default",
    }  # fmt: skip
    with pytest.raises(RuntimeError, match="a reason"):
        private.ASSERTIONS[2](False, "a reason")


@case("READ_SCALAR")
def _item() -> None:
    with Seen() as seen:
        torch.ones(()).item()
    assert private.READ_SCALAR in seen.ops


@case("FLASH_CPU", "FLASH_CPU_BACKWARD")
def _flash_on_cpu() -> None:
    q, k, v = (torch.rand(1, 2, 4, 8) for _ in range(3))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True, scale=0.3)
    out, lse = private.FLASH_CPU(q, k, v, 0.0, True, scale=0.3)
    torch.testing.assert_close(out, expected)
    scores = (q @ k.mT * 0.3).masked_fill(torch.ones(4, 4).triu(1).bool(), -math.inf)
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    grad = torch.rand_like(out)
    found = private.FLASH_CPU_BACKWARD(grad, q, k, v, out, lse, 0.0, True, scale=0.3)
    torch.testing.assert_close(found, torch.autograd.grad(expected, leaves, grad))


def _operands(op: Any) -> list[str]:
    return [argument.name for argument in private.schema_of(op).arguments]


@case("FLASH_CUDA")
def _flash_on_cuda() -> None:
    assert _operands(private.FLASH_CUDA) == [
        "query", "key", "value", "dropout_p", "is_causal", "return_debug_mask", "scale",
    ]  # fmt: skip


@case("FLASH_CUDA_BACKWARD")
def _flash_on_cuda_backward() -> None:
    assert _operands(private.FLASH_CUDA_BACKWARD) == [
        "grad_out", "query", "key", "value", "out", "logsumexp", "cum_seq_q", "cum_seq_k", "max_q", "max_k",
        "dropout_p", "is_causal", "philox_seed", "philox_offset", "scale",
    ]  # fmt: skip


@case("EFFICIENT_CUDA")
def _efficient_on_cuda() -> None:
    assert _operands(private.EFFICIENT_CUDA) == [
        "query", "key", "value", "attn_bias", "compute_log_sumexp", "dropout_p", "is_causal", "scale",
    ]  # fmt: skip


@case("EFFICIENT_CUDA_BACKWARD")
def _efficient_on_cuda_backward() -> None:
    assert _operands(private.EFFICIENT_CUDA_BACKWARD) == [
        "grad_out_", "query", "key", "value", "attn_bias", "out", "logsumexp", "philox_seed", "philox_offset",
        "dropout_p", "grad_input_mask", "is_causal", "scale",
    ]  # fmt: skip


@case("FUNCTIONAL_COLLECTIVES", "process_group", "size_of_group")
def _groups() -> None:
    with one_rank():
        world = dist.group.WORLD
        assert world is not None
        name = world.group_name
        assert private.process_group(name) is world
        assert private.size_of_group(name) == 1
        ops, x = private.FUNCTIONAL_COLLECTIVES, torch.ones(2)
        assert ops.wait_tensor(ops.all_reduce(x, "sum", name)).tolist() == [1.0, 1.0]
        assert ops.wait_tensor(ops.all_gather_into_tensor(x, 1, name)).tolist() == [1.0, 1.0]
        assert ops.wait_tensor(ops.reduce_scatter_tensor(x, "sum", 1, name)).tolist() == [1.0, 1.0]
        assert ops.wait_tensor(ops.all_to_all_single(x, [2], [2], name)).tolist() == [1.0, 1.0]


# Fake tensors and modes.


@case("FakeTensorMode", "FakeTensor", "is_fake")
def _fake() -> None:
    mode = private.FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        made = torch.ones(2, 3) @ torch.ones(3, 4)
    assert isinstance(made, private.FakeTensor)
    assert made.fake_mode is mode
    assert (tuple(made.shape), made.device.type) == ((2, 4), "cpu")
    assert private.is_fake(made)
    assert not private.is_fake(torch.ones(2))
    assert private.is_fake(mode.from_tensor(torch.ones(2)))


@case("FAKE_TENSOR_LOG")
def _fake_log() -> None:
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    log, handler = logging.getLogger(private.FAKE_TENSOR_LOG), Lines()
    log.addHandler(handler)
    try:
        with pytest.raises(RuntimeError), private.FakeTensorMode():
            torch.ones(2, 3) @ torch.ones(2, 3)
    finally:
        log.removeHandler(handler)
    assert lines


@case("TorchDispatchMode", "no_modes")
def _dispatch() -> None:
    with Seen() as seen:
        torch.ones(2)
        with private.no_modes():
            torch.zeros(2)
    assert seen.ops == [aten.ones.default]


class Calls(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(func)
        return func(*args, **(kwargs or {}))


class OfATrace(Calls):
    pass


OfATrace.__module__ = "torch.fx.experimental.proxy_tensor"


@case("no_torch_functions")
def _no_functions() -> None:
    with Calls() as mode:
        with private.no_torch_functions():
            torch.ones(2)
        torch.zeros(2)
    assert mode.calls == [torch.zeros]


@case("no_functions_of_traces")
def _no_functions_of_traces() -> None:
    with Calls() as users, OfATrace() as torchs:
        with private.no_functions_of_traces():
            torch.ones(2)
        torch.zeros(2)
    assert (users.calls, torchs.calls) == ([torch.ones, torch.zeros], [torch.zeros])


@case("pytree")
def _pytree() -> None:
    value = {"a": [1, (2, None)], "b": 3}
    leaves, spec = private.pytree.tree_flatten(value)
    assert leaves == [1, 2, None, 3]
    assert isinstance(spec, private.pytree.TreeSpec)
    assert private.pytree.tree_unflatten(leaves, spec) == value
    assert private.pytree.tree_leaves(value) == leaves
    assert private.pytree.tree_map_only(int, lambda n: n + 1, value) == {"a": [2, (3, None)], "b": 4}


@case("as_in_export")
def _as_in_export() -> None:
    with private.as_in_export():
        assert torch.compiler.is_exporting()
        assert torch.compiler.is_compiling()
    assert not torch.compiler.is_exporting()
    assert not torch.compiler.is_compiling()


@case("constant_in_graphs")
def _constant() -> None:
    calls: list[int] = []

    @private.constant_in_graphs
    def value() -> int:
        calls.append(len(calls))
        return len(calls)

    def twice(x: Tensor) -> Tensor:
        return x * value()

    compiled = torch.compile(twice, backend="eager", fullgraph=True)
    assert [compiled(torch.ones(1)).item() for _ in range(2)] == [1.0, 1.0]
    torch.compiler.reset()


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
