"""The proof accepts what the passes make, and refuses programs that compute something else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.ir.capture.capture import capture
from autopar.ir.errors import UnprovenProgram
from autopar.ir.graph import CapturedModel
from autopar.passes.normalise import normalise
from autopar.passes.verify.placements import verify_placements
from autopar.search.problem.forbidden_placements import Forbidden
from benchmarks.models import CASES as MODELS
from benchmarks.models import build
from tests.parity import EXPERT_PLANS, PLANS
from tests.passes.verify.mutations import mutants
from tests.passes.verify.programs import captured_case, programs_of


class Tower(nn.Module):
    """Layers of norm, attention and an MLP around a residual, with a vocabulary at both ends."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(16, 32, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(2, (4, 4)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        a = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def tower(request: pytest.FixtureRequest) -> CapturedModel:
    torch.manual_seed(0)
    tokens = torch.randint(0, 32, (8, 16))
    return normalise(capture(Tower(tied=request.param), (tokens, tokens.clone())), check=False)


TOWER_PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "dp2-m2": (2, {"dp": 2, "zero": 1, "num_microbatches": 2}),
    "tp2": (2, {"tp": 2, "sp": False}),
    "tp2-sp": (2, {"tp": 2, "sp": True}),
    "cp2": (2, {"cp": 2}),
    "dp2-tp2": (4, {"dp": 2, "tp": 2, "zero": 3}),
    "pp2": (2, {"pp": 2, "num_microbatches": 4}),
    "tp2-pp2": (4, {"tp": 2, "pp": 2, "num_microbatches": 2}),
}
CASES = ("merged_heads_with_bias", "stacked_experts", "state_running_mean", "recurrent", "unused_parameter")


@pytest.mark.parametrize("name", TOWER_PLANS)
def test_programs_of_a_transformer_are_proved(tower: CapturedModel, name: str) -> None:
    plan, programs = programs_of(tower, *TOWER_PLANS[name])
    verify_placements(tower, programs, plan)


@pytest.mark.parametrize("plan", ["zero3", "tp2", "dp2-tp2"])
@pytest.mark.parametrize("name", CASES)
def test_programs_of_other_models_are_proved(name: str, plan: str) -> None:
    captured = captured_case(name)
    found, programs = programs_of(captured, *PLANS[plan])
    verify_placements(captured, programs, found)


@pytest.mark.parametrize("plan", EXPERT_PLANS)
def test_programs_of_experts_are_proved(plan: str) -> None:
    captured = captured_case("stacked_experts")
    found, programs = programs_of(captured, *EXPERT_PLANS[plan])
    verify_placements(captured, programs, found)


@pytest.mark.parametrize(("axis", "zero"), [("tp", {"zero": 0}), ("cp", {"zero": 1, "shard": 4})])
def test_programs_of_experts_over_other_ranks_are_proved(axis: str, zero: dict[str, int]) -> None:
    """And refused if tokens travel over one of their axes alone."""
    pytest.importorskip("transformers")
    case = MODELS["qwen3_moe"]
    captured = normalise(capture(build(case), case.batch(0)))
    others = tuple(
        Forbidden(pattern="*/moe", placement=((name, choice),))
        for name in ("ep", axis)
        for choice in ("experts", "d0", "d1", None)
    )
    plan, (program,) = programs_of(captured, 4, {axis: 2, "ep": 4, "forbidden": others, **zero})
    verify_placements(captured, (program,), plan)
    (joint,) = program.joint_groups
    assert set(joint.split(",")) == {"ep", axis}
    for block in program.blocks:
        for node in block.graph.nodes:
            if "dispatch_groups" in node.kwargs:
                node.kwargs = {**node.kwargs, "dispatch_groups": ("ep",)}
    with pytest.raises(UnprovenProgram, match="dispatch_groups"):
        verify_placements(captured, (program,), plan)


