"""``make browser``: pictures of reports for the documentation, taken by a headless Chromium.

    python scripts/pictures.py [PAGE ...]

Without pages it plans the model at the head of the README, as it is and as a pipeline, and takes their reports.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
SEARCH = "search examples/llama3_70b.py --gpus 64 --gpu a100-80gb --global-batch 512 --seq 4096 --json"

# Pages, with what is added to the search.
PAGES: dict[str, list[str]] = {"llama3-70b": ["--no-vary"], "llama3-70b-pp4": ["--pp", "4"]}

# Sections with a picture of their own, of a pipeline.
SECTIONS = {"timeline": "#step-section", "memory": "#memory-section", "candidates": "section:has(#candidates)"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path)
    given = parser.parse_args().pages
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as started:
        pages = given
        if not given:
            pages = [Path(folder) / f"{name}.html" for name in PAGES]
            autopar = Path(sys.executable).with_name("autopar")
            for page, added in zip(pages, PAGES.values(), strict=True):
                command = [str(autopar), *SEARCH.split(), *added, "--report", str(page)]
                subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for path in pages:
            for scheme, suffix in (("light", ""), ("dark", "-dark")):
                shown = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme=scheme)
                shown.goto(path.resolve().as_uri())
                shown.wait_for_selector("html[data-drawn=true]", state="attached")
                shown.wait_for_timeout(500)
                take(shown, path.stem, suffix)
                shown.close()
    return 0


def take(page: Page, name: str, suffix: str) -> None:
    page.screenshot(path=IMAGES / f"report-{name}{suffix}.png")
    if not suffix and page.locator("#memory-rank option").count() > 1:
        for section, selector in SECTIONS.items():
            if page.locator(selector).count():
                page.locator(selector).screenshot(path=IMAGES / f"report-{name}-{section}.png")


if __name__ == "__main__":
    sys.exit(main())
