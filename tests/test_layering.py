"""Imports point down only, so that a layer can be understood, tested and shipped without those above it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "autopar"

# What each layer may import of autopar. Names are prefixes; a layer may always import itself.
ALLOWED = {
    "autopar.ir": (),
    "autopar.cost_model": ("autopar.ir",),
    "autopar.passes": ("autopar.ir",),
    "autopar.runtime": ("autopar.ir",),
    "autopar.search": ("autopar.ir", "autopar.cost_model"),
    "autopar.data": ("autopar.ir",),
    "autopar.profiling": ("autopar.ir", "autopar.cost_model", "autopar.runtime", "autopar.local_cluster"),
}
# Heavy or optional packages, and the only layers that may need them.
ONLY_IN = {
    "highspy": ("autopar.search",),
    "transformers": ("autopar.huggingface",),
    "plotly": ("autopar.report",),
    "jinja2": ("autopar.report", "autopar.export"),
    "rich": ("autopar.cli", "autopar.report"),
    "typer": ("autopar.cli",),
    "ray": ("autopar.launching",),
}


def modules() -> Iterator[tuple[str, Path]]:
    """(dotted name, path) of every module; the linked folders are read where they really are."""
    for folder in (PACKAGE, *(PACKAGE / link for link in ("passes", "cost_model", "runtime"))):
        for path in sorted(folder.rglob("*.py")):
            relative = path.relative_to(ROOT)
            name = ".".join(relative.with_suffix("").parts)
            yield name.removesuffix(".__init__"), path


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every absolute import outside ``if TYPE_CHECKING``, at any depth."""
    tree = ast.parse(path.read_text(), str(path))
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            skipped.update(child for statement in node.body for child in ast.walk(statement))
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; write the full name"
            yield node.lineno, node.module or ""
            if node.module == "autopar":
                yield from ((node.lineno, f"autopar.{alias.name}") for alias in node.names)


def within(module: str, prefixes: tuple[str, ...]) -> bool:
    return any(module == prefix or module.startswith(prefix + ".") for prefix in prefixes)


def test_imports_point_down() -> None:
    wrong = []
    for name, path in modules():
        layer = next((layer for layer in ALLOWED if within(name, (layer,))), None)
        if layer is None:
            continue
        for line, module in imports(path):
            if module.startswith("autopar") and module != "autopar" and not within(module, (layer, *ALLOWED[layer])):
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {module}; {layer} may import {ALLOWED[layer]}")
    assert not wrong, "\n".join(wrong)


def test_heavy_packages_stay_in_their_layer() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}; only {ONLY_IN[module.partition('.')[0]]} may"
        for name, path in modules()
        for line, module in imports(path)
        if (top := module.partition(".")[0]) in ONLY_IN and not within(name, ONLY_IN[top])
    ]
    assert not wrong, "\n".join(wrong)


def test_no_layer_spells_a_linked_folder_by_its_own_name() -> None:
    """``import passes`` would be a second copy of the module ``autopar.passes``."""
    linked = ("passes", "cost_model", "runtime")
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}; write autopar.{module}"
        for path in (*PACKAGE.rglob("*.py"), *(p for link in linked for p in (ROOT / link).rglob("*.py")))
        for line, module in imports(path)
        if within(module, linked)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("module", ["autopar", "autopar.passes", "autopar.search", "autopar.runtime"])
def test_importing_a_layer_brings_no_solver_and_no_report(module: str) -> None:
    code = (
        f"import sys, {module}; "
        "print([m for m in ('highspy', 'plotly', 'typer', 'transformers', 'autopar.api') if m in sys.modules])"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"
