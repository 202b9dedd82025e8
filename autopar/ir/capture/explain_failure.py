"""The error of a failed capture: the line of the model that stopped it, and a remedy."""

from __future__ import annotations

import traceback

import torch
from torch import fx

from autopar.ir.capture.library_switches import hint
from autopar.ir.errors import CaptureError
from autopar.ir.source import origin_of, user_frame
from autopar.ir.torch_private import CONTROL_FLOW_FILES, pytree
from autopar.ir.torch_private_symbols import is_unknown

# Text in torch's message -> what it means, and what to try. The first that fits is used.
_CAUSES: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (
        ("argument 'size' failed to unpack",),
        "the size of a tensor depends on values, as that of a packed sequence does",
        "the padded sequence, with the steps after the end of each sample masked in the loss",
    ),
    (
        ("data-dependent", "data dependent", "DataDependent", "dynamic control flow", "_local_scalar_dense"),
        "its Python control flow or a Python number depends on the values of a tensor",
        "torch.where in place of `if`, masks in place of indexing by a condition, "
        "and no .item(), .tolist() or bool() of a tensor in forward",
    ),
    (
        ("unexpected keyword argument", "missing", "positional argument"),
        "example_inputs do not fit the signature of forward",
        "a dict for keyword arguments, a tuple for positional ones",
    ),
    (
        ("DynamicOutputShape", "nonzero", "dynamic shape operator"),
        "the shape of a tensor depends on values",
        "masks in place of nonzero() or boolean indexing",
    ),
    (
        (".numpy()",),
        "it leaves torch for numpy, whose operations are not seen",
        "torch ops in place of numpy, or a torch.autograd.Function around what numpy does",
    ),
    (
        ("torch.autocast", "autocast"),
        "forward switches autocast on",
        "dropping autocast; the plan's precision takes its place",
    ),
)

# File of torch that the error came through -> likewise.
_FILES: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (
        CONTROL_FLOW_FILES,
        "it hands a function of its own to torch's while_loop or cond",
        "scan, a recurrent layer, or a Python loop over the steps",
    ),
)


def refuse_unknown_sizes(title: str, graph: fx.Graph) -> None:
    """Raise CaptureError if a number or a shape in an exported graph is known only when it runs."""
    for node in graph.nodes:
        for leaf in pytree.tree_leaves(node.meta.get("val")):
            numbers = leaf.shape if isinstance(leaf, torch.Tensor) else (leaf,)
            if any(is_unknown(number) for number in numbers):
                cause, change = _cause_of(str(node.target) if isinstance(leaf, torch.Tensor) else "item")
                where = origin_of(node)[1]
                change = hint(where) or change
                raise CaptureError(
                    f"{title} cannot be captured: {cause}.\n  at {where}\n  {node.target} has no value "
                    f"before the step runs\n  try: {change}"
                )


def _cause_of(target: str) -> tuple[str, str]:
    """Why a number or a shape is unknown that the op ``target`` gives, and what to try."""
    place = 0 if "pack" in target else 1 if "item" in target else 3
    return _CAUSES[place][1:]


def explain(title: str, error: BaseException) -> CaptureError:
    """A CaptureError for what torch.export raised on the model called ``title``."""
    text = _chain_text(error)
    where = user_frame(error)
    meaning, remedy = "torch.export could not follow it", "running forward on the example inputs without autopar first"
    if isinstance(error, NotImplementedError):
        remedy = hint(where) or remedy
    files = "\n".join(frame.filename for frame in traceback.extract_tb(error.__traceback__))
    facts = [
        *((files, entry) for entry in _FILES),
        *((text, entry) for entry in _CAUSES),
    ]
    for said, (needles, cause, change) in facts:
        if any(needle in said for needle in needles):
            meaning, remedy = cause, hint(where) or change
            break
    first_line = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
    location = f"\n  at {where}" if where else ""
    return CaptureError(
        f"{title} cannot be captured: {meaning}.{location}\n  {type(error).__name__}: {first_line}\n  try: {remedy}"
    )


def _chain_text(error: BaseException) -> str:
    parts: list[str] = []
    current: BaseException | None = error
    while current is not None and len(parts) < 8:
        parts.append(f"{type(current).__name__} {current}")
        current = current.__cause__ or current.__context__
    return "\n".join(parts)
