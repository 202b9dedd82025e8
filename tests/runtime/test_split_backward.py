"""Backward to the inputs and then to the weights gives what one backward gives, and leaves nothing behind."""

from __future__ import annotations

import gc
import weakref
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.ir.ops.composite import moe
from autopar.ir.primitives.collectives import apply, communicates_backward
from autopar.ir.rematerialisation import Remat
from autopar.runtime.rematerialised import rematerialised
from autopar.runtime.split_backward import backward_to_inputs
from tests.runtime.held import held_bytes


class Stage(nn.Module):
    """A tied weight, an input that passes through, an output that depends on no input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.table = nn.Embedding(4, 8)
        self.tied = nn.Parameter(torch.randn(8, 8) / 3)

    def forward(self, x: Tensor, skip: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        h = self.norm(F.gelu(self.up(x)) @ self.tied + skip)
        h = self.down(h) @ self.tied.T
        return h, skip, self.table(ids), h.sum() + self.table(ids).sum()


def received() -> tuple[Tensor, Tensor]:
    x, skip = torch.linspace(0, 1, 24).view(3, 8), torch.linspace(1, 0, 24).view(3, 8)
    return x.requires_grad_(), skip.requires_grad_()


IDS = torch.tensor([0, 1, 3])


def test_two_parts_make_a_whole() -> None:
    whole, split = Stage(), Stage()
    x, skip = received()
    outputs = whole(x, skip, IDS)
    torch.autograd.backward(outputs, [torch.cos(o.detach()) for o in outputs])

    fired: list[str] = []
    for name, parameter in split.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    y, again = received()
    outputs = split(y, again, IDS)
    weights = backward_to_inputs(outputs, [torch.cos(o.detach()) for o in outputs], (y, again))
    torch.testing.assert_close((y.grad, again.grad), (x.grad, skip.grad))
    # What several places of the graph read is not left for later, nor are vectors.
    assert sorted(fired) == ["down.bias", "norm.bias", "norm.weight", "table.weight", "tied", "up.bias"]
    weights.run()
    assert sorted(fired) == sorted(name for name, _ in split.named_parameters()), "each once"
    for mine, wanted in zip(split.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, wanted.grad)


def test_the_graph_goes_with_the_second_part() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    x, _ = received()
    saved: list[weakref.ref[Tensor]] = []

    def pack(value: Tensor) -> Tensor:
        value = value.clone()
        saved.append(weakref.ref(value))
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        output = net(x)
    weights = backward_to_inputs([output], [torch.ones_like(output)], [x])
    output.detach_()
    assert any(ref() is not None for ref in saved)
    weights.run()
    gc.collect()
    assert not any(ref() is not None for ref in saved)


def test_experts_compute_each_gradient_in_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    w_up, w_down = torch.randn(3, 16, 8, requires_grad=True), torch.randn(3, 8, 16, requires_grad=True)
    x = torch.randn(12, 8, requires_grad=True)
    index = torch.tensor([[0, 1], [1, 2]]).repeat(6, 1)
    weight = torch.rand(12, 2)

    def forward() -> Tensor:
        return moe(x, index, weight, w_up, w_down, activation="silu", gated=False)

    leaves = x, w_up, w_down
    wanted = torch.autograd.grad(forward().square().sum(), leaves)
    products: list[tuple[int, ...]] = []
    mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, out: products.append(tuple(out.shape)) or mm(a, b, out=out))
    output = forward()
    weights = backward_to_inputs([output], [2 * output.detach()], [x])
    assert len(products) == 6 and w_up.grad is w_down.grad is None
    weights.run()
    assert len(products) == 12, "none is computed twice"
    torch.testing.assert_close([leaf.grad for leaf in leaves], list(wanted))


class Scaled(torch.autograd.Function):
    """``x * weight``; its backward is noted as one that communicates."""

    sent: ClassVar[list[str]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, name: str) -> Tensor:
        communicates_backward(ctx)
        ctx.save_for_backward(x, weight)
        ctx.name = name
        return x.clone() if weight is None else x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        Scaled.sent.append(ctx.name)
        return grad if weight is None else grad * weight, None if weight is None else grad * x, None


def test_an_op_that_communicates_backward_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    monkeypatch.setattr(Scaled, "sent", sent)
    torch.manual_seed(0)
    x, on_line, free, shared, far, alone = (torch.randn(4, 4, requires_grad=True) for _ in range(6))

    def forward() -> list[Tensor]:
        # No input reaches this branch: two places read ``shared``, and ``far`` and ``free`` lie behind the ops.
        deep = apply(Scaled, shared.sin() @ far, None, "deep")
        branch = apply(Scaled, deep @ free, None, "branch")
        other = apply(Scaled, alone.cos(), None, "other")
        return [apply(Scaled, x.sin(), on_line, "line") @ branch + other, deep.sum()]

    leaves = x, on_line, free, shared, far, alone
    wanted = torch.autograd.grad(sum((o.square().sum() for o in forward()), torch.zeros(())), leaves)
    sent.clear()
    outputs = forward()
    weights = backward_to_inputs(outputs, [2 * o.detach() for o in outputs], [x])
    assert sorted(sent) == ["branch", "deep", "line"] and alone.grad is None and on_line.grad is not None
    weights.run()
    assert sorted(sent) == ["branch", "deep", "line", "other"], "each once"
    torch.testing.assert_close([leaf.grad for leaf in leaves], list(wanted))


def test_frozen_weights_and_inputs() -> None:
    net = nn.Linear(8, 8).requires_grad_(False)
    x, _ = received()
    output = net(x)
    backward_to_inputs([output], [torch.ones_like(output)], [x]).run()
    assert x.grad is not None and net.weight.grad is None
    net.requires_grad_(True)
    output = net(x.detach())
    backward_to_inputs([output], [torch.ones_like(output)], [x]).run()
    torch.testing.assert_close(net.bias.grad, torch.full((8,), 3.0))


class Layer(nn.Module):
    """Counts its forwards."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)
        self.calls = 0

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        self.calls += 1
        h = F.dropout(F.gelu(self.up(self.norm(x))), 0.5)
        return x + self.down(h * skip)


