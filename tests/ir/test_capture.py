from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.ir.capture.capture import capture
from autopar.ir.graph import CapturedModel
from autopar.passes.verify.well_formed import verify
from tests.ir.models import assert_same_training, run_captured

aten = torch.ops.aten


def targets(captured: CapturedModel) -> list[Any]:
    return [node.target for node in captured.graph.nodes if node.op == "call_function"]


def mse(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target)


class Mlp(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Dropout(0.0), nn.Linear(8, 6))


def test_mlp_with_a_loss_function() -> None:
    model, x, y = Mlp(), torch.randn(4, 6), torch.randn(4, 6)
    captured = capture(model, x, loss_fn=mse, example_target=y)
    verify(captured)
    assert targets(captured)[:3] == [aten.linear.default, aten.relu.default, aten.linear.default]
    assert [p.name for p in captured.parameters.values()] == list(model.state_dict())
    assert [(i.key, i.batch_dim) for i in captured.inputs.values()] == [("args[0]", 0), ("target", 0)]
    assert (captured.batch_size, captured.num_outputs, captured.has_loss) == (4, 1, True)
    assert_same_training(captured, model, (x,), loss_fn=mse, target=y)


def test_target_in_the_example_inputs() -> None:
    class Named(Mlp):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x)  # type: ignore[no-any-return]

    captured = capture(Named(), {"x": torch.randn(4, 6), "target": torch.randn(4, 6)}, loss_fn=mse)
    assert [i.key for i in captured.inputs.values()] == ["kwargs['x']", "target"]


def test_a_meta_model_and_a_real_one_are_the_same_program() -> None:
    with torch.device("meta"):
        abstract = Mlp()
    x = torch.randn(4, 6)
    real = capture(Mlp(), x)
    assert capture(abstract, x.to("meta")).fingerprint == real.fingerprint
    assert not real.has_loss


def test_the_users_model_is_not_touched() -> None:
    model = Mlp().eval()
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    capture(model, torch.randn(4, 6))
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == before
    assert not model.training


def test_where_ops_come_from() -> None:
    captured = capture(Mlp(), torch.randn(4, 6))
    first = next(node for node in captured.graph.nodes if node.target is aten.relu.default)
    assert first.meta["path"] == "1"

    class Doubling(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    node = next(n for n in capture(Doubling(), torch.randn(4)).graph.nodes if n.op == "call_function")
    assert node.meta["source"].startswith("test_capture.py:")
    assert node.meta["source"].endswith("in forward: return x * 2")


class Everything(nn.Module):
    """In-place writes, views, no_grad, detach, constants, tied weights, statistics, an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.tied = self.up.weight
        self.unused = nn.Parameter(torch.ones(3))
        self.ramp = torch.arange(4.0)
        self.register_buffer("count", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor, y: Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        h = F.relu(self.norm(self.up(x)), inplace=True)
        with torch.no_grad():
            still = h * 2
        h = h + still + h.detach() * self.ramp + torch.tensor([1.0, 2.0, 3.0, 4.0])
        z = torch.zeros_like(h)
        z[:, 1:] = h[:, :-1]
        z[:, 0] = 5.0
        flat = z.view(-1)
        flat.mul_(scale)
        z.t()[2] += y[:, 0]
        self.count += 1
        return {"loss": (F.linear(z, self.tied) * y).sum(), "z": z, "scale": scale, "nothing": None}


def test_functional_whatever_the_model_writes() -> None:
    model, inputs = Everything(), {"x": torch.randn(8, 4), "y": torch.randn(8, 4), "scale": 3.0}
    captured = capture(model, inputs)
    verify(captured)
    assert_same_training(captured, model, inputs)
    assert [p.names for p in captured.parameters.values()][:2] == [("tied", "up.weight"), ("unused",)]
    updated = {b.name: b.persistent for b in captured.buffers.values() if b.updated_by is not None}
    statistics = ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked")
    assert updated == {**dict.fromkeys(statistics, True), "count": False}
    out = run_captured(captured, model, inputs)
    rebuilt = pytree.tree_unflatten(out[1 : 1 + captured.num_outputs], captured.out_spec)
    assert rebuilt["scale"] == 3.0 and rebuilt["nothing"] is None and rebuilt["z"].shape == (8, 4)


def test_dataclass_outputs() -> None:
    @dataclass
    class Output:
        loss: Tensor
        y: Tensor

    pytree.register_dataclass(Output)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Output:
            y = self.up(x)
            return Output(loss=y.sum(), y=y)

    model, x = Model(), torch.randn(2, 4)
    captured = capture(model, x)
    assert captured.has_loss
    out = run_captured(captured, model, (x,))
    rebuilt = pytree.tree_unflatten(out[1:], captured.out_spec)
    assert [f.name for f in dataclasses.fields(rebuilt)] == ["loss", "y"]


def test_one_tensor_passed_twice_is_two_inputs() -> None:
    class Dot(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return (a * b).sum()

    x = torch.randn(4)
    captured = capture(Dot(), {"a": x, "b": x})
    product = next(node for node in captured.graph.nodes if node.target is aten.mul.Tensor)
    assert [operand.name for operand in product.args] == ["a", "b"]
    assert captured.has_loss


def test_no_ops_and_repeated_ops_are_gone() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            a = x.contiguous().clone().float().view(4, 2, 3).view(4, 6) * 1.0 + 0
            b = F.dropout(x.to(torch.float32).expand(4, 6)[:, :], 0.0)
            return torch.cos(a) + torch.cos(b)

    assert targets(capture(Model(), torch.randn(4, 6))) == [aten.cos.default, aten.add.Tensor]


def test_detach_stops_gradients_only_where_there_are_some() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))
            self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return (x.detach() * self.w.detach() * self.frozen.detach() * self.w).sum()

    assert targets(capture(Model(), torch.randn(4, 3))).count(aten.detach.default) == 1


def test_dropout_is_kept_in_train_mode_and_never_merged() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x, 0.5, self.training) - F.dropout(x, 0.5, self.training)

    assert targets(capture(Model().eval(), torch.randn(4))).count(aten.dropout.default) == 2


class Penalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)  # type: ignore[no-any-return]

    def penalised(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target) + self.linear.weight.square().sum()


def test_a_loss_function_of_the_model_reads_its_parameters() -> None:
    model = Penalised()
    for loss_fn in (model.penalised, lambda output, target: model.penalised(output, target)):
        captured = capture(model, torch.randn(4, 8), loss_fn=loss_fn, example_target=torch.zeros(4, dtype=torch.long))
        assert not captured.constants
        (square,) = (node for node in captured.graph.nodes if node.target is torch.ops.aten.square.default)
        assert square.args[0].name == "p_linear_weight" and "in penalised" in square.meta["source"]


def test_batch_norm_that_is_synchronised_is_batch_norm() -> None:
    graphs = [
        capture(nn.Sequential(nn.Linear(8, 4), norm(4)), torch.randn(4, 8)).graph
        for norm in (nn.BatchNorm1d, nn.SyncBatchNorm)
    ]
    one, other = ([node.target for node in graph.nodes if node.op == "call_function"] for graph in graphs)
    assert one == other
