"""The free search is never slower than a pinned one: what a user can pin, it finds."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from autopar.cost_model.catalogue import make_cluster
from autopar.cost_model.hardware.cluster import Cluster
from autopar.ir.capture.capture import capture
from autopar.ir.errors import InfeasiblePlan
from autopar.passes.normalise import normalise
from autopar.search.api import search_captured
from autopar.search.problem.constraints import Constraints
from autopar.search.problem.workload import Workload

WIDTHS, WORDS = (64, 256, 1024, 4096), (256, 4096)


class Chain(nn.Module):
    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
        return x.square().mean()


class Attends(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(rows, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(x)))


class Decoder(nn.Module):
    def __init__(self, width: int, depth: int, words: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(words, width), nn.Linear(width, words)
        self.layers = nn.ModuleList(Attends(width) for _ in range(depth))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    with torch.device("meta"):
        if draw(st.booleans()):
            widths = draw(st.lists(st.sampled_from(WIDTHS), min_size=2, max_size=5))
            model: nn.Module = Chain(widths)
            inputs = torch.empty(draw(st.sampled_from((16, 64, 1024))), widths[0])
        else:
            width, depth = draw(st.sampled_from(WIDTHS[:3])), draw(st.integers(1, 3))
            model = Decoder(width, depth, draw(st.sampled_from(WORDS)))
            shape = draw(st.sampled_from((8, 16, 32))), draw(st.sampled_from((32, 128, 512)))
            inputs = torch.zeros(shape, dtype=torch.int64)
    return Workload.of(normalise(capture(model, inputs)), "bf16")


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    number = draw(st.sampled_from((2, 4, 8)))
    return make_cluster(draw(st.sampled_from(("h100-sxm", "a100-80gb"))), number, draw(st.sampled_from((number, 2))))


@st.composite
def pins(draw: st.DrawFn) -> Constraints:
    """Some of what a user may pin; often together what no configuration has."""
    degrees = st.none() | st.sampled_from((1, 2, 4))
    return Constraints(
        precision="bf16",
        pp=draw(degrees),
        dp=draw(degrees),
        tp=draw(degrees),
        zero=draw(st.none() | st.integers(0, 3)),
        num_microbatches=draw(st.none() | st.sampled_from((1, 2, 4))),
        schedule=draw(st.none() | st.sampled_from(("gpipe", "1f1b", "zb-h1"))),
    )


def check(workload: Workload, cluster: Cluster, pinned: list[Constraints]) -> None:
    def search(constraints: Constraints) -> float:
        return search_captured(workload.captured, cluster, constraints, workload=workload).predicted.step_time_s

    free = search(Constraints(precision="bf16"))
    for constraints in pinned:
        try:
            seconds = search(constraints)
        except InfeasiblePlan:
            continue
        assert free <= seconds * (1 + 1e-9), constraints


UNHURRIED = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=2, derandomize=True, **UNHURRIED)
@given(workloads(), clusters().filter(lambda cluster: cluster.num_gpus <= 4), st.lists(pins(), min_size=3, max_size=3))
def test_the_free_search_is_no_slower_than_a_few_pinned_ones(
    workload: Workload, cluster: Cluster, pinned: list[Constraints]
) -> None:
    check(workload, cluster, pinned)


@pytest.mark.slow
@settings(max_examples=200, **UNHURRIED)
@given(workloads(), clusters(), st.lists(pins(), min_size=20, max_size=20))
def test_the_free_search_is_no_slower_than_pinned_ones(
    workload: Workload, cluster: Cluster, pinned: list[Constraints]
) -> None:
    check(workload, cluster, pinned)


def test_small_spaces_leave_out_no_configuration_by_an_estimate() -> None:
    """The plan that is found without ZeRO has free axes, which what baselines take says nothing certain of."""
    with torch.device("meta"):
        model, inputs = Chain([64, 64, 1024, 1024, 4096]), torch.empty(16, 64)
    workload = Workload.of(normalise(capture(model, inputs)), "bf16")
    check(workload, make_cluster("h100-sxm", 8, 2), [Constraints(precision="bf16", zero=0)])


def test_zero_stages_that_divide_nothing_are_no_faster_than_none() -> None:
    with torch.device("meta"):
        model, inputs = Chain([4096, 2048]), torch.empty(16, 4096)
    workload = Workload.of(normalise(capture(model, inputs)), "bf16")
    cluster = make_cluster("h100-sxm", 2)
    seconds = [
        search_captured(
            workload.captured, cluster, Constraints(precision="bf16", tp=2, zero=zero)
        ).predicted.step_time_s
        for zero in (0, 1, 2)
    ]
    assert seconds[0] <= min(seconds)
