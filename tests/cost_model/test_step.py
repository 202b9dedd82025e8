"""Gradient synchronisation by ZeRO stage, overlap, optimiser."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_model.catalogue import make_cluster
from autopar.cost_model.communication.collectives import Fabric
from autopar.cost_model.communication.gradient_sync import (
    SyncTime,
    buffer_copies,
    exposed_time,
    hooks_time,
    master_work,
    offload_time,
    optimizer_time,
    sync_time,
)
from autopar.cost_model.stacks.known import find_stack
from autopar.ir.mesh import Mesh

FABRIC = Fabric(make_cluster("a100-80gb", 64), Mesh.of(dp=8, tp=8))
N = 10**9


def test_zero3_moves_one_and_a_half_times_the_bytes_of_zero0() -> None:
    plain = sync_time(FABRIC, N, 0, zero=0).total_s(1)
    sharded = sync_time(FABRIC, N, 0, zero=3).total_s(1)
    assert sharded / plain == pytest.approx(1.5, rel=0.01)


def test_zero1_moves_the_bytes_of_zero0_in_fp32_and_fewer_in_bf16() -> None:
    plain = sync_time(FABRIC, N, 0, zero=0).step_s
    assert sync_time(FABRIC, N, 0, zero=1).step_s == pytest.approx(plain, rel=0.01)
    assert sync_time(FABRIC, N, 0, zero=1, precision="bf16").step_s == pytest.approx(0.75 * plain, rel=0.01)


def test_what_each_level_pays_per_microbatch() -> None:
    levels = [sync_time(FABRIC, N, 0, zero=zero) for zero in range(4)]
    assert [level.forward_s > 0 for level in levels] == [False, False, False, True]
    assert [level.backward_s > 0 for level in levels] == [False, False, True, True]
    assert [level.step_s > 0 for level in levels] == [True, True, True, False]


def test_keeping_parameters_until_backward_saves_a_gather() -> None:
    resharded, held = sync_time(FABRIC, N, 0, zero=3), sync_time(FABRIC, N, 0, zero=3, reshard=False)
    assert held.forward_s == resharded.forward_s
    assert held.backward_s == pytest.approx(resharded.backward_s - resharded.forward_s)


def test_offload_copies_a_shard_with_each_gather_and_each_scatter() -> None:
    device = FABRIC.cluster.device
    copy = 4 * N / (31.5e9 * 0.79)
    levels = [offload_time(N, device, zero=zero) for zero in (1, 2, 3)]
    assert [round(level.total_s(5) / copy) for level in levels] == [2, 1 + 5, 3 * 5]
    assert offload_time(N, device, zero=3, reshard=False).total_s(1) == pytest.approx(2 * copy)
    assert optimizer_time(N, device, offload=True) > 10 * optimizer_time(N, device)


def test_device_memory_moved_for_buffers_and_masters() -> None:
    # Gathered copies are read and written; gradients read as computed and written in float32.
    copies = partial(buffer_copies, N, itemsize=2, num_microbatches=2)
    assert copies(zero=1, gathered=2) == (2 * 2 * N / 2, 6 * N / 2)
    assert copies(zero=3, gathered=2) == (4 * N, (4 + 6) * N)
    assert copies(zero=3, gathered=2, reshard=False) == (4 * N, 6 * N)
    assert copies(zero=3, gathered=1) == (2 * N, (2 + 6) * N)
    # One microbatch adds up nothing; bfloat16 is cast both ways.
    assert master_work(N, 1, zero=0, itemsize=4, num_microbatches=1) == (0, 0)
    assert master_work(N, 1, zero=0, itemsize=2, num_microbatches=1) == (6 * N, 6 * N)
    assert master_work(N, 4, zero=2, itemsize=4, num_microbatches=2) == (0, 12 * N / 4 / 2)
    # Of four microbatches three add 16 bits to 32; parameters are cast once, but for stage 3.
    assert master_work(N, 1, zero=0, itemsize=2, num_microbatches=4) == (6 * N / 4, (6 + 3 * 10) * N / 4)
    assert master_work(N, 2, zero=1, itemsize=2, num_microbatches=4) == (6 * N / 2 / 4, (6 + 3 * 10) * N / 4)
    assert master_work(N, 2, zero=3, itemsize=2, num_microbatches=4) == (6 * N / 2, 12 * N / 2 * 3 / 4)


def test_gradients_of_16_bits_are_reduced_at_half_of_the_bytes() -> None:
    stacks = [find_stack(name) for name in ("megatron-lm-2022", "megatron-core-2025")]
    wide, narrow = (
        sync_time(Fabric(make_cluster("h100-sxm", 64, stack=stack), FABRIC.mesh), N, 0, precision="bf16").step_s
        for stack in stacks
    )
    assert narrow == pytest.approx(wide / 2, rel=0.02)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_products_that_add_to_float32_leave_zeros_to_be_written_once_a_step(zero: int) -> None:
    plain, added = (
        master_work(N, 2, zero=zero, itemsize=2, num_microbatches=4, in_products=own) for own in (False, True)
    )
    assert added == (plain if zero >= 2 else (plain[0], 4 * N / 4))
    once = master_work(N, 2, zero=zero, itemsize=2, num_microbatches=1, in_products=True)
    assert once == master_work(N, 2, zero=zero, itemsize=2, num_microbatches=1), "nothing is added"


def test_no_axes_no_time() -> None:
    assert sync_time(FABRIC, N, ()) == SyncTime()


def test_many_collectives_pay_latency() -> None:
    one, many = sync_time(FABRIC, N, 0), sync_time(FABRIC, N, 0, num_collectives=100)
    assert one.step_s < many.step_s < 1.2 * one.step_s


def test_on_a_cpu_the_hooks_around_sharded_blocks_take_time_of_their_own() -> None:
    core = make_cluster("cpu", 8, 8).device
    launch = core.kernel_launch_s
    plain, scattering, whole = (hooks_time(8, core, zero=zero) for zero in (1, 2, 3))
    assert plain.forward_s == pytest.approx(28 * launch) == plain.backward_s
    assert scattering.step_s == pytest.approx(62 * launch)
    assert whole.total_s(2) > scattering.total_s(2) > plain.total_s(2) > 0
    assert hooks_time(8, FABRIC.cluster.device, zero=3) == SyncTime()


def test_sync_adds_and_scales() -> None:
    total = SyncTime(forward_s=1, backward_s=2, step_s=3) + 2 * SyncTime(step_s=1)
    assert total.total_s(4) == 4 * 3 + 5


@given(st.just(0.0) | st.floats(1e-9, 10), st.floats(0, 10), st.floats(0.01, 0.6))
def test_exposed_time_is_bounded(communication_s: float, compute_s: float, lost: float) -> None:
    exposed = exposed_time(communication_s, compute_s, lost * communication_s)
    assert lost * communication_s * (1 - 1e-12) <= exposed <= communication_s * (1 + 1e-12)
    assert exposed_time(communication_s, 0, lost * communication_s) == communication_s
    if communication_s > 0:
        assert exposed > 0  # overlap slows compute down: never free


def test_optimizer_is_bound_by_memory() -> None:
    device = FABRIC.cluster.device
    assert optimizer_time(N, device) == pytest.approx(
        28e9 / (device.memory_bandwidth * device.memory_efficiency), rel=0.01
    )
