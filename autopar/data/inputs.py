"""From rows of tokens to the arguments of a model.

A model file that defines ``from_tokens(tokens)`` decides for itself: it gets (batch, seq_len + 1) token ids and returns
what ``example_inputs`` returns. Without it the names of the arguments decide, as language models commonly call them:

    input_ids, tokens, idx, ...   the first seq_len tokens of a row
    labels beside input_ids       the same ones, as in transformers: the model shifts them itself
    targets, labels, y            the tokens that follow
    attention_mask                ones
    position_ids                  0, 1, 2, ...
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopar.ir.errors import InvalidInput

_TOKENS = ("input_ids", "tokens", "token_ids", "ids", "idx", "inputs", "x")
_LABELS = ("labels", "targets", "target", "label", "y")
_INTEGERS = (torch.int64, torch.int32)


@dataclass(frozen=True, slots=True)
class TokenInputs:
    """Fills the inputs of a model with tokens. seq_len: tokens of a row. tokens: name of the input of token ids, if
    known."""

    seq_len: int
    fill: Callable[[Tensor], Any]
    tokens: str | None

    @classmethod
    def of(
        cls, example: Any, model: nn.Module, from_tokens: Callable[[Tensor], Any] | None, seq_len: int | None
    ) -> TokenInputs:
        """example: inputs of one global batch, on any device. seq_len: as asked for. Raises InvalidInput."""
        named = _named(example, model)
        rows = {name: value for name, value in named.items() if _is_rows(value)}
        if from_tokens is not None:
            length = next((value.shape[1] for value in rows.values()), seq_len)
            if length is None:
                raise InvalidInput("--data: no input of the model says how long a sequence is.\n  try: --seq N")
            return cls(length, from_tokens, None)
        roles = _roles(named, rows)
        tokens = next((name for name, role in roles.items() if role == "tokens"), None)
        if tokens is None or len({value.shape for value in rows.values()}) > 1:
            raise InvalidInput(_refusal(named))
        shifted = not (tokens == "input_ids" and "labels" in named)
        dtypes = {name: value.dtype for name, value in named.items()}

        def fill(windows: Tensor) -> Any:
            length = windows.shape[1] - 1
            first, following = windows[:, :length], windows[:, 1:]
            values = {
                "tokens": first,
                "labels": following if shifted else first,
                "ones": torch.ones_like(first),
                "positions": torch.arange(length).expand_as(first),
            }
            filled = {name: values[role].to(dtypes[name], copy=True) for name, role in roles.items()}
            if isinstance(example, Mapping):
                return filled
            return filled[tokens] if isinstance(example, Tensor) else tuple(filled.values())

        return cls(named[tokens].shape[1], fill, tokens)


def _named(example: Any, model: nn.Module) -> dict[str, Any]:
    """Inputs by the names of the arguments that they are passed as."""
    if isinstance(example, Mapping):
        return dict(example)
    values = tuple(example) if isinstance(example, (tuple, list)) else (example,)
    names = list(inspect.signature(model.forward).parameters)
    return {names[i] if i < len(names) else f"argument {i}": value for i, value in enumerate(values)}


def _is_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in _INTEGERS and value.dim() == 2


def _roles(named: Mapping[str, Any], rows: Mapping[str, Tensor]) -> dict[str, str]:
    """Name -> role, in the order of the inputs; empty if some input has none."""
    known = {"attention_mask": "ones", "position_ids": "positions"}
    known |= dict.fromkeys(_TOKENS, "tokens") | dict.fromkeys(_LABELS, "labels")
    roles = {name: known[name] for name in rows if name in known}
    unknown = [name for name in rows if name not in known]
    if "tokens" not in roles.values() and len(unknown) == 1:
        roles[unknown.pop()] = "tokens"  # whatever it is called, nothing else can be the tokens
    counts = [list(roles.values()).count(role) for role in ("tokens", "labels")]
    if unknown or len(roles) < len(named) or max(counts) > 1:
        return {}
    return {name: roles[name] for name in named}


def _refusal(named: Mapping[str, Any]) -> str:
    def kind(value: Any) -> str:
        if not isinstance(value, Tensor):
            return type(value).__name__
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"

    got = ", ".join(f"{name}: {kind(value)}" for name, value in named.items())
    return (
        "--data: it is not clear how tokens become the inputs of this model.\n"
        f"  expected: integers of (batch, seq_len), one of them called {', '.join(_TOKENS[:3])} or the like, and maybe "
        f"labels ({', '.join(_LABELS[:3])})\n"
        f"  got: {got}\n"
        "  try: in the model file, from_tokens(tokens), which makes of (batch, seq_len + 1) token ids what "
        "example_inputs returns; or batches(batch_size, seq_len, seed) that yields its own data, and no --data"
    )
