"""The wheel and the sdist hold the whole package, linked folders included, and agree with each other."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUILD = """
import sys
from setuptools import build_meta
print(getattr(build_meta, sys.argv[1])(sys.argv[2]))
"""


def build(kind: str, source: Path, out: Path) -> Path:
    out.mkdir(exist_ok=True)
    command = [sys.executable, "-W", "ignore", "-c", BUILD, kind, str(out)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out / done.stdout.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what packaging reads, so that the checkout stays clean."""
    copy = tmp_path_factory.mktemp("source") / "autopar"
    copy.mkdir()
    for name in (*ROOT.glob("*.md"), *map(ROOT.joinpath, ("pyproject.toml", "LICENSE", "MANIFEST.in", "Makefile"))):
        shutil.copy(name, copy)
    for folder in ("autopar", "passes", "cost_model", "runtime", "examples", "docs"):
        shutil.copytree(ROOT / folder, copy / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


@pytest.fixture(scope="module")
def wheel_files(source: Path, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    with zipfile.ZipFile(build("build_wheel", source, tmp_path_factory.mktemp("wheel"))) as wheel:
        return set(wheel.namelist())


def test_wheel_holds_every_module_under_autopar(wheel_files: set[str]) -> None:
    folders = {f"autopar/{name}": ROOT / name for name in ("passes", "cost_model", "runtime")}
    folders["autopar"] = ROOT / "autopar"
    expected = {
        f"{prefix}/{path.relative_to(folder)}" for prefix, folder in folders.items() for path in folder.rglob("*.py")
    }
    assert expected <= wheel_files
    assets = {
        "autopar/report/assets/plan.html",
        "autopar/report/assets/start.js",
        "autopar/export/templates/fsdp.py.jinja",
    }
    assert {"autopar/py.typed", *assets} <= wheel_files
    top = {name.partition("/")[0] for name in wheel_files}
    assert {name for name in top if not name.endswith(".dist-info")} == {"autopar"}


def test_sdist_builds_the_same_wheel(source: Path, wheel_files: set[str], tmp_path: Path) -> None:
    with tarfile.open(build("build_sdist", source, tmp_path)) as sdist:
        # Early 3.10 and 3.11 have no filters.
        sdist.extractall(tmp_path / "unpacked", **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert not any(path.is_symlink() for path in unpacked.rglob("*"))
    assert (unpacked / "examples" / "gpt.py").is_file()
    with zipfile.ZipFile(build("build_wheel", unpacked, tmp_path / "again")) as wheel:
        assert set(wheel.namelist()) == wheel_files
