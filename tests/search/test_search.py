"""The search on captured models: constraints, predictions, messages."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from autopar.cost_model.catalogue import make_cluster
from autopar.cost_model.communication.collectives import Fabric
from autopar.ir.capture.capture import capture
from autopar.ir.errors import InfeasiblePlan
from autopar.ir.graph import CapturedModel
from autopar.ir.mesh import Mesh, MeshAxis
from autopar.ir.plan import Plan
from autopar.load_model import load_model_file
from autopar.passes.normalise import normalise
from autopar.search.api import assignment_of, estimate_captured, predict_plan, search_captured
from autopar.search.assign.instance import value
from autopar.search.assign.solve import solve
from autopar.search.pricing.block_prices import evaluate
from autopar.search.pricing.build_instance import Weights, build
from autopar.search.pricing.price_cache import MeshPrices, OpPrices
from autopar.search.pricing.pricing import Pricing
from autopar.search.problem.allowed_choices import Choices, Rules
from autopar.search.problem.constraints import Constraints
from autopar.search.problem.workload import PRELUDE, Workload

RESNET = Path(__file__).parents[2] / "examples" / "resnet50.py"


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width: int = 64, num_layers: int = 4, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(num_layers))
        self.head = nn.Linear(width, 128, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), target.flatten())


def captured(width: int = 64, num_layers: int = 4, tied: bool = False, batch: int = 16) -> CapturedModel:
    with torch.device("meta"):
        model = Model(width, num_layers, tied)
        tokens = torch.zeros(batch, 32, dtype=torch.long)
        return normalise(capture(model, (tokens, tokens.clone())))


@pytest.fixture(scope="module")
def small() -> CapturedModel:
    return captured()


@pytest.fixture(scope="module")
def tied() -> CapturedModel:
    return captured(num_layers=2, tied=True)


def pricing_of(workload: Workload, mesh: Mesh, num_microbatches: int = 1) -> Pricing:
    cluster = make_cluster("a100-80gb", mesh.size, min(8, mesh.size))
    ops = OpPrices(workload, cluster)
    moves = MeshPrices(Fabric(cluster, mesh), ops.codes.moves(len(mesh)))
    return Pricing(ops=ops, moves=moves, num_microbatches=num_microbatches)


@pytest.mark.parametrize("which", ["small", "tied"])
def test_objective_is_the_price_of_the_blocks(which: str, request: pytest.FixtureRequest) -> None:
    """The abstract instance and the block by block evaluation are two ways to the same number."""
    workload = Workload.of(request.getfixturevalue(which), "fp32")
    mesh = Mesh((MeshAxis("free0", 2), MeshAxis("free1", 2)))
    pricing = pricing_of(workload, mesh, 2)
    built = build([pricing], Rules(choices=Choices(workload), mesh=mesh, constraints=Constraints()), Weights(sync=0.0))

    @settings(max_examples=25)
    @given(st.randoms(use_true_random=False))
    def check(random) -> None:
        labelling = tuple(random.randrange(n) for n in built.instance.num_labels)
        priced = evaluate(pricing, built.assignments(labelling), shared_once=True)
        blocks = sum(b.compute.total_s + b.communication.total_s for b in priced.blocks)
        relaxed = sum(b.optimiser_s for b in priced.blocks)
        prelude = [t for t in workload.transfers if PRELUDE in t.blocks]
        if not prelude and not workload.repetition.prelude:
            assert value(built.instance, labelling) == pytest.approx(2 * blocks + relaxed, rel=1e-6)
        else:
            assert value(built.instance, labelling) >= (2 * blocks + relaxed) * (1 - 1e-6)

    check()


def test_inner_answer_equals_brute_force() -> None:
    workload = Workload.of(captured(num_layers=1), "fp32")
    mesh = Mesh((MeshAxis("free0", 4),))
    pricing = pricing_of(workload, mesh)
    built = build(
        [pricing],
        Rules(choices=Choices(workload), mesh=mesh, constraints=Constraints(sequence_parallel=False)),
        Weights(),
    )
    solution = solve(built.instance)
    options = [range(n) for n in built.instance.num_labels]
    assert len(list(product(*options))) < 200_000
    assert solution.objective == pytest.approx(min(value(built.instance, s) for s in product(*options)), rel=1e-9)


@pytest.mark.parametrize(
    "constraints",
    [
        Constraints(dp=4, tp=1),
        Constraints(tp=4),
        Constraints(tp=2, dp=2),
        Constraints(pp=2, tp=2),
        Constraints(pp=4, num_microbatches=4),
        Constraints(dp=4, zero=3),
        Constraints(dp=2, pp=2, zero=1, remat="full"),
        Constraints(cp=2, dp=2),
        Constraints(microbatch_size=2, dp=2),
        Constraints(axes=(MeshAxis("dp", 2), MeshAxis("tp", 2)), pp=1),
    ],
    ids=str,
)
def test_constraints_are_kept(small: CapturedModel, constraints: Constraints) -> None:
    plan = search_captured(small, make_cluster("a100-80gb", 4), constraints).plan
    assert plan.num_ranks == 4
    for role in ("dp", "tp", "cp"):
        if (degree := constraints.degree(role)) and degree > 1:
            assert plan.mesh[role] == degree
    if constraints.pp:
        assert plan.num_stages == constraints.pp
    if constraints.zero is not None:
        assert plan.zero == constraints.zero
    if constraints.num_microbatches:
        assert plan.batch.num_microbatches == constraints.num_microbatches
    if constraints.microbatch_size:
        assert 16 // plan.batch.num_microbatches // plan.data_parallel_size == constraints.microbatch_size
    if constraints.remat == "full":
        assert all(stage.remat["full"] == stage.last - stage.first + 1 for stage in plan.stages)
    assert Plan.from_yaml(plan.to_yaml()) == plan


def test_a_plan_is_predicted_as_the_search_predicted_it(small: CapturedModel) -> None:
    cluster = make_cluster("a100-80gb", 4)
    for constraints in (Constraints(), Constraints(pp=2, tp=2), Constraints(dp=4, zero=2, num_microbatches=2)):
        found = search_captured(small, cluster, constraints)
        again = predict_plan(small, cluster, Plan.from_yaml(found.plan.to_yaml()))
        assert again.step_time_s == pytest.approx(found.predicted.step_time_s, rel=1e-9)
        assert again.peak_bytes == pytest.approx(found.predicted.peak_bytes, rel=1e-9)
        assert sum(found.predicted.breakdown_s.values()) == pytest.approx(found.predicted.step_time_s, rel=0.02)


def test_the_search_is_never_worse_than_an_estimate_and_deterministic(small: CapturedModel) -> None:
    cluster = make_cluster("a100-80gb", 4)
    best = search_captured(small, cluster)
    assert 0 <= best.optimality_gap < 1
    assert search_captured(small, cluster).plan == best.plan
    for degrees in ({}, {"tp": 4}, {"tp": 2, "pp": 2}):
        estimate = estimate_captured(small, cluster, Constraints(**degrees))
        assert best.predicted.step_time_s <= estimate.predicted.step_time_s * 1.006


def test_assignment_of_a_plan(small: CapturedModel) -> None:
    workload = Workload.of(small, "fp32")
    plan = search_captured(small, make_cluster("a100-80gb", 4), Constraints(tp=2, dp=2)).plan
    assignment = assignment_of(workload, plan)
    assert assignment[0] == tuple("batch" if name in plan.inputs else None for name in plan.mesh)
    assert len(assignment) == len(workload.clusters.clusters)


def test_less_memory_makes_other_plans(small: CapturedModel) -> None:
    cluster = make_cluster("a100-80gb", 4)
    free = search_captured(small, cluster, Constraints(tp=1, pp=1))
    tight = search_captured(small, cluster.with_memory(int(free.predicted.peak_bytes * 0.8)), Constraints(tp=1, pp=1))
    assert tight.predicted.peak_bytes <= free.predicted.peak_bytes * 0.8
    assert tight.predicted.step_time_s >= free.predicted.step_time_s


def test_nothing_fits(small: CapturedModel) -> None:
    with pytest.raises(InfeasiblePlan) as caught:
        search_captured(small, make_cluster("a100-80gb", 4).with_memory(100_000))
    message = str(caught.value)
    assert "nothing fits 4 x" in message and "GiB per rank; budget is" in message
    assert "--gpus" in message and "free" not in message and " 0 GiB" not in message
    assert "budget is 9.26e-05 GiB" in message
    with pytest.raises(InfeasiblePlan, match="largest: layers"):
        search_captured(small, make_cluster("a100-80gb", 4).with_memory(100_000), Constraints(zero=0))


@pytest.mark.parametrize(
    ("constraints", "words"),
    [
        (Constraints(dp=3), "does not divide the 4 ranks"),
        (Constraints(dp=4, tp=2), "does not divide the 4 ranks"),
        (Constraints(num_microbatches=3), "global batch of 16 does not divide"),
        (Constraints(zero=4), "expected 0, 1, 2 or 3"),
        (Constraints(pp=0), "expected a positive number"),
        (Constraints(axes=(MeshAxis("dp", 3),)), "has 3 ranks; there are 4"),
        (Constraints(dp=2, tp=1, cp=1, ep=1, pp=1), "leave one degree"),
        (Constraints(dp=2, num_microbatches=2, microbatch_size=3), "make 12 samples"),
    ],
)
def test_bad_constraints(small: CapturedModel, constraints: Constraints, words: str) -> None:
    with pytest.raises(InfeasiblePlan, match=words):
        search_captured(small, make_cluster("a100-80gb", 4), constraints)


def test_no_baseline_is_faster(small: CapturedModel) -> None:
    roomy = search_captured(small, make_cluster("a100-80gb", 8, 4))
    names = [baseline.name for baseline in roomy.baselines]
    assert {"DDP", "FSDP, ZeRO-3", "HSDP, ZeRO-3", "tensor parallel"} <= set(names)
    times = [baseline.step_time_s for baseline in roomy.baselines]
    assert all(time is not None and time >= roomy.predicted.step_time_s for time in times)
    tight = search_captured(small, make_cluster("a100-80gb", 8, 4).with_memory(int(roomy.predicted.peak_bytes * 0.4)))
    ddp = next(baseline for baseline in tight.baselines if baseline.name == "DDP")
    assert ddp.step_time_s is None or (ddp.at_least and ddp.step_time_s > tight.predicted.step_time_s)


def test_a_mesh_of_too_many_axes_is_refused() -> None:
    workload = Workload.of(captured(num_layers=1), "fp32")
    mesh = Mesh(tuple(MeshAxis(f"free{number}", 2) for number in range(6)))
    with pytest.raises(InfeasiblePlan, match="6 axes cannot be planned; expected at most 5"):
        pricing_of(workload, mesh)


@pytest.mark.parametrize("num_gpus", [2, 8])
def test_a_simpler_plan_is_not_taken_where_a_baseline_is_faster(num_gpus: int) -> None:
    """Without ZeRO the optimiser has more to do, by less than the search cares to know."""
    source = load_model_file(str(RESNET))
    model = normalise(capture(source.meta_model(), source.meta_inputs(256 * num_gpus)))
    found = search_captured(model, make_cluster("h100-sxm", num_gpus), Constraints(precision="bf16"))
    completed = [one for one in found.baselines if not one.at_least and one.step_time_s is not None]
    assert completed
    assert all(one.step_time_s >= found.predicted.step_time_s * (1 - 1e-9) for one in completed)