LEVELS: tuple[Remat, ...] = ("none", "selective", "alternate", "full")


@pytest.mark.parametrize("remat", LEVELS)
def test_two_parts_recompute_once(remat: Remat) -> None:
    layer = Layer()
    x, skip = received()
    torch.manual_seed(7)
    layer(x, skip).square().sum().backward()
    wanted = [p.grad for p in layer.parameters()]
    layer.zero_grad()
    layer.calls = 0
    y, again = received()
    torch.manual_seed(7)
    output = rematerialised(layer, remat=remat, preserve_rng_state=True, splits_backward=True)(y, again)
    random = torch.get_rng_state()
    weights = backward_to_inputs([output], [2 * output.detach()], [y, again])
    assert layer.up.weight.grad is layer.down.weight.grad is None
    torch.testing.assert_close((y.grad, again.grad), (x.grad, skip.grad))
    weights.run()
    torch.testing.assert_close([p.grad for p in layer.parameters()], wanted)
    assert layer.calls == (1 if remat == "none" else 2)
    assert torch.equal(torch.get_rng_state(), random), "what is drawn next does not change"


@pytest.mark.parametrize("remat", LEVELS)
def test_between_its_parts_is_what_products_read(remat: Remat) -> None:
    """Of a layer: the inputs of two products, and the gradients of their results."""
    layer, rows = Layer(256), 1024
    tensor = rows * 256 * 4
    x, skip = (torch.randn(rows, 256, requires_grad=True) for _ in range(2))
    before = held_bytes()
    output = rematerialised(layer, remat=remat, preserve_rng_state=True, splits_backward=True)(x, skip)
    weights = backward_to_inputs([output], [torch.ones_like(output)], [x, skip])
    output.detach_()
    x.grad = skip.grad = None
    assert held_bytes() - before == pytest.approx((4 + 1) * tensor, rel=0.02), "and the output"
    weights.run()
    del weights
    assert held_bytes() - before == pytest.approx(tensor, rel=0.6)


def test_a_stage_without_an_input_recomputes_in_its_second_part() -> None:
    layer = Layer()
    x, skip = (value.detach() for value in received())
    layer(x, skip)
    torch.manual_seed(7)
    layer(x, skip).square().sum().backward()
    wanted = [p.grad for p in layer.parameters()]
    layer.zero_grad()
    layer.calls = 0
    torch.manual_seed(7)
    output = rematerialised(layer, remat="full", preserve_rng_state=True, splits_backward=True)(x, skip)
    weights = backward_to_inputs([output], [2 * output.detach()], [])
    assert layer.calls == 1 and all(p.grad is None for p in layer.parameters())
    weights.run()
    assert layer.calls == 2
    torch.testing.assert_close([p.grad for p in layer.parameters()], wanted)


def test_a_forward_that_saves_otherwise_is_an_error() -> None:
    calls = 0

    def changing(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return x.sin() if calls > 1 else x.sin().cos()

    x = torch.ones(3, requires_grad=True)
    output = rematerialised(changing, remat="full", preserve_rng_state=False, splits_backward=True)(x)
    with pytest.raises(RuntimeError, match="saved 1 tensors for backward, the first one 2: it does not run the same"):
        backward_to_inputs([output], [torch.ones_like(output)], [x])
