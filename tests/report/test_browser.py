"""The page in a browser: nothing is fetched, nothing fails, it fits every screen, and it can be used.

Needs the extra ``browser`` and Chromium: ``make browser``.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autopar.cli.main import main
from scripts.pictures import SCREENS, SEARCHES

playwright = pytest.importorskip("playwright.sync_api", reason="pip install 'autopar[browser]'")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")]

ROOT = Path(__file__).parents[2]
EVIL = "<img src=x onerror=alert(0)>"
EVIL_MODEL = """
import torch
from torch import nn

class Evil(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({f"<img src=x onerror=alert({n})>": nn.Linear(64, 64) for n in range(2)})

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x).relu()
        return x.square().mean()

def model():
    return Evil()

def example_inputs(batch_size=16, seq_len=None):
    return (torch.zeros(batch_size, 64),)
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    (folder / "evil.py").write_text(EVIL_MODEL)
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        for name, search in {**SEARCHES, "evil": f"{folder}/evil.py --gpus 4 --tp 2 --no-vary"}.items():
            page = folder / f"{name}.html"
            patch.setattr(sys, "argv", ["autopar", "search", *search.split(), "--json", "--report", str(page)])
            with pytest.raises(SystemExit) as left:
                main()
            assert not left.value.code
            found[name] = page
    return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        running = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


def opened(browser: Any, path: Path, screen: str = "laptop", scheme: str = "light") -> tuple[Any, list[str]]:
    """The page, drawn, and all that went wrong or was asked of a network."""
    width, height = SCREENS[screen]
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda own: None if own.url.startswith(("file:", "data:")) else wrong.append(own.url))
    page.on("dialog", lambda dialog: wrong.append(dialog.message))
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-drawn=true]", state="attached", timeout=120_000)
    return page, wrong


@pytest.mark.parametrize("name", [*SEARCHES, "evil"])
def test_page_is_whole_on_every_screen(pages: dict[str, Path], browser: Any, name: str) -> None:
    for screen, (width, _) in SCREENS.items():
        for scheme in ("light", "dark"):
            page, wrong = opened(browser, pages[name], screen, scheme)
            assert not wrong, (screen, scheme, wrong)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, (screen, scheme)
            paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
            assert paint < 2000, (screen, scheme, paint)
            page.close()


@pytest.mark.parametrize("name", ["gpt", "llama31-405b"])
def test_page_can_be_used(pages: dict[str, Path], browser: Any, name: str) -> None:
    page, wrong = opened(browser, pages[name])
    # Blocks open and close.
    block = page.locator("details.block").first
    was = block.evaluate("own => own.open")
    block.locator("summary").click()
    assert block.evaluate("own => own.open") is not was
    # The timeline zooms, by a button and by dragging, and shows all of it again.
    span = "() => document.getElementById('timeline').layout.xaxis.range.map(Number)"
    whole = page.evaluate(span)
    page.get_by_role("button", name="zoom in").click()
    nearer = page.evaluate(span)
    assert nearer[1] - nearer[0] == pytest.approx((whole[1] - whole[0]) / 2)
    page.get_by_role("button", name="whole step").click()
    assert page.evaluate(span) == pytest.approx(whole)
    page.locator("#timeline").scroll_into_view_if_needed()
    box = page.locator("#timeline .nsewdrag").first.bounding_box()
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + 0.2 * box["width"], middle)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.25 * box["width"], middle, steps=5)
    page.mouse.up()
    page.wait_for_function(f"() => (({span})())[1] < {whole[1] / 3}")
    # Candidates say what they are.
    page.locator("#candidates").scroll_into_view_if_needed()
    place = page.evaluate(
        """() => {
          const chart = document.getElementById("candidates");
          const trace = chart.data.find((one) => one.name === "the plan");
          const { xaxis, yaxis } = chart._fullLayout;
          const box = chart.getBoundingClientRect();
          return [box.x + xaxis._offset + xaxis.d2p(trace.x[0]), box.y + yaxis._offset + yaxis.d2p(trace.y[0])];
        }"""
    )
    page.mouse.move(place[0] - 30, place[1])
    page.mouse.move(*place, steps=4)
    page.wait_for_selector("#candidates .hoverlayer text")
    assert "the plan" in page.locator("#candidates .hoverlayer").text_content()
    # How long training takes follows what is typed.
    answer = page.locator("#training-answer").inner_text()
    page.locator("#amount").fill("123")
    assert page.locator("#training-answer").inner_text() != answer
    # The picture of the cluster changes with the axis.
    radios = page.locator("#picture-axes input")
    cells = page.locator(".rank").all_inner_texts()
    radios.last.check()
    assert radios.count() == 1 or page.locator(".rank").all_inner_texts() != cells
    assert not wrong


def test_names_that_look_like_markup_are_text(pages: dict[str, Path], browser: Any) -> None:
    page, wrong = opened(browser, pages["evil"])
    assert EVIL in page.locator("details.block summary").first.inner_text()
    assert page.locator("img").count() == 0
    assert not wrong


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["gpt", "deepseek-v3"])
def test_no_serious_obstacle_for_assistive_tools(pages: dict[str, Path], browser: Any, name: str, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="pip install 'autopar[browser]'")
    page, _ = opened(browser, pages[name], scheme=scheme)
    found = axe.Axe().run(page).response["violations"]
    serious = [(one["id"], [node["html"][:200] for node in one["nodes"][:3]]) for one in found
               if one["impact"] in ("serious", "critical")]  # fmt: skip
    assert not serious
