"""What a block takes longer because it recomputes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from autopar.cost_model.catalogue import make_cluster
from autopar.cost_model.compute.op_time import ZERO
from autopar.cost_model.compute.recomputation import bookkeeping_time, rematerialised_s
from autopar.ir.capture.capture import capture
from autopar.ir.graph import CapturedModel
from autopar.ir.rematerialisation import LEVELS
from autopar.passes.normalise import normalise
from autopar.search.api import estimate_captured, priced_plan
from autopar.search.pricing.block_price import BlockPrice
from autopar.search.pricing.block_prices import evaluate_stages
from autopar.search.problem.constraints import Constraints
from benchmarks.models import language_batch, llama


def test_rematerialised_seconds() -> None:
    assert rematerialised_s("none", 3.0, 2.0) == 0
    assert rematerialised_s("selective", 3.0, 2.0) == 1
    assert rematerialised_s("full", 3.0, 2.0) == 3


def test_bookkeeping_is_once_forward_and_once_backward_on_a_cpu() -> None:
    cpu, gpu = (make_cluster(name, 1).device for name in ("cpu", "h100-sxm"))
    once, twice = (bookkeeping_time(count, cpu) for count in (10, 20))
    assert once.forward_s == once.backward_s > 10 * 10 * cpu.kernel_launch_s
    assert once.forward_s < twice.forward_s < 2 * once.forward_s, "a block has some, whatever its ops"
    assert bookkeeping_time(10, gpu) == ZERO
    slower = replace(cpu, kernel_launch_s=2 * cpu.kernel_launch_s)
    assert bookkeeping_time(10, slower).total_s == pytest.approx(2 * once.total_s)


@cache
def decoder() -> CapturedModel:
    return normalise(capture(llama(), language_batch(0)))


def block(gpu: str, remat: float | None = 0.5) -> BlockPrice:
    """A layer of a decoder on one device, priced at levels and with one set of tensors."""
    settings = Constraints(num_microbatches=1, remat=remat)
    cluster = make_cluster(gpu, 1)
    plan = estimate_captured(decoder(), cluster, settings).plan
    pricing, assignment, stages = priced_plan(decoder(), cluster, plan)
    return evaluate_stages(pricing, assignment, stages).blocks[1]


def test_levels_and_sets_pay_for_it() -> None:
    price = block("cpu")
    assert len(price.recomputed) == len(LEVELS) + 1
    assert price.recomputed[0] == ZERO, "nothing is recomputed"
    assert all(own.backward_s >= own.forward_s > 0 for own in price.recomputed[1:])
    plain = price.forward_s(0)
    assert [price.forward_s(level) - plain for level in range(5)] == pytest.approx(
        [r.forward_s for r in price.recomputed]
    )
    assert all(own.forward_s == 0 for own in block("h100-sxm").recomputed)
