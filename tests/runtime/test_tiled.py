"""Wide layers in tiles: gradients of the whole, what is made at once, and which layers are taken for wide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar.ir.analysis.row_regions import RowRegion, row_regions
from autopar.ir.capture.capture import capture
from autopar.ir.graph import CapturedModel, call_nodes
from autopar.ir.lowered import row_tiles
from autopar.ir.ops.composite import columns_linear
from autopar.ir.rules import rule_for
from autopar.passes.normalise import normalise
from autopar.runtime import tiled
from autopar.runtime.rematerialised import rematerialised
from autopar.runtime.tiled import TiledCalls
from benchmarks.models import CASES
from tests.harness import run_ranks

WIDTH, INNER = 6, 16


class Gated(nn.Module):
    """A norm, two wide layers, and what narrows their product; the sum with what came."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, INNER, bias=bias), nn.Linear(WIDTH, INNER, bias=bias)
        self.down = nn.Linear(INNER, WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Biased(Gated):
    """The same with biases."""

    def __init__(self) -> None:
        super().__init__(bias=True)


class Columns(nn.Module):
    """Layers with their matrices as (in, out), the first for two parts at once."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(a, b) / 3) for a, b in ((WIDTH, 2 * INNER), (INNER, WIDTH)))
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        a, b = columns_linear(x, self.up).chunk(2, dim=-1)
        return x + columns_linear(a * F.gelu(b), self.down, self.bias)


class Normed(nn.Module):
    """What follows reads the result once more in its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.down(F.gelu(self.up(x))))


class Apart(nn.Module):
    """Layers that are not regions: rows depend on each other, or what is wide is read elsewhere, or nothing is wide."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.narrow = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.down(F.softmax(self.up(x), dim=0))
        read = self.up(x)
        return mixed + self.down(F.gelu(read)) + read.sum(-1, keepdim=True) + self.narrow(torch.relu(self.narrow(x)))


class Watched(TorchDispatchMode):
    """Counts the calls of an activation, by the elements that it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.gelu.default, torch.ops.aten.silu.default):
            self.taken.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def captured_regions(model: nn.Module, x: Tensor) -> tuple[CapturedModel, list[RowRegion]]:
    captured = normalise(capture(model, (x,)))
    return captured, row_regions(list(call_nodes(captured.graph)), rule_for)


def in_tiles(captured: CapturedModel, regions: list[RowRegion]) -> Callable[..., Any]:
    """The graph with its regions as calls."""
    graph, calls = captured.graph, TiledCalls()
    for region in regions:
        call, operands = calls.of(region)
        with graph.inserting_before(region.result):
            replaced = graph.call_function(call, operands)
        region.result.replace_all_uses_with(replaced)
    graph.eliminate_dead_code()
    return fx.GraphModule(nn.Module(), graph).forward


