"""``make browser``: pictures of reports for the documentation, taken by a headless Chromium.

    python scripts/pictures.py [PAGE ...]

Without pages it makes the plans below and takes their reports: as on a laptop, light and dark, and as on a phone and on
a wide screen, light.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"

# What is searched for each page.
_LLAMA = "examples/llama3_70b.py --gpus 64 --gpu a100-80gb --global-batch 512 --seq 4096"
SEARCHES = {
    "gpt": "examples/gpt.py --gpus 4 --gpu cpu --pp 2",
    "resnet50": "examples/resnet50.py --gpus 8 --global-batch 2048",
    "llama3-70b": f"{_LLAMA} --no-vary",
    "llama3-70b-pp4": f"{_LLAMA} --pp 4",
    "deepseek-v3": "examples/deepseek_v3.py --gpus 2048 --global-batch 8192 --seq 4096 --no-vary",
    "llama3-8b-1m": "examples/llama3_8b.py --gpus 32 --global-batch 1 --seq 1048576 --no-vary",
    "llama31-405b": "examples/llama31_405b.py --gpus 16384 --global-batch 2048 --seq 8192 --no-vary",
}

SCREENS = {"phone": (390, 844), "laptop": (1366, 768), "wide": (2560, 1440)}

# What is added to the name of a picture, and what it shows.
VIEWS: dict[str, tuple[str, Literal["light", "dark"]]] = {
    "": ("laptop", "light"),
    "-dark": ("laptop", "dark"),
    "-phone": ("phone", "light"),
    "-wide": ("wide", "light"),
}

# Sections with a picture of their own, of a pipeline.
SECTIONS = {"timeline": "#step-section", "memory": "#memory-section", "candidates": "section:has(#candidates)"}
# Of a plan that cuts the sequence.
SEQUENCE = "section:has(#sequence-picture)"


def main() -> int:
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path)
    given = parser.parse_args().pages
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as started:
        pages = given or [Path(folder) / f"{name}.html" for name in SEARCHES]
        if not given:
            autopar = Path(sys.executable).with_name("autopar")
            for page, search in zip(pages, SEARCHES.values(), strict=True):
                command = [str(autopar), "search", *search.split(), "--json", "--report", str(page)]
                subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for path in pages:
            for suffix, (screen, scheme) in VIEWS.items():
                shown = opened(browser, path, screen, scheme)
                shown.screenshot(path=IMAGES / f"report-{path.stem}{suffix}.png")
                if not suffix:
                    take_sections(shown, path.stem)
                shown.close()
    return 0


def opened(browser: Browser, path: Path, screen: str, scheme: Literal["light", "dark"]) -> Page:
    width, height = SCREENS[screen]
    shown = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    shown.goto(path.resolve().as_uri())
    shown.wait_for_selector("html[data-drawn=true]", state="attached")
    shown.wait_for_timeout(500)
    return shown


def take_sections(page: Page, name: str) -> None:
    if page.locator(SEQUENCE).count():
        page.locator(SEQUENCE).screenshot(path=IMAGES / f"report-{name}-sequence.png")
    if page.locator("#memory-rank option").count() > 1:
        for section, selector in SECTIONS.items():
            if page.locator(selector).count():
                page.locator(selector).screenshot(path=IMAGES / f"report-{name}-{section}.png")


if __name__ == "__main__":
    sys.exit(main())
