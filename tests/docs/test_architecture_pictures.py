"""The pictures of docs/architecture.md: drawn by the compiler itself, legible, and as they are committed."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.ir.capture.capture import capture
from autopar.ir.graph import CapturedModel
from autopar.passes.normalise import normalise
from autopar.search.problem.constraints import Constraints
from scripts.architecture import search_funnel, stage_memory
from scripts.architecture.__main__ import FOLDER, PICTURES
from scripts.architecture.svg import Picture

AGAIN = "python -m scripts.architecture draws them anew"


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.layers(x), x)


@pytest.fixture(scope="module")
def chain() -> CapturedModel:
    return normalise(capture(Chain(), torch.empty(32, 64, device="meta"), name="Chain"))


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_there_and_shown(name: str) -> None:
    root = ET.fromstring((FOLDER / f"{name}.svg").read_text())
    said = {tag: root.findtext(f"{{http://www.w3.org/2000/svg}}{tag}") for tag in ("title", "desc")}
    assert all(said.values())
    assert f"![{said['title']}](pictures/{name}.svg)" in (FOLDER.parent / "architecture.md").read_text()


@pytest.mark.parametrize("name", ["types-of-data", "one-tensor"])
def test_pictures_without_costs_are_as_the_compiler_draws_them(name: str) -> None:
    assert PICTURES[name]().svg() == (FOLDER / f"{name}.svg").read_text(), AGAIN


def test_a_funnel_narrows(chain: CapturedModel) -> None:
    found = search_funnel.funnel(chain, 8, "a100-80gb")
    assert found.space > found.relaxed >= found.solved >= found.simulated >= 1
    assert found.problems >= found.solved
    assert f"{found.space:,}" in search_funnel.drawn(found).svg()


def test_a_profile_has_its_peak_where_the_prediction_has_it(chain: CapturedModel) -> None:
    pinned = Constraints(pp=2, dp=2, tp=1, num_microbatches=4, zero=1)
    found = stage_memory.profile(chain, 4, "a100-80gb", pinned)
    assert len(found.passes) == 8
    peak = found.passes[found.peak]
    assert peak[0].kind == "B" and peak[3].total == max(parts.total for *_, parts in found.passes)
    assert "peak 0.0 GiB, in the backward" in stage_memory.drawn(found).svg()


def test_text_that_is_not_legible_is_a_fault() -> None:
    picture = Picture(title="t", description="d", width=200, height=100)
    picture.box(10, 10, 100, 40)
    picture.text(20, 30, "inside")
    assert not list(picture.faults())
    picture.text(30, 34, "over it")
    picture.text(80, 30, "across the edge")
    picture.text(150, 90, "out of the picture")
    faults = "\n".join(picture.faults())
    assert "'inside' overlaps 'over it'" in faults and "'across the edge' crosses the edge" in faults
    assert "'out of the picture' leaves the picture" in faults
    with pytest.raises(AssertionError, match="overlaps"):
        picture.svg()
