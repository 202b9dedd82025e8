"""Switches of libraries that a trace needs, set for as long as it takes.

    torch.distributions   validate_args   off: the checks look at values
    torch.nn              .to(dtype)      nothing, where forward converts a module to the dtype that it has
                          SyncBatchNorm   BatchNorm, whose statistics are those of the global batch under every plan
    transformers          experts         grouped products, where there is a loop over the experts that were chosen
                          attention       scaled_dot_product_attention, where there is a flash kernel, which it may call

The graph that is captured is what runs, so a model computes by the chosen variant under every plan.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from autopar.ir.autograd.replacing import replaced
from autopar.ir.torch_private import CONVERT_MODULE, distributions_check_values

# What a user is told where a line of a model has this in it, and the trace ends there.
_HINTS = (
    ("layerdrop", "layerdrop=0.0 in the model's config: a layer that is left out by chance is another program"),
    (
        "expert",
        "products of all experts at once (bmm, torch.nn.functional.grouped_mm) in place of a loop over those that were "
        "chosen; where transformers has them for a model, as an experts_implementation, they are used already",
    ),
    ("flex_attention", "attn_implementation='sdpa' in transformers"),
    ("flash_attn", "attn_implementation='sdpa' in transformers"),
    ("distributions", "validate_args=False, where a distribution is made with validate_args=True"),
    ("assert ", "forward without the assertion, or torch._assert_async, which runs beside the model"),
)


@contextmanager
def traceable_libraries() -> Iterator[None]:
    """Meanwhile distributions do not look at values, and a module that is converted to what it is stays as it is."""
    before = distributions_check_values()
    apply = CONVERT_MODULE.original

    def convert(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        tensors = [*module.parameters(), *module.buffers()]
        converted = map(function, tensors)
        if all((a.dtype, a.device, a.shape) == (b.dtype, b.device, b.shape) for a, b in zip(tensors, converted)):
            return module
        result: nn.Module = apply(module, function, recurse)
        return result

    Distribution.set_default_validate_args(False)
    try:
        with replaced(*CONVERT_MODULE, convert), replaced(nn.SyncBatchNorm, "forward", nn.BatchNorm1d.forward):
            yield
    finally:
        Distribution.set_default_validate_args(before)


@dataclass(slots=True)
class Plainly:
    """Within ``asked``, code that is not torch's and asks whether it is traced is answered no if ``denied``.

    Some models make no mask where they are traced, and then need one.
    """

    denied: bool
    was_asked: bool = False

    @contextmanager
    def asked(self) -> Iterator[None]:
        """Replace torch.compiler's queries within the context."""
        with ExitStack() as stack:
            for name in ("is_compiling", "is_exporting", "is_dynamo_compiling"):
                stack.enter_context(replaced(torch.compiler, name, self._answer(getattr(torch.compiler, name))))
            yield

    def _answer(self, question: Callable[[], bool]) -> Callable[[], bool]:
        def answer() -> bool:
            truth = question()
            if sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] == "torch":
                return truth
            self.was_asked |= truth
            return truth and not self.denied

        return answer


def switch(twin: nn.Module) -> None:
    """Have the modules of a stand-in, which are the trace's own, compute by variants that can be traced."""
    for module in twin.modules():
        model: Any = module
        config = getattr(model, "config", None)
        able = getattr(model, "_can_set_experts_implementation", lambda: False)
        if getattr(config, "_experts_implementation", None) == "eager" and able():
            model.set_experts_implementation("grouped_mm")
        attention = getattr(config, "_attn_implementation", None)
        if isinstance(attention, str) and "flash" in attention and hasattr(model, "set_attn_implementation"):
            model.set_attn_implementation("sdpa")


def hint(where: str) -> str | None:
    """The switch that the line ``where`` (file, function and code) points to; None if it is not known of any."""
    return next((remedy for needle, remedy in _HINTS if needle in where), None)
