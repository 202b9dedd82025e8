"""The smaller rewrites: the op each one leaves behind, and that the model computes what it did."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.ir.analysis.batch_and_sequence import find_roles, microbatch_obstacle
from autopar.ir.capture.capture import capture
from autopar.ir.ops import composite
from autopar.passes.normalise import normalise
from tests.ir.models import assert_same_training

aten = torch.ops.aten

B, S, H, C = 3, 5, 8, 7


class Model(nn.Module):
    def __init__(self, body: Callable[..., Tensor]) -> None:
        super().__init__()
        self.body = body
        self.weight = nn.Parameter(torch.rand(H))
        self.matrix = nn.Parameter(torch.randn(H, C))
        self.bias = nn.Parameter(torch.randn(C))
        self.other = nn.Parameter(torch.randn(C, H))
        self.square = nn.Parameter(torch.randn(H, H))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.body(self, x, y)


def remaining(body: Callable[..., Tensor], x: Tensor | None = None) -> list[Any]:
    """Targets of the ops of the normal form, after checking that it trains like the model."""
    torch.manual_seed(0)
    model = Model(body)
    y = torch.randint(0, C, (B, S))
    y[0, :2] = -100
    inputs = (torch.randn(B, S, H) if x is None else x, y)
    captured = normalise(capture(model, inputs))
    assert_same_training(captured, model, inputs)
    return [node.target for node in captured.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize(
    "norm",
    [
        lambda m, x: m.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)),
        lambda m, x: (x * torch.rsqrt((x * x).mean(2, keepdim=True) + 1e-5)) * m.weight,
        lambda m, x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * m.weight,
        lambda m, x: F.rms_norm(x, (H,), m.weight, 1e-5),
        lambda m, x: (m.weight + 1) * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, True) + 1e-5)).type_as(x),
    ],
)
def test_rms_norm(norm: Callable[..., Tensor]) -> None:
    left = remaining(lambda m, x, y: norm(m, x * m.weight).sum())
    assert [t for t in left if t is not aten.add.Tensor] == [aten.mul.Tensor, composite.rms_norm, aten.sum.default]


def test_rms_norm_in_half_precision() -> None:
    def body(m: Model, x: Tensor, y: Tensor) -> Tensor:
        h = (x * m.weight).to(torch.bfloat16)
        wide = h.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return m.weight.to(torch.bfloat16) * wide.to(torch.bfloat16)

    captured = normalise(capture(Model(lambda m, x, y: body(m, x, y).sum()), (torch.randn(B, S, H), torch.zeros(B, S))))
    norm = next(node for node in captured.graph.nodes if node.target is composite.rms_norm)
    assert norm.meta["val"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    "loss",
    [
        lambda logits, y: F.cross_entropy(logits.view(-1, C), y.view(-1)),
        lambda logits, y: F.cross_entropy(logits.float().flatten(0, 1), y.flatten(), label_smoothing=0.1),
        lambda logits, y: F.cross_entropy(logits.transpose(1, 2), y, reduction="sum"),
        lambda logits, y: F.cross_entropy(logits[..., :-1, :].reshape(-1, C), y[..., 1:].reshape(-1)),
        lambda logits, y: F.cross_entropy(logits.view(-1, C), y.view(-1), reduction="none").sum(),
    ],
)
def test_cross_entropy(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    left = remaining(lambda m, x, y: loss(x @ m.matrix + m.bias, y))
    assert left.count(composite.cross_entropy) == 1
    assert aten.cross_entropy_loss.default not in left


WEIGHTS = torch.linspace(0.5, 2, C)


@pytest.mark.parametrize(
    "loss",
    [
        lambda logits, y: F.cross_entropy(logits, y),
        lambda logits, y: F.cross_entropy(logits, y, weight=WEIGHTS, label_smoothing=0.1),
        lambda logits, y: F.nll_loss(logits.log_softmax(-1), y.clamp(min=0), ignore_index=3),
        lambda logits, y: F.nll_loss(logits.log_softmax(-1), y, weight=WEIGHTS),
    ],
)
def test_mean_of_a_loss_is_a_sum_over_a_count(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    left = remaining(lambda m, x, y: loss((x @ m.matrix).view(-1, C), y.view(-1)))
    assert left[-1] is aten.div.Tensor and left.count(aten.sum.default) == 1


@pytest.mark.parametrize(
    "layer",
    [
        lambda m, x: torch.addmm(m.bias, x.view(-1, H), m.matrix).view(B, S, C),  # GPT-2's Conv1D
        lambda m, x: torch.mm(x.view(-1, H), m.matrix).view(B, S, C),
        lambda m, x: F.linear(x, m.matrix.t(), m.bias),
        lambda m, x: F.linear(x, m.matrix.transpose(-1, 0)),
    ],
)
def test_a_layer_that_stores_its_columns_reads_the_parameter_itself(layer: Callable[..., Tensor]) -> None:
    assert remaining(lambda m, x, y: layer(m, x).sum()) == [composite.columns_linear, aten.sum.default]


def test_a_transposed_matrix_of_columns_is_one_of_rows() -> None:
    left = remaining(lambda m, x, y: torch.addmm(m.bias, x.view(-1, H), m.other.t()).view(B, S, C).sum())
    assert left == [aten.linear.default, aten.sum.default]


def test_rowwise_ops_move_above_a_flattening_view() -> None:
    def body(m: Model, x: Tensor, y: Tensor) -> Tensor:
        rows = x.view(-1, H)
        weights, index = F.softmax(F.linear(rows, m.matrix.t(), m.bias), dim=1).topk(2, dim=-1)
        return (weights / weights.sum(1, keepdim=True) * index).view(B, S, 2)[:, 0].sum()

    left = remaining(body)
    assert aten.reshape.default not in left and composite.columns_linear in left


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_attention_with_its_sequence_first_keeps_samples_apart(batch_first: bool, need_weights: bool) -> None:
    """It flattens sequence, batch and heads into rows and columns at once."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend = nn.MultiheadAttention(8, 2, batch_first=batch_first)

        def forward(self, x: Tensor) -> Tensor:
            x = x if batch_first else x.transpose(0, 1)
            out: Tensor = self.attend(x, x, x, need_weights=need_weights)[0]
            return out.square().sum()

    captured = normalise(capture(Layer(), (torch.randn(4, 6, 8),)))
    roles = find_roles(captured)
    assert microbatch_obstacle(captured, roles) is None
    assert all(roles.batch[node] is not None for node in roles.batch)


