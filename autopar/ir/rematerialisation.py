"""Words for what a block keeps for its backward.

    none        everything that autograd saves
    selective   results of contractions, of reductions and all-to-alls between ranks, and the block's inputs
    alternate   the same without every second matrix product
    full        the block's inputs
    listed      what the plan lists, and the block's inputs

What is not kept and is needed runs again.
"""

from __future__ import annotations

import re
from typing import Literal, get_args

from autopar.ir.errors import InvalidInput

Level = Literal["none", "selective", "alternate", "full"]
Remat = Literal["none", "selective", "alternate", "full", "listed"]

# From that which keeps most.
LEVELS: tuple[Level, ...] = get_args(Level)

_BYTES = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*([KMGT]i?)?B", re.IGNORECASE)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}
_SHARE = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,9})?)\s*%")


def parse_remat(text: str) -> Level | float:
    """A level, or the share that ``40%`` says. Raises InvalidInput."""
    if text in LEVELS:
        return text
    found = _SHARE.fullmatch(text.strip())
    if found is None or float(found[1]) > 100:
        raise InvalidInput(
            f"rematerialisation {text!r}; expected {', '.join(LEVELS)}, or a share that blocks keep of what autograd "
            "would save, as in 40%"
        )
    return float(found[1]) / 100


def parse_bytes(text: str) -> float:
    """The bytes that ``20GiB`` or ``500 MB`` says. Raises InvalidInput."""
    found = _BYTES.fullmatch(text.strip())
    if found is None:
        raise InvalidInput(f"size {text!r}; expected a number of bytes, as in 20GiB or 500MB")
    return float(found[1]) * _UNITS[(found[2] or "").lower()]
