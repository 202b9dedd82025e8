"""What rematerialisation keeps for backward, measured, is what the cost model says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.flop_counter import FlopCounterMode

import autopar
from autopar.cost_model.catalogue import make_cluster
from autopar.cost_model.compute.flops import op_name
from autopar.cost_model.memory.activations import BlockActivations
from autopar.ir.capture.capture import capture
from autopar.ir.graph import op_nodes
from autopar.ir.lowered import blockwise
from autopar.ir.primitives.collective_counter import CollectiveCounter
from autopar.ir.sequence import Block, Sight, Span
from autopar.passes.normalise import normalise
from autopar.runtime import kept_results
from autopar.runtime.kept_results import Mark, marked
from autopar.runtime.rematerialised import mark, rematerialised
from autopar.search.api import predict_plan
from tests.end_to_end.stacks import WIDTH, Attention, FeedForward, batch, stack, tensor_parallel_plan
from tests.harness import run_ranks
from tests.runtime.held import Saved, held_bytes, kept_by_a_step

DEPTH = 6
LEVELS: dict[str, dict[str, int]] = {
    "none": {},
    "selective": {"selective": DEPTH + 2},
    "alternate": {"alternate": DEPTH + 2},
    "full": {"full": DEPTH + 2},
    "some blocks": {"full": 2, "alternate": 1, "selective": 2},
}


def _kept(block: Any, ranks: int, sequence: bool, remat: dict[str, int]) -> tuple[float, float, float, Any]:
    """Bytes kept by a forward, predicted and measured, bytes gathered in the backward, and the gradients."""
    model, inputs = stack(block, DEPTH), batch()
    plan = tensor_parallel_plan(model, ranks, sequence=sequence)
    stage = plan.stages[0]
    assert stage.last + 1 == DEPTH + 2, "embedding, blocks, head"
    stages = [stage.model_copy(update={"remat": remat})]
    plan = plan.model_copy(update={"stages": stages})
    if ranks == 1:  # no op is placed anywhere
        plan = plan.model_copy(update={"mesh": {}, "blocks": [b.model_copy(update={"ops": {}}) for b in plan.blocks]})
    parallel = autopar.parallelize(model, ranks, example_inputs=inputs, plan=plan)
    predicted = predict_plan(parallel.engine.captured, make_cluster("cpu", ranks, ranks), plan)
    parallel.step(**inputs)
    with CollectiveCounter() as counter:
        measured = kept_by_a_step(parallel, inputs)
    gathered = sum(one.sent_bytes for one in counter.select("all_gather", phase="backward"))
    return predicted.kept_bytes[0], measured, gathered, parallel.full_gradients()


def _all_kept(block: Any, ranks: int, sequence: bool) -> dict[str, tuple[float, float, float, Any]]:
    return {name: _kept(block, ranks, sequence, remat) for name, remat in LEVELS.items()}


CASES = [
    pytest.param(FeedForward, None, id="mlp-one"),
    pytest.param(Attention, True, id="attention-tp2-sp", marks=pytest.mark.slow),
    pytest.param(FeedForward, False, id="mlp-tp2", marks=pytest.mark.slow),
    pytest.param(FeedForward, True, id="mlp-tp2-sp", marks=pytest.mark.slow),
    pytest.param(Attention, None, id="attention-one", marks=pytest.mark.slow),
    pytest.param(Attention, False, id="attention-tp2", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("block", "sequence"), CASES)
def test_memory_falls_as_predicted(block: Any, sequence: bool | None) -> None:
    ranks = 1 if sequence is None else 2
    for found in run_ranks(_all_kept, ranks, block, ranks, bool(sequence)):
        for name, (predicted, measured, _, gradients) in found.items():
            assert measured == pytest.approx(predicted, rel=0.03), name
            for parameter, gradient in gradients.items():
                assert gradient.equal(found["none"][3][parameter]), (name, parameter)
        none, selective, alternate, full = (found[name][1] for name in ("none", "selective", "alternate", "full"))
        assert full < 0.5 * none and full < alternate <= selective < none
        if sequence:  # what a norm passes on is gathered anew for the backward, once a block
            assert found["selective"][2] == 2 * found["none"][2]


class TwoProducts(nn.Module):
    """Autograd keeps no result of the last product; selective rematerialisation does."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, x + self.down(self.up(x)))


def test_a_level_may_keep_more_than_autograd_does() -> None:
    found = run_ranks(_all_kept, 1, TwoProducts, 1, False)[0]
    for name, (predicted, measured, _, _) in found.items():
        assert measured == pytest.approx(predicted, rel=0.03), name
    assert found["selective"][1] > found["none"][1]


LENGTH = 48


class _OneBlock(torch.autograd.Function):
    """Attention over one block whose values are wider than its keys, which no fused kernel takes."""

    @staticmethod
    def scores() -> blockwise.Scores:
        whole = Span(0, LENGTH)
        return blockwise.Scores(0.5, Sight("causal"), Block(whole, whole, whole, whole, whole=False))

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = blockwise.forward(q, k, v, None, _OneBlock.scores())
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, lse = ctx.saved_tensors
        return blockwise.backward(grads[0], q, k, v, None, out, lse, _OneBlock.scores(), None)