def test_ops_that_mix_rows_stay_below_the_view() -> None:
    left = remaining(lambda m, x, y: F.softmax(x.view(-1, H) * m.weight, dim=0).square().sum())
    assert aten.reshape.default in left


def test_means_are_scaled_sums() -> None:
    left = remaining(lambda m, x, y: (x * m.weight).mean(1).square().mean())
    assert aten.mean.dim not in left and aten.mean.default not in left
    assert left.count(aten.sum.dim_IntList) == left.count(aten.sum.default) == 1


def test_numbers_added_to_scalars_are_terms() -> None:
    left = remaining(lambda m, x, y: 1.0 - (x * m.weight + 2.0).sum())
    assert left == [aten.mul.Tensor, aten.add.Tensor, aten.sum.default, aten.full.default, aten.sub.Tensor]


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_one_size(mode: str) -> None:
    def body(m: Model, x: Tensor, y: Tensor) -> Tensor:
        ids, table = y.clamp(min=0), m.matrix.t()
        padded = F.embedding_bag(ids, table, mode=mode, padding_idx=-1)
        flat = F.embedding_bag(ids.reshape(-1), table, torch.arange(B) * S, mode=mode)
        ragged = F.embedding_bag(ids.reshape(-1), table, ids[:, 0] * 0, mode=mode)
        return (padded * flat * m.weight).sum() + ragged.sum()

    left = remaining(body)
    assert left.count(composite.embedding_bag) == 3 and aten.arange.start_step not in left


