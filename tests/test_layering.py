"""Imports point down only, so that a layer can be understood, tested and shipped without those above it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import networkx as nx
import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "autopar"

# What each layer may import of autopar. Names are prefixes; a layer may always import itself.
ALLOWED = {
    "autopar.ir": (),
    "autopar.cost_model": ("autopar.ir",),
    "autopar.passes": ("autopar.ir",),
    "autopar.runtime": ("autopar.ir",),
    "autopar.helper": ("autopar.ir",),
    "autopar.search": ("autopar.ir", "autopar.cost_model", "autopar.helper"),
    "autopar.data": ("autopar.ir",),
    "autopar.huggingface": ("autopar.ir", "autopar.runtime", "autopar.model_file"),
    "autopar.profiling": ("autopar.ir", "autopar.cost_model", "autopar.runtime", "autopar.local_cluster"),
    "autopar.planning": (
        "autopar.ir", "autopar.cost_model", "autopar.passes", "autopar.search", "autopar.units",
        "autopar.planning_rows", "autopar.garbage",
    ),
    "autopar.garbage": (),
    "autopar.planning_rows": ("autopar.ir", "autopar.cost_model", "autopar.search"),
    "autopar.any_size": ("autopar.ir", "autopar.passes"),
    "autopar.sized_captures": ("autopar.ir", "autopar.passes", "autopar.helper"),
    "autopar.sized_searches": (
        "autopar.ir", "autopar.cost_model", "autopar.search", "autopar.sized_captures", "autopar.planning_rows",
    ),
    "autopar.sized_workers": ("autopar.ir", "autopar.helper", "autopar.sized_captures", "autopar.sized_searches"),
    "autopar.planning_sizes": (
        "autopar.ir", "autopar.cost_model", "autopar.search", "autopar.sized_captures", "autopar.sized_searches",
        "autopar.sized_workers", "autopar.helper", "autopar.garbage",
    ),
    "autopar.checking": ("autopar.ir", "autopar.cost_model", "autopar.passes", "autopar.runtime", "autopar.search"),
    "autopar.report": (
        "autopar.ir", "autopar.cost_model", "autopar.search", "autopar.planning", "autopar.planning_sizes",
        "autopar.profiling", "autopar.units",
    ),
    "autopar.training": (
        "autopar.ir", "autopar.runtime", "autopar.data", "autopar.load_model", "autopar.model_file",
        "autopar.process_end", "autopar.standard_output", "autopar.api", "autopar.passes",
    ),
    "autopar.supervision": (
        "autopar.ir", "autopar.cost_model", "autopar.passes", "autopar.runtime", "autopar.search", "autopar.training",
        "autopar.helper", "autopar.local_cluster", "autopar.planning_rows", "autopar.process_end", "autopar.units",
    ),
    "autopar.launching": (
        "autopar.ir", "autopar.runtime", "autopar.training", "autopar.supervision", "autopar.standard_output",
        "autopar.process_end",
    ),
    "autopar.export": (
        "autopar.ir", "autopar.cost_model", "autopar.search", "autopar.report", "autopar.training", "autopar.units",
    ),
}  # fmt: skip
# Packages of packages whose own imports go one way too.
IN_ORDER = ("autopar", "autopar.search", "autopar.cost_model", "autopar.passes")
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
    """(line, module) of every import at any depth: deferred ones, those of types alone, and those by name too."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; write the full name"
            yield node.lineno, node.module or ""
            if (node.module or "").partition(".")[0] == "autopar":
                yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("import_module", "importlib.import_module"):
            yield from ((node.lineno, arg.value) for arg in node.args[:1] if isinstance(arg, ast.Constant))


@pytest.fixture(scope="module")
def arrows() -> nx.DiGraph[str]:
    """Which module imports which, but for public names, which ``autopar/__init__.py`` resolves when they are used."""
    known = dict(modules())
    graph: nx.DiGraph[str] = nx.DiGraph()
    for name, path in known.items():
        if name != "autopar":
            graph.add_edges_from((name, module) for _, module in imports(path) if module in known and module != name)
    return graph


def within(module: str, prefixes: tuple[str, ...]) -> bool:
    return any(module == prefix or module.startswith(prefix + ".") for prefix in prefixes)


def test_imports_point_down() -> None:
    wrong = []
    for name, path in modules():
        layer = next((layer for layer in ALLOWED if within(name, (layer,))), None)
        if layer is None:
            continue
        for line, module in imports(path):
            below = (layer, *ALLOWED[layer], "autopar.__version__")
            if module.startswith("autopar.") and not within(module, below):
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {module}; {layer} may import {ALLOWED[layer]}")
    assert not wrong, "\n".join(wrong)


def test_there_is_no_circle_of_imports(arrows: nx.DiGraph[str]) -> None:
    assert nx.is_directed_acyclic_graph(arrows), nx.find_cycle(arrows)


@pytest.mark.parametrize("package", IN_ORDER)
def test_packages_inside_a_package_have_an_order(package: str, arrows: nx.DiGraph[str]) -> None:
    depth = package.count(".") + 2
    between: nx.DiGraph[str] = nx.DiGraph()
    for name, module in arrows.edges:
        if within(name, (package,)) and within(module, (package,)) and package not in (name, module):
            ends = [".".join(one.split(".")[:depth]) for one in (name, module)]
            if ends[0] != ends[1]:
                between.add_edge(*ends)
    assert nx.is_directed_acyclic_graph(between), nx.find_cycle(between)


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


def test_modules_are_short() -> None:
    """One idea a module: 150 lines in the middle, 450 at most."""
    lengths = {name: len(path.read_text().splitlines()) for name, path in modules() if path.stat().st_size}
    assert median(lengths.values()) <= 150
    assert not {name: count for name, count in lengths.items() if count > 450}
