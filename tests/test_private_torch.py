"""Private names of torch are used in a few modules alone, where each has its reason and a test."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("autopar", "passes", "runtime", "cost_model")
WRAPPERS = {
    "autopar/ir/torch_private.py",
    "autopar/ir/torch_private_symbols.py",
    "runtime/torch_private.py",
    "runtime/torch_private_pipelining.py",
}
# Private names that are not torch's: of Python, of named tuples, of transformers.
OTHERS = {
    "_getframe", "_current_frames", "_exit", "_exit_function", "_run_exitfuncs", "_lru_cache_wrapper", "_replace",
    "_fields", "_asdict", "_lru_list_elem",
    "_keys_to_ignore_on_save", "_keys_to_ignore_on_load_missing", "_keys_to_ignore_on_load_unexpected",
    "_prepare_inputs", "_init_weights", "_can_set_experts_implementation", "_experts_implementation",
    "_attn_implementation",
}  # fmt: skip


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def defined_in(tree: ast.AST) -> set[str]:
    """The names that a module gives to functions, classes, variables, arguments and attributes."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node.value):
            found.add(node.attr)
    return found


def _is_own(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def private_uses(source: str) -> Iterator[tuple[int, str]]:
    """(line, what) where a module reaches for a private name that it has not defined itself."""
    tree = ast.parse(source)
    own = defined_in(tree) | OTHERS
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names = [*modules, *(alias.name for alias in node.names)]
            parts = [part for name in names for part in name.split(".")]
            if names[0].partition(".")[0] == "torch" and any(map(is_private, parts)):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
            yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func).rpartition(".")[2]
            if called in ("getattr", "setattr", "hasattr", "delattr", "replaced", "replace", "import_module"):
                for text in (a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)):
                    if any(map(is_private, text.split("."))) and text not in own:
                        yield node.lineno, ast.unparse(node)


def test_other_modules_use_public_names_of_torch() -> None:
    wrong = [
        f"{name}:{line}: {what}; put it into {sorted(WRAPPERS)[0]} or the like, with the reason and a test"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if (name := str(path.relative_to(ROOT))) not in WRAPPERS
        for line, what in private_uses(path.read_text())
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", sorted(WRAPPERS))
def test_wrappers_are_there_and_use_private_names(name: str) -> None:
    assert len(list(private_uses((ROOT / name).read_text()))) >= 2


@pytest.mark.parametrize(
    "source",
    [
        "from torch._subclasses.fake_tensor import FakeTensor",
        "from torch.utils import _pytree as pytree",
        "import torch._dynamo",
        "torch._C._current_graph_task_id()",
        "torch.ops.aten._to_copy.default",
        "parameter._version",
        "class Stage(PipelineStage):\n    def step(self):\n        return self._has_backward",
        "getattr(parameter, '_backward_hooks')",
        "importlib.import_module('torch._higher_order_ops.scan')",
        "def f(state):\n    return state._lazy_init()",
    ],
)
def test_a_use_is_found(source: str) -> None:
    assert list(private_uses(source))


@pytest.mark.parametrize(
    "source",
    [
        "torch.__version__",
        "import torch.export",
        "class A:\n    def __init__(self):\n        self._x = 1\n    def other(self, a):\n        return a._x",
        "x = 'torch._check(True)'",
    ],
)
def test_other_names_are_not(source: str) -> None:
    assert not list(private_uses(source))