def test_slice_writes_are_concatenations() -> None:
    def body(m: Model, x: Tensor, y: Tensor) -> Tensor:
        shifted = x.new_zeros(x.shape)
        shifted[:, 1:] = (x * m.weight)[:, :-1]
        shifted[:, 0] = 3.0
        return shifted.square().sum()

    left = remaining(body)
    assert not any("scatter" in str(target) for target in left)
    assert left.count(aten.cat.default) == 2


def test_concatenation_with_nothing() -> None:
    left = remaining(lambda m, x, y: torch.cat([x[..., :H] * m.weight, x[..., H:]], -1).sum())
    assert aten.cat.default not in left


@pytest.mark.parametrize(
    "cut",
    [
        lambda y: y.split([2, 4, 1], -1),
        lambda y: y.split(3, 2),
        lambda y: y.chunk(2, dim=-1),
        lambda y: (y[..., :3], y[..., -4:]),
    ],
)
def test_a_fused_layer_becomes_several(cut: Callable[[Tensor], Sequence[Tensor]]) -> None:
    left = remaining(lambda m, x, y: sum(t.exp().sum() for t in cut(F.linear(x, m.other, m.bias))))
    assert left.count(aten.linear.default) == len(cut(torch.zeros(B, S, C)))
    by_columns = remaining(lambda m, x, y: sum(t.exp().sum() for t in cut(F.linear(x, m.matrix.t(), m.bias))))
    assert by_columns.count(composite.columns_linear) == len(cut(torch.zeros(B, S, C)))
    left += by_columns
    assert not {aten.split.Tensor, aten.split_with_sizes.default, aten.slice.Tensor} & set(left)


@pytest.mark.parametrize(
    ("cut", "num"),
    [
        (lambda y: y.view(B, S, 2, 2, 2).permute(2, 0, 3, 1, 4).unbind(0), 2),
        (lambda y: y.view(B * S, 4, 2).split([2, 1, 1], 1), 3),
        (lambda y: (y.view(B, S, 4, 2)[:, :, :-2], y.view(B, S, 4, 2)[:, :, -2], y.view(B, S, 4, 2)[:, :, [-1]]), 3),
        (lambda y: y.unflatten(-1, (2, 4)).unsqueeze(0).transpose(0, -2).squeeze(-2).contiguous(), 2),
    ],
)
def test_a_fused_layer_seen_through_views_becomes_several(cut: Callable[[Tensor], Sequence[Tensor]], num: int) -> None:
    """As (3, heads, size), with heads for keys and values beside those for queries, or stacked first."""

    def body(m: Model, x: Tensor, y: Tensor) -> Tensor:
        parts = cut(F.linear(x, m.square, m.weight))
        return sum((n + 1) * parts[n].exp().mean() for n in range(len(parts)))  # type: ignore[return-value]

    assert remaining(body).count(aten.linear.default) == num


@pytest.mark.parametrize(
    "body",
    [
        lambda m, x, y: F.linear(x, m.square).view(B, S, 2, 4).transpose(1, 2).chunk(2, -1)[0].sum(),  # major heads
        lambda m, x, y: F.linear(x, m.other)[..., :3].sum(),  # part of the result is not used
        lambda m, x, y: sum(t.sum() for t in F.linear(x, m.other).split(3, -1)) + m.other.sum(),  # used elsewhere too
        lambda m, x, y: F.linear(x, m.other)[..., ::2].sum() + F.linear(x, m.other)[..., 1::2].sum(),
    ],
)
def test_a_layer_that_is_not_fused_stays(body: Callable[..., Tensor]) -> None:
    assert remaining(body).count(aten.linear.default) == 1


def test_the_entry_of_each_row_is_gathered() -> None:
    left = remaining(lambda m, x, y: (x * m.weight)[torch.arange(B), y.argmax(-1) - 2].sum())
    assert aten.gather.default in left and aten.index.Tensor not in left
    assert aten.index.Tensor in remaining(lambda m, x, y: (x * m.weight)[y[:, 0].abs() % B, y[:, 1].abs() % S].sum())
