"""A block compiled for a split backward: the numbers of one piece, products of weights last, nothing left over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from autopar.ir.ops.composite import attention, moe
from autopar.ir.ops.expert_ffn import recorded_loads
from autopar.ir.rematerialisation import Remat
from autopar.runtime.block_parts import BlockParts, Part, parts_of
from autopar.runtime.rematerialised import mark, rematerialised
from autopar.runtime.split_backward import backward_to_inputs
from autopar.runtime.split_compiled import MOST_SHAPES, compile_split_block
from tests.runtime.held import held_bytes

LEVELS: tuple[Remat, ...] = ("none", "selective", "alternate", "full")
WIDTH = 64


def layer(w0: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, w4: Tensor, w5: Tensor, x0: Tensor, x1: Tensor) -> Any:
    """What the block is given, w by w, and then its inputs."""
    h = F.gelu(F.linear(F.layer_norm(x0, (WIDTH,), w0, w1), w2, w3))
    return x0 + F.linear(h * x1, w4, w5), x1


def weights() -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(WIDTH,), (WIDTH,), (WIDTH, WIDTH), (WIDTH,), (WIDTH, WIDTH), (WIDTH,)]
    return [(torch.randn(shape) / 8).requires_grad_() for shape in shapes]


def inputs(rows: int = 12) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(rows, WIDTH, requires_grad=True), torch.rand(rows, WIDTH, requires_grad=True)


fx.wrap("moe")
fx.wrap("attention")


def compiled(function: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    module = fx.symbolic_trace(function)
    mark(module.graph, remat, compiled=False)
    module.recompile()
    wrap = partial(rematerialised, remat=remat, preserve_rng_state=False, splits_backward=True)
    return compile_split_block(module, wrap)


def whole(function: Callable[..., Any], leaves: Sequence[Tensor], *others: Tensor) -> list[Tensor]:
    results = function(*leaves, *others)
    return list(torch.autograd.grad(results, leaves, [torch.cos(result.detach()) for result in results]))


@pytest.mark.parametrize("remat", LEVELS)
def test_two_parts_make_a_whole(remat: Remat) -> None:
    run, state, (x, skip) = compiled(layer, remat), weights(), inputs()
    wanted = whole(layer, [*state, x, skip])
    for _ in range(2):
        results = run(*state, x, skip)
        later = backward_to_inputs(results, [torch.cos(result.detach()) for result in results], (x, skip))
        assert [value.ndim for value in state if value.grad is None] == [2, 2], "vectors have theirs"
        torch.testing.assert_close([x.grad, skip.grad], wanted[-2:])
        later.run()
        torch.testing.assert_close([value.grad for value in state], wanted[:-2])
        for value in (*state, x, skip):
            value.grad = None


@pytest.mark.parametrize("remat", ["none", "full"])
def test_between_its_parts_is_what_products_read(remat: Remat) -> None:
    """The inputs of two products, and the gradients of their results."""
    rows = 1024
    tensor = rows * WIDTH * 4
    run, state, (x, skip) = compiled(layer, remat), weights(), inputs(rows)
    for warm in (True, False):
        before = held_bytes()
        output, again = run(*state, x, skip)
        later = backward_to_inputs([output, again], [torch.ones_like(output), torch.zeros_like(again)], [x, skip])
        output.detach_()
        del again
        x.grad = skip.grad = None
        if not warm:
            assert held_bytes() - before == pytest.approx((4 + 1) * tensor, rel=0.1), "and the output"
        later.run()
        del later, output
        assert warm or held_bytes() - before == pytest.approx(0, abs=0.1 * tensor)


def test_in_one_backward_nothing_waits() -> None:
    run, state, (x, skip) = compiled(layer, "full"), weights(), inputs()
    wanted = whole(layer, [*state, x, skip])
    results = run(*state, x, skip)
    torch.autograd.backward(results, [torch.cos(result.detach()) for result in results])
    torch.testing.assert_close([value.grad for value in (*state, x, skip)], wanted)
    held: list[dict[str, Tensor]] = results[0].grad_fn.values  # type: ignore[attr-defined]  # of the node of a block
    assert not held


def test_a_first_stage() -> None:
    """No input takes a gradient: all of it comes in W."""
    state = weights()
    x, skip = (value.detach() for value in inputs())
    run = compiled(layer, "none")
    wanted = whole(lambda *w: run_layer(w, x, skip), state)
    output, _ = run(*state, x, skip)
    later = backward_to_inputs([output], [torch.cos(output.detach())], [])
    later.run()
    torch.testing.assert_close([value.grad for value in state], wanted)


def run_layer(state: Sequence[Tensor], x: Tensor, skip: Tensor) -> list[Tensor]:
    return [layer(*state, x, skip)[0]]


def tied(w0: Tensor, x0: Tensor) -> Any:
    return (x0 @ w0,)


@pytest.mark.parametrize("has_input", [True, False])
def test_a_weight_of_two_blocks(has_input: bool) -> None:
    """Two branches reach it, so its gradient comes in I, as it does without a compiler."""
    run = compiled(tied, "none")
    torch.manual_seed(0)
    shared, own = (torch.randn(WIDTH, WIDTH, requires_grad=True) for _ in range(2))
    x = torch.randn(12, WIDTH, requires_grad=has_input)
    leaves = [shared, own, x] if has_input else [shared, own]
    wanted = whole(lambda *_: tied(shared, tied(own, tied(shared, x)[0])[0]), leaves)
    (output,) = run(shared, *run(own, *run(shared, x)))
    later = backward_to_inputs([output], [torch.cos(output.detach())], [x] if has_input else [])
    later.run()
    torch.testing.assert_close([leaf.grad for leaf in leaves], wanted)


def reads_values(w0: Tensor, x0: Tensor, x1: Tensor) -> Any:
    return (torch.ops.aten.masked_select(x0, x1) * w0,)


def test_what_depends_on_values_runs_as_it_is() -> None:
    run, weight, (x, _) = compiled(reads_values, "none"), torch.ones((), requires_grad=True), inputs()
    (output,) = run(weight, x, x > 0)
    backward_to_inputs([output], [torch.ones_like(output)], [x]).run()
    assert output.shape == ((x > 0).sum(),) and torch.equal(x.grad, (x > 0).float())


def experts(w0: Tensor, w1: Tensor, x0: Tensor, x1: Tensor, x2: Tensor) -> Any:
    return (moe(x0, x1, x2, w0, w1, activation="silu", gated=False),)


def packed(w0: Tensor, x0: Tensor, x1: Tensor) -> Any:
    q = (x0 @ w0).view(1, 12, 2, -1).transpose(1, 2)
    return (attention(q, q, q, kind="causal", scale=None, documents=x1),)


def test_what_shapes_do_not_tell_runs_as_it_is() -> None:
    """On shapes alone every expert has as many rows, and a row is one document."""
    torch.manual_seed(0)
    x = torch.randn(12, WIDTH, requires_grad=True)
    state = [torch.randn(3, 16, WIDTH, requires_grad=True), torch.randn(3, WIDTH, 16, requires_grad=True)]
    index = torch.tensor([[0, 1], [1, 2]]).repeat(6, 1)
    wanted = whole(lambda *leaves: experts(*leaves, index, torch.ones(12, 2)), [*state, x])
    with recorded_loads() as loads:
        (output,) = compiled(experts, "none")(*state, x, index, torch.ones(12, 2))
    backward_to_inputs([output], [torch.cos(output.detach())], [x]).run()
    torch.testing.assert_close([value.grad for value in (*state, x)], wanted)
    assert [load.tolist() for load in loads] == [[6, 12, 6]]
    weight, documents = torch.randn(WIDTH, WIDTH, requires_grad=True), torch.tensor([[0] * 5 + [1] * 7])
    x.grad = None
    wanted = whole(lambda *leaves: packed(*leaves, documents), [weight, x])
    (output,) = compiled(packed, "none")(weight, x, documents)
    backward_to_inputs([output], [torch.cos(output.detach())], [x]).run()
    torch.testing.assert_close([weight.grad, x.grad], wanted)


@pytest.mark.slow
def test_no_more_shapes_are_compiled_than_it_says() -> None:
    run, state = compiled(layer, "none"), weights()
    counters = torch._dynamo.utils.counters["stats"]
    seen = []
    for rows in range(2, MOST_SHAPES + 4):
        x, skip = inputs(rows)
        results = run(*state, x, skip)
        backward_to_inputs(results, [torch.cos(result.detach()) for result in results], (x, skip)).run()
        torch.testing.assert_close(x.grad, whole(layer, [*state, x, skip])[-2])
        seen.append(counters["unique_graphs"])
    assert seen[-1] == seen[MOST_SHAPES - 1] == seen[0] + 3 * (MOST_SHAPES - 1)


def targets(part: Part) -> list[str]:
    return sorted(node.target.__name__ for node in part.graph.graph.nodes if node.op == "call_function")


def table(w0: Tensor, w1: Tensor, x0: Tensor, x1: Tensor) -> Any:
    return (F.embedding(x0, w0) @ w1 + x1,)


def test_the_parts_of_a_block() -> None:
    state = [torch.randn(16, WIDTH, requires_grad=True), torch.randn(WIDTH, WIDTH, requires_grad=True)]
    tokens, x = torch.arange(12).view(2, 6), torch.randn(2, 6, WIDTH, requires_grad=True)
    parts: BlockParts = parts_of(table, [*state, tokens, x], late=[0, 1])
    assert set(parts.late) == {0, 1} and set(parts.early) == {3}
    assert "embedding_dense_backward.default" in targets(parts.to_weights)
    assert targets(parts.to_inputs) == [] and parts.trained == (0,)
    assert len(parts.forward.makes) == 2, "the result, and what the product read"


def convolution(w0: Tensor, w1: Tensor, x0: Tensor) -> Any:
    return (F.conv2d(x0, w0, w1).relu(),)


def test_a_convolution_leaves_its_weight_for_later() -> None:
    torch.manual_seed(0)
    state = [torch.randn(4, 3, 3, 3, requires_grad=True), torch.randn(4, requires_grad=True)]
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    wanted = whole(convolution, [*state, x])
    parts: BlockParts = parts_of(convolution, [*state, x], late=[0])
    assert set(parts.late) == {0} and "convolution_backward.default" in targets(parts.to_weights)
    (output,) = compiled(convolution, "none")(*state, x)
    later = backward_to_inputs([output], [torch.cos(output.detach())], [x])
    assert state[0].grad is None
    later.run()
    torch.testing.assert_close([value.grad for value in (*state, x)], wanted)


def beside(w0: Tensor, w1: Tensor, x0: Tensor, x1: Tensor) -> Any:
    return (x0 @ w0 + x1 @ w1,)


def test_what_i_made_for_no_one_waits_for_w() -> None:
    """A block between the inputs and a table that this stage has, too: its gradient is made in I, and read in W."""
    torch.manual_seed(0)
    state = [torch.randn(WIDTH, WIDTH, requires_grad=True) for _ in range(2)]
    x = torch.randn(12, WIDTH, requires_grad=True)
    rows = torch.randn(12, WIDTH, requires_grad=True)
    wanted = whole(lambda w, v, r, x: beside(w, v, x, r.sin()), [*state, rows, x])
    (output,) = compiled(beside, "none")(*state, x, rows.sin())
    later = backward_to_inputs([output], [torch.cos(output.detach())], [x])
    assert rows.grad is None
    later.run()
    torch.testing.assert_close([value.grad for value in (*state, rows, x)], wanted)
