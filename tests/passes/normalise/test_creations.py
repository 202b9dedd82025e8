"""Filled tensors lose the operand that only told them dtype and device."""

from __future__ import annotations

import pytest
import torch

from autopar.passes.normalise.creations import DetachCreations
from tests.ir.tracing import Tracer, aten


@pytest.mark.parametrize(
    ("op", "args", "kwargs"),
    [
        (aten.new_zeros.default, ([4, 2],), {}),
        (aten.new_ones.default, ([4],), {"dtype": torch.int64}),
        (aten.new_full.default, ([4, 3], 7), {}),
    ],
    ids=["zeros", "ones with a dtype", "full"],
)
def test_values_and_dtypes_stay(op: object, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    t = Tracer()
    x = t.input("x", 5, dtype=torch.float64)
    captured = t.done(t.call(op, x, *args, **kwargs), has_loss=False)  # type: ignore[arg-type]
    (before,) = captured.graph_module(torch.zeros(5, dtype=torch.float64))
    captured = DetachCreations().apply(captured)
    result = captured.output_args()[0]
    assert not result.all_input_nodes
    assert result.meta["val"].dtype == before.dtype and result.meta["val"].shape == before.shape
    result.kwargs = {**result.kwargs, "device": torch.device("cpu")}
    captured.graph_module.recompile()
    (after,) = captured.graph_module(torch.zeros(5, dtype=torch.float64))
    torch.testing.assert_close(after, before, rtol=0, atol=0)
