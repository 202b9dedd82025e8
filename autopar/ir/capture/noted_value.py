"""The value that torch.export has recorded of an op's result."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

_RECURRENT = (aten.lstm, aten.gru, aten.rnn_tanh, aten.rnn_relu)


def noted_value(node: fx.Node) -> Any:
    """The fake result of an exported op; None where it has to be found out anew.

    On CPUs torch 2.11 notes other shapes for the states of recurrent layers than they have.
    """
    op = node.args[0] if node.target is operator.getitem else node
    recurrent = isinstance(op, fx.Node) and getattr(op.target, "overloadpacket", None) in _RECURRENT
    return None if recurrent else node.meta.get("val")