@fx.wrap
def _one_block(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return _OneBlock.apply(q, k, v)


class Feed(nn.Module):
    """Two products, what is between them, and what comes after them."""

    def __init__(self, last: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.last = nn.Linear(8, 32), nn.Linear(32, 8, bias=False), last

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.down(torch.relu(self.up(x))))


@pytest.mark.parametrize(
    ("last", "unreached"),
    [
        pytest.param(lambda x: x, ["add", "linear"], id="a product's result is saved by nobody"),
        pytest.param(
            lambda x: 2 * x.view(-1, 4), ["add", "linear", "mul", "reshape", "reshape"], id="nor what scales it"
        ),
        pytest.param(lambda x: torch.sin(x), ["sin"], id="an operand is saved, the op need not run"),
        pytest.param(lambda x: torch.sigmoid(x), [], id="a result is saved"),
        pytest.param(lambda x: torch.sigmoid(x) + x, ["add"], id="a result is saved, then comes more"),
    ],
)
def test_a_second_run_ends_where_the_cost_model_says(last: Callable[[Tensor], Tensor], unreached: list[str]) -> None:
    block, x = Feed(last), torch.ones(4, 8)
    nodes = list(op_nodes(normalise(capture(block, (x,))).graph))
    found = BlockActivations.of(nodes)
    assert sorted(op_name(node) for node in found.unreached) == unreached
    assert found.ends_at is None or (found.is_past([]) and not found.is_past([found.ends_at]))
    assert BlockActivations.of(nodes, ends_early=False).unreached == frozenset()

    def flops(remat: Any) -> int:
        result = rematerialised(block, remat=remat, preserve_rng_state=False)(x.requires_grad_())
        with FlopCounterMode(display=False) as counter:
            result.sum().backward()
        return counter.get_total_flops()

    one = 2 * 4 * 8 * 32
    assert flops("full") - flops("none") == one * (1 if "linear" in unreached else 2)


def test_what_nobody_reads_is_not_a_number_the_first_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient that reads it after all shows, at each size; later steps do not take the time to write it."""
    unread = marked(torch.ops.aten.mul.Tensor, Mark(unread="all"))
    block = rematerialised(lambda x: torch.sin(unread(x, 2.0)), remat="listed", preserve_rng_state=False)
    filled, nothing = [], kept_results._Like.nothing

    def noted(like: Any, *, fill: bool) -> Tensor:
        filled.append(fill)
        return nothing(like, fill=fill)

    monkeypatch.setattr(kept_results._Like, "nothing", noted)
    x, other = torch.ones(3, requires_grad=True), torch.ones(5, requires_grad=True)
    results = [(block(own), own) for own in (x, x, other)]
    grads = [torch.autograd.grad(result.sum(), own)[0] for result, own in results]
    assert filled == [True, False, True]
    assert grads[0].isnan().all()
    assert grads[2].isnan().all()


def test_what_autocast_adds_to_a_kernel_is_not_taken_for_it() -> None:
    """A call that was one kernel is three under autocast, which casts both operands."""
    product = marked(torch.ops.aten.mm.default, Mark(kept="all"))
    x, y = (torch.randn(4, 4, requires_grad=True) for _ in range(2))

    def run(op: Any, remat: Any, narrow: bool) -> tuple[Tensor, ...]:
        block = rematerialised(lambda x, y: torch.sin(op(x, y)).float(), remat=remat, preserve_rng_state=False)
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            loss = block(x, y).sum()
        return torch.autograd.grad(loss, (x, y))

    for narrow in (False, True):
        expected = run(torch.ops.aten.mm.default, "none", narrow)
        assert all(map(torch.equal, run(product, "listed", narrow), expected))


def test_tiles_of_an_attention_are_neither_kept_nor_used_twice() -> None:
    """Their products are written to in place, so that one kept from the first run would be wrong in the second."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return _one_block(q * 2.0, k * 2.0, v * 2.0).sin()

    traced = fx.symbolic_trace(attend)
    mark(traced.graph, "selective", compiled=False)
    traced.recompile()

    def run(remat: Any) -> tuple[list[Tensor | None], int]:
        torch.manual_seed(0)
        operands = [torch.randn(2, 3, LENGTH, size, requires_grad=True) for size in (4, 4, 6)]
        saved = Saved()
        before = held_bytes()
        with saved:
            loss = rematerialised(traced, remat=remat, preserve_rng_state=False)(*operands).sum()
        kept = held_bytes() - before
        loss.backward()
        return [operand.grad for operand in operands], kept

    expected, _ = run("none")
    found, kept = run("selective")
    for grad, other in zip(found, expected, strict=True):
        assert grad is not None and other is not None and grad.equal(other)
    # The result and its log-sum-exps, and rounding, but no scores.
    assert kept < 4 * 2 * 3 * LENGTH * (6 + 1 + 6 + 1) < 4 * 2 * 3 * LENGTH * LENGTH
