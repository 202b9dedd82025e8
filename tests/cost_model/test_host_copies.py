"""Copies of activations to host memory: what they add to a step, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.cost_model.catalogue import make_cluster
from autopar.cost_model.communication.gradient_sync import SyncTime, offload_time
from autopar.cost_model.communication.host_copies import added_by_copies, hidden_bytes, link_seconds
from autopar.cost_model.compute.op_time import ZERO, OpTime

DEVICE = make_cluster("h100-sxm", 8).device
# Copied in a millisecond.
BYTES = 1e-3 / DEVICE.host.copy_seconds(1.0)
MEMORY = DEVICE.memory_seconds(BYTES)


@pytest.mark.parametrize(
    ("computed", "taken", "exposed"),
    [
        pytest.param(OpTime(2e-3, 4e-3), ZERO, OpTime(0.0, 0.0), id="hidden"),
        pytest.param(OpTime(0.4e-3, 4e-3), ZERO, OpTime(0.6e-3, 0.0), id="longer than the forward"),
        pytest.param(OpTime(2e-3, 4e-3), OpTime(1.5e-3, 0.0), OpTime(0.5e-3, 0.0), id="beside offloaded parameters"),
        pytest.param(OpTime(2e-3, 4e-3), OpTime(3e-3, 9e-3), OpTime(1e-3, 1e-3), id="a link that is full already"),
    ],
)
def test_what_copies_add(computed: OpTime, taken: OpTime, exposed: OpTime) -> None:
    added = added_by_copies(BYTES, DEVICE, computed, taken)
    assert added.forward_s == pytest.approx(MEMORY + exposed.forward_s)
    assert added.backward_s == pytest.approx(MEMORY + exposed.backward_s)
    hidden = hidden_bytes(DEVICE, computed, taken)
    least = added_by_copies(hidden, DEVICE, computed, taken)
    assert least.total_s == pytest.approx(2 * DEVICE.memory_seconds(hidden))
    assert added_by_copies(1.01 * hidden + 1, DEVICE, computed, taken).total_s > least.total_s * 1.02


def test_nothing_is_copied_for_nothing() -> None:
    assert added_by_copies(0.0, DEVICE, ZERO) == ZERO


def test_on_a_cpu_all_of_it_is_added() -> None:
    cpu = make_cluster("cpu", 1, 1).device
    seconds = cpu.host.copy_seconds(1e6)
    assert added_by_copies(1e6, cpu, OpTime(1.0, 1.0)) == OpTime(seconds, seconds)
    assert hidden_bytes(cpu, OpTime(1.0, 1.0)) == 0.0


def test_a_faster_link_hides_more() -> None:
    grace = replace(DEVICE, host=make_cluster("gb200", 4).device.host)
    computed = OpTime(1e-3, 2e-3)
    assert hidden_bytes(grace, computed) > 3 * hidden_bytes(DEVICE, computed)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_offloaded_parameters_take_the_link(zero: int) -> None:
    numel, count = 10**8, 4
    copy = DEVICE.host.copy_seconds(4 * numel)
    taken = link_seconds(offload_time(numel, DEVICE, zero=zero), count)
    gathers, scatters = {1: (1, 1), 2: (1, count), 3: (2 * count, count)}[zero]
    assert taken.total_s * count == pytest.approx((gathers + scatters) * copy)
    assert link_seconds(SyncTime(), count) == ZERO
