"""A case for each private name of torch that stands for types, ops, fake tensors and modes."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from autopar.ir import torch_private as private
from tests.ir.private_helpers import exported, one_rank, targets
from tests.private_names import Cases

aten = torch.ops.aten
cases = Cases()
case = cases.of


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


@case("ATTENTION_OF_TWO_WIDTHS")
def _attention_of_two_widths() -> None:
    with private.FakeTensorMode():
        q, k, v = (torch.empty(1, 2, 4, width, requires_grad=True) for width in (24, 24, 16))
        out = private.ATTENTION_OF_TWO_WIDTHS(q, k, v, None, True, 0.0, True, False, scale=0.5)[0]
        grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert out.shape == (1, 2, 4, 16)
    assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]


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


@case("wrapper", "no_torch_function")
def _wrapper() -> None:
    class Named(torch.Tensor):
        __torch_function__ = private.no_torch_function  # type: ignore[assignment]

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
            return torch.zeros(5) if func is torch.ops.aten.mul.Tensor else NotImplemented

    made = private.wrapper(Named, torch.empty(3, 2).t(), torch.float16, torch.device("cpu"))
    assert isinstance(made, Named)
    assert (tuple(made.shape), made.dtype, made.device.type) == ((2, 3), torch.float16, "cpu")
    assert made.stride() == (1, 2)
    assert (made * 2).tolist() == [0.0] * 5