def test_a_gradient_that_is_not_sent_back_is_refused(tower: CapturedModel) -> None:
    plan, (first, second) = programs_of(tower, *TOWER_PLANS["pp2"])
    kept = tuple(replace(spec, has_gradient=False) for spec in second.received)
    with pytest.raises(UnprovenProgram, match="which it does not send back"):
        verify_placements(tower, (replace(first, sent=kept), replace(second, received=kept)), plan)


def test_zero_gathers_what_a_block_alone_reads(tower: CapturedModel) -> None:
    plan, (program,) = programs_of(tower, *TOWER_PLANS["dp2-tp2"])
    first, second, *rest = program.zero_units
    swapped = (replace(first, block=second.block), replace(second, block=first.block), *rest)
    with pytest.raises(UnprovenProgram, match="not what alone reads it"):
        verify_placements(tower, (replace(program, zero_units=swapped),), plan)


# What no mutant of these kinds leaves as it was, whatever it was done to.
ALWAYS_WRONG = (
    "collective dropped",
    "collective doubled",
    "collective on another axis",
    "collective of another kind",
    "collective of another dimension",
    "another rank's piece",
    "groups left out",
    "groups of another axis",
    "gradient not summed",
    "gradient summed twice",
    "gradient divided",
    "gradient divided not",
    "gradient divided twice",
    "another tensor sent",
    "division dropped",
    "division doubled",
    "loss summed otherwise",
    "all_reduce added",
)


@pytest.mark.parametrize("name", ["dp2-m2", "tp2-sp", "dp2-tp2", "tp2-pp2"])
def test_mutants_are_refused(tower: CapturedModel, name: str) -> None:
    plan, programs = programs_of(tower, *TOWER_PLANS[name])
    accepted, count = [], 0
    for mutant in _few(mutants(programs, plan.pipelining)):
        count += 1
        try:
            mutant.verify(tower, plan)
        except UnprovenProgram:
            continue
        accepted.append(str(mutant))
    assert count >= 8
    assert not accepted


def _few(every: Iterator[Any]) -> Iterator[Any]:
    """Three mutants of each kind that is always wrong."""
    seen: dict[str, int] = {}
    for mutant in every:
        if mutant.kind in ALWAYS_WRONG and seen.get(mutant.kind, 0) < 3:
            seen[mutant.kind] = seen.get(mutant.kind, 0) + 1
            yield mutant


def test_a_message_names_the_op_its_line_and_both_placements(tower: CapturedModel) -> None:
    plan, programs = programs_of(tower, *TOWER_PLANS["tp2-sp"])
    every = mutants(programs, plan.pipelining)
    mutant = next(m for m in every if m.kind == "collective dropped" and ".all_gather" in m.text)
    with pytest.raises(UnprovenProgram) as error:
        mutant.verify(tower, plan)
    text = str(error.value)
    assert "stage 0, block" in text
    assert "at test_placements.py:" in text
    assert "on tp, which no factor of the op allows" in text
    assert "a defect of autopar" in text


def test_a_gradient_that_nobody_sums_is_named(tower: CapturedModel) -> None:
    plan, programs = programs_of(tower, *TOWER_PLANS["dp2-tp2"])
    name, layout = next((n, p) for n, p in programs[0].parameters.items() if p.partial_axes)
    left = replace(layout, partial_axes=(), zero_axes=())
    changed = replace(programs[0], parameters={**programs[0].parameters, name: left})
    with pytest.raises(UnprovenProgram, match=rf"gradient of parameter {name} is a summand .*nobody sums it"):
        verify_placements(tower, (changed,), plan)


def test_a_conjugate_that_sums_twice_is_named(tower: CapturedModel) -> None:
    plan, programs = programs_of(tower, *TOWER_PLANS["tp2-sp"])
    mutant = next(m for m in mutants(programs, plan.pipelining) if m.kind == "wrong conjugate")
    with pytest.raises(UnprovenProgram, match=r"the gradient of its result is .* its backward expects"):
        mutant.verify(tower, plan)
