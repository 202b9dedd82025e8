"""Private names of torch for sizes as symbols, under plain names.

``tests/ir/test_torch_private_symbols.py`` has a case for each. Tried with torch 2.11.0, 2.13.0 and 2.14.1.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

import sympy
import torch
from torch._dispatch.python import enable_python_dispatcher

from autopar.ir.torch_private import FakeTensorMode

# Lines of our own stand for those of a model that called them.
_PACKAGE = str(Path(__file__).parents[1])


def is_symbolic(number: Any) -> bool:
    """Whether a number of a trace is a symbol or made of symbols."""
    return isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool))


def is_unknown(number: Any) -> bool:
    """Whether a number of a trace depends on values, not on sizes of step inputs alone."""
    return is_symbolic(number) and not number.node.has_hint()


def hint_of(number: torch.SymInt | torch.SymFloat | torch.SymBool) -> Any:
    """The number at the sizes of the trace. Public conversions, as ``int``, make the size a constant."""
    return number.node.hint


def expression_of_symbol(number: Any) -> sympy.Expr:
    """A number of a trace over the symbols of its sizes."""
    return cast("sympy.Expr", number.node.expr if is_symbolic(number) else sympy.sympify(number))


def symbolic_size(mode: FakeTensorMode, expression: sympy.Expr, hint: int) -> Any:
    """The size that an expression over the symbols of ``mode`` is, to be given to ops."""
    environment: Any = mode.shape_env
    return environment.create_symintnode(expression, hint=hint)


def are_equal(a: Any, b: Any) -> None:
    """Make one symbol of two sizes of a trace. Documented, and under a private name."""
    torch._check(a == b)


def fixing_lines(mode: FakeTensorMode) -> dict[int, str]:
    """Sizes that began as symbols of ``mode`` and became numbers -> the line that made them so."""
    environment: Any = mode.shape_env
    found: dict[int, str] = {}
    for symbol, number in environment.replacements.items():
        frame = getattr(environment.replacements_slocs.get(symbol), "framework_loc", None)
        if number.is_Integer and frame is not None and not frame.filename.startswith(_PACKAGE):
            found[int(number)] = f"{frame.filename}:{frame.lineno}"
    return found


def python_kernels() -> AbstractContextManager[Any]:
    """Within, ops of which C++ knows no symbolic shape have it from Python, as in ``torch.export``."""
    return cast("AbstractContextManager[Any]", enable_python_dispatcher())
