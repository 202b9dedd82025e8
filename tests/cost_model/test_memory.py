"""16 bytes a parameter, and what ZeRO takes off it."""

from __future__ import annotations

from math import exp, inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_model.memory.fit_probability import LOG_ERROR, fit_probability, share_to_fill
from autopar.cost_model.memory.model_state import MemoryParts, gathered_bytes, scattered_bytes, state_memory

N = 1000


def test_sixteen_bytes_a_parameter() -> None:
    state = state_memory(N, zero=0, data_size=8, precision="fp32")
    assert (state.parameters, state.gradients, state.optimizer) == (4 * N, 4 * N, 8 * N)
    assert state.total == 16 * N


def test_bf16_adds_the_copies_that_compute_reads() -> None:
    assert state_memory(N, zero=0, data_size=8, precision="bf16").total == 18 * N


@pytest.mark.parametrize(
    ("zero", "precision", "expected"),
    [
        (1, "fp32", 4 / 4 + 4 + 4 + 8 / 4),
        (1, "bf16", 4 / 4 + 2 + 4 + 8 / 4),
        (2, "fp32", 4 / 4 + 4 + 4 / 4 + 8 / 4),
        (2, "bf16", 4 / 4 + 2 + 4 / 4 + 8 / 4),
        (3, "fp32", 16 / 4),
        (3, "bf16", 16 / 4),
    ],
)
def test_zero_over_four_ranks(zero: int, precision: str, expected: float) -> None:
    assert state_memory(N, zero=zero, data_size=4, precision=precision).total == expected * N


@given(st.integers(1, 10**9), st.sampled_from([1, 2, 8, 64]), st.sampled_from(["fp32", "bf16"]))
def test_each_level_needs_no_more_than_the_one_before(numel: int, data_size: int, precision: str) -> None:
    totals = [state_memory(numel, zero=z, data_size=data_size, precision=precision).total for z in range(4)]
    assert totals[1] >= totals[2] >= totals[3]
    if data_size == 1:
        assert len(set(totals)) == 1
    else:
        assert totals[3] < totals[0]


def test_with_one_microbatch_level_one_accumulates_nothing() -> None:
    one, two = (
        [state_memory(N, zero=zero, data_size=4, precision="bf16", num_microbatches=count).total for zero in (1, 2)]
        for count in (1, 2)
    )
    assert one == [2 * N + 16 * N / 4] * 2
    assert two == [6 * N + 12 * N / 4, 2 * N + 16 * N / 4]


def test_zero3_gathers_and_gradients_that_come_are_scattered() -> None:
    assert gathered_bytes(2 * N, zero=3) == 2 * N
    assert gathered_bytes(2 * N, zero=3, reshard=False) == 0
    assert gathered_bytes(2 * N, zero=2) == 0
    assert [scattered_bytes(N, zero=zero) for zero in range(4)] == [0, 0, 4 * N, 4 * N]
    assert scattered_bytes(N, zero=1, num_microbatches=1) == 4 * N


def test_offload_leaves_what_is_gathered() -> None:
    settings = {"data_size": 4, "precision": "bf16", "num_microbatches": 1, "offload": True}
    assert [state_memory(N, zero=zero, **settings).total for zero in (1, 2, 3)] == [2 * N, 2 * N, 0]
    assert state_memory(N, zero=3, reshard=False, **settings).total == 2 * N
    assert state_memory(N, zero=1, data_size=4, precision="bf16", offload=True).total == 6 * N


def test_parts_add_scale_and_print_whole_bytes() -> None:
    parts = MemoryParts(parameters=1.5, activations=2) + 2 * MemoryParts(activations=4, workspace=0.25)
    assert parts.total == 12
    assert parts.as_bytes() == {
        "parameters": 2,
        "gradients": 0,
        "optimizer": 0,
        "activations": 10,
        "transient": 0,
        "workspace": 1,
    }


def test_probability_to_fit() -> None:
    """Half where the peak is as predicted in the mean, and the margin where a plan fills its share."""
    middle = exp(LOG_ERROR.mean)
    assert fit_probability(1.0, middle) == pytest.approx(0.5)
    for margin in (0.01, 0.3, 0.9):
        assert fit_probability(share_to_fill(margin) * 80e9, 80e9) == pytest.approx(margin)
    assert fit_probability(70e9, 80e9) > fit_probability(75e9, 80e9) > fit_probability(90e9, 80e9)
    assert fit_probability(0.0, 80e9) == fit_probability(80e9, inf) == 1.0
