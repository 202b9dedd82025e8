"""The fraction of the best rate that a matrix product reaches, by its shape."""

from __future__ import annotations

import pytest

from autopar.cost_model.catalogue import make_cluster
from autopar.cost_model.hardware.matmul_efficiency import Tile, Tiling, fraction_of_rate

A100 = make_cluster("a100", 8).device.tiling
ONE_TILE = Tiling(tiles=(Tile(128, 128, 1.0),), units=100, half_depth=64.0)
ENDLESS = 1e12


def test_whole_tiles_in_whole_waves_reach_the_rate() -> None:
    assert fraction_of_rate(ONE_TILE, 1280, 1280, ENDLESS) == pytest.approx(1.0, rel=1e-6)
    assert fraction_of_rate(ONE_TILE, 128, 128, ENDLESS, repeats=100) == pytest.approx(1.0, rel=1e-6)


def test_half_of_the_rate_at_the_half_depth() -> None:
    assert fraction_of_rate(ONE_TILE, 1280, 1280, 64) == pytest.approx(0.5)


def test_part_of_a_tile_costs_a_whole_one() -> None:
    whole, part = (fraction_of_rate(ONE_TILE, 1280, columns, 256) for columns in (1280, 1280 - 32))
    assert part == pytest.approx(whole * (1280 - 32) / 1280)


def test_one_tile_too_many_costs_a_wave_unless_the_depth_is_cut() -> None:
    shallow = [fraction_of_rate(ONE_TILE, 128, 128, 64, repeats=n) for n in (100, 101)]
    assert shallow[1] == pytest.approx(shallow[0] * 101 / 200)
    deep = [fraction_of_rate(ONE_TILE, 128, 128, 64000, repeats=n) for n in (100, 101)]
    assert 0.8 * deep[0] < deep[1] < deep[0]


def test_the_tile_that_suits_best() -> None:
    small = Tile(64, 64, 0.7)
    both = Tiling(tiles=(*ONE_TILE.tiles, small), units=100, half_depth=64.0)
    assert fraction_of_rate(both, 1280, 1280, ENDLESS) == pytest.approx(1.0, rel=1e-6)
    thin = fraction_of_rate(both, 64, 64, 256, repeats=100)
    assert thin == pytest.approx(0.7 * 256 / (256 + 64))
    assert thin > fraction_of_rate(ONE_TILE, 64, 64, 256, repeats=100)


@pytest.mark.parametrize("size", [1, 7, 64, 300, 1024, 5000, 16384])
def test_always_a_fraction_and_better_for_deeper_products(size: int) -> None:
    found = [fraction_of_rate(A100, size, size, depth) for depth in (16, 128, 1024, 8192)]
    assert found == sorted(found)
    assert found[0] > 0 and found[-1] <= 1


def test_shapes_of_transformers_on_a100() -> None:
    """Wide products run near the rate, a slice of them for eight ranks a little below, a product of decoding far."""
    wide = fraction_of_rate(A100, 16384, 16384, 4096)
    sliced = fraction_of_rate(A100, 16384, 4096 // 8, 4096)
    one_token = fraction_of_rate(A100, 1, 16384, 4096)
    assert wide > 0.93
    assert 0.8 * wide < sliced < wide
    assert one_token < 0.02