def parameters_of(captured: CapturedModel, block: nn.Module) -> list[Tensor]:
    """Those of the graph, in its order."""
    own = dict(block.named_parameters())
    return [parameter.of(own[parameter.whole_names[0]]) for parameter in captured.parameters.values()]


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("shape", [(7, WIDTH), (2, 5, WIDTH), (1, 9, WIDTH)])
@pytest.mark.parametrize("kind", [Gated, Biased, Columns, Normed])
def test_gradients_are_those_of_the_whole(
    kind: Callable[[], nn.Module], shape: tuple[int, ...], remat: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    block, x = kind(), torch.randn(shape, requires_grad=True)
    leaves = [x, *block.parameters()]
    wanted = block(x)
    gradients = torch.autograd.grad(wanted.square().sum(), leaves)
    captured, regions = captured_regions(block, x.detach())
    assert len(regions) == 1
    monkeypatch.setattr(row_tiles, "LIMIT", 0)
    monkeypatch.setattr(row_tiles, "TILE", 4 * regions[0].width)  # four rows
    call = rematerialised(in_tiles(captured, regions), remat=remat, preserve_rng_state=False)
    with Watched() as watched:
        (result,) = call(*parameters_of(captured, block), x)
        own = torch.autograd.grad(result.square().sum(), leaves)
    torch.testing.assert_close(result, wanted)
    torch.testing.assert_close(own, gradients)
    assert max(watched.taken) <= 4 * INNER, "no more rows at once than a tile has"
    tiles = -(-shape[-2] // (4 // (shape[0] if len(shape) == 3 else 1)))
    # Forward and backward; recomputation only where what follows needs the result once more.
    assert len(watched.taken) == tiles * (3 if remat == "full" and kind is Normed else 2)


def test_sums_over_tiles_are_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    block, x = Gated().bfloat16(), torch.randn(64, WIDTH).bfloat16()
    captured, regions = captured_regions(block, x)
    monkeypatch.setattr(row_tiles, "LIMIT", 0)
    errors = {}
    whole = Gated()
    whole.load_state_dict(block.state_dict())
    whole(x.float()).square().sum().backward()
    call = in_tiles(captured, regions)
    for rows in (1, 64):
        monkeypatch.setattr(row_tiles, "TILE", rows * regions[0].width)
        given = parameters_of(captured, block)
        weight = torch.autograd.grad(call(*given, x)[0].float().square().sum(), block.down.weight)[0]
        errors[rows] = float((weight - whole.down.weight.grad).norm())
    assert errors[1] < 1.5 * errors[64]


def test_frozen_weights_and_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    block, x = Gated(), torch.randn(8, WIDTH)
    block.up.requires_grad_(False)
    captured, regions = captured_regions(block, x)
    call = in_tiles(captured, regions)
    given = parameters_of(captured, block)
    with Watched() as watched, torch.no_grad():
        call(*given, x)
    assert watched.taken == [8 * INNER], "few rows are computed at once"
    monkeypatch.setattr(row_tiles, "LIMIT", 0)
    monkeypatch.setattr(row_tiles, "TILE", 2 * regions[0].width)
    with Watched() as watched, torch.no_grad():
        call(*given, x)
    assert watched.taken == [2 * INNER] * 4, "nor is all there at once without gradients"
    call(*given, x)[0].sum().backward()
    assert block.up.weight.grad is None and block.gate.weight.grad is not None


def test_what_is_no_region() -> None:
    assert captured_regions(Apart(), torch.randn(4, WIDTH))[1] == []


def _trained(limit: int, tile: int, constraints: dict[str, Any]) -> tuple[list[float], dict[str, Tensor], int]:
    """Losses and gradients of two steps, and how often a region was in tiles."""
    row_tiles.LIMIT, row_tiles.TILE = limit, tile
    count = 0
    compute = tiled._gradients

    def counted(*args: Any) -> Any:
        nonlocal count
        count += 1
        return compute(*args)

    tiled._gradients = counted
    case = CASES["llama"]
    torch.manual_seed(0)
    parallel = autopar.parallelize(case.build(), dist.get_world_size(), example_inputs=case.batch(0), **constraints)
    rows = parallel.shard_batch(case.batch(0))
    losses = [float(parallel.step(**rows)) for _ in range(2)]
    return losses, parallel.full_gradients(), count


@pytest.mark.parametrize(
    "constraints",
    [
        {"dp": 2, "zero": 3},
        pytest.param({"tp": 2, "sp": True}, marks=pytest.mark.slow),
        pytest.param({"pp": 2, "num_microbatches": 2}, marks=pytest.mark.slow),
    ],
)
def test_plans_with_full_rematerialisation_use_tiles(constraints: dict[str, Any]) -> None:
    constraints = {**constraints, "remat": "full"}
    whole = run_ranks(_trained, 2, 1 << 30, 1 << 29, constraints)[0]
    tiles = run_ranks(_trained, 2, 256, 128, constraints)[0]
    assert whole[2] == 0 and tiles[2] > 0
    torch.testing.assert_close(tiles[:2], whole[:2], rtol=1e-4, atol=1e-6)
