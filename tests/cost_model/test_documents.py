"""Attention over documents: what is counted, against a mask; and what it costs beside whole rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_model.catalogue import make_cluster
from autopar.cost_model.compute.documents import Documents, pairs_seen
from autopar.cost_model.compute.op_roofline import OpCost
from autopar.cost_model.compute.op_time import OpTime
from autopar.cost_model.hardware.device import Device
from autopar.ir.mesh import Mesh
from autopar.ir.ops import composite
from autopar.ir.rules import rule_for
from autopar.ir.sequence import Sight

ROWS, LENGTH, HEADS, SIZE = 4, 512, 2, 64


@given(st.integers(1, 40), st.integers(1, 50), st.sampled_from(["full", "causal", "sliding"]))
def test_pairs_are_those_of_the_mask(length: int, window: int, kind: str) -> None:
    sight = Sight(kind, window if kind == "sliding" else None)  # type: ignore[arg-type]  # one of its names
    query, key = torch.arange(length)[:, None], torch.arange(length)
    seen = torch.ones(length, length, dtype=torch.bool)
    if kind != "full":
        seen = (key <= query) & (key > query - (window if kind == "sliding" else length))
    # A triangle counts as half of its square, as in the rule: without half of its diagonal.
    half = {"full": 0.0, "causal": length / 2, "sliding": min(window, length) / 2}[kind]
    assert pairs_seen(sight, length) == pytest.approx(int(seen.sum()) - half)


def cost(device: Device, documents: Documents | None, *, apart: bool = True, precision: str = "fp32") -> OpTime:
    x = torch.zeros(ROWS, HEADS, LENGTH, SIZE, device="meta", requires_grad=True)
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.int64, device="meta")
    graph = torch.fx.Graph()
    q = graph.placeholder("x")
    q.meta["val"] = x
    d = graph.placeholder("d")
    d.meta["val"] = ids
    node = graph.call_function(
        composite.attention, (q, q, q, None, None, d if apart else None), {"kind": "causal", "scale": 0.1}
    )
    node.meta["val"] = x
    op = OpCost.of(node, rule_for(node), device, precision=precision, batch_factor="b", documents=documents)
    return op.time((), Mesh(()))


def test_attention_is_priced_by_the_squares_of_lengths() -> None:
    device = make_cluster("cpu", 1, 1).device
    bare = replace(device, kernel_launch_s=0.0, memory_bandwidth=1e30)
    whole, same = cost(bare, None), cost(bare, Documents(((LENGTH, 1.0),)))
    assert same.forward_s == pytest.approx(whole.forward_s)
    assert same.backward_s == pytest.approx(whole.backward_s)
    quarters = cost(bare, Documents(((LENGTH // 4, 4.0),)))
    assert quarters.forward_s == pytest.approx(whole.forward_s / 4)
    mixed = cost(bare, Documents(((LENGTH // 4, 2.0), (LENGTH // 2, 1.0))))
    assert mixed.backward_s == pytest.approx(whole.backward_s * (2 / 16 + 1 / 4))
    # Each document has kernels of its own.
    many, few = (cost(device, Documents(((LENGTH // n, float(n)),))) for n in (256, 64))
    assert many.forward_s > few.forward_s
    # Attention that is not told of documents sees whole rows.
    assert cost(device, Documents(((2, 256.0),)), apart=False) == cost(device, None, apart=False)


def test_what_one_kernel_takes_costs_nothing_by_the_document() -> None:
    device = make_cluster("h100-sxm", 1, 1).device
    few, many = (Documents(((LENGTH // n, float(n)),)) for n in (4, 64))
    free = replace(device, kernel_launch_s=0.0)
    for precision, one in (("bf16", True), ("fp32", False)):
        launches = [cost(device, d, precision=precision).forward_s for d in (few, many)]
        bare = [cost(free, d, precision=precision).forward_s for d in (few, many)]
        begun = [a - b for a, b in zip(launches, bare, strict=True)]
        assert (begun[1] == pytest.approx(begun[0])) is one


def test_short_documents_attend_at_the_rate_that_was_measured_for_them() -> None:
    device = make_cluster("cpu", 1, 1).device
    rates = tuple(replace(r, attention_by_length=((64, 0.05), (256, 0.1), (1024, 0.2))) for r in device.matmul)
    rate = rates[0]
    found = [rate.attention_at(n) for n in (8, 64, 128, 256, 512, 1024, 9999)]
    assert found == pytest.approx([0.05, 0.05, 0.075, 0.1, 0.15, 0.2, 0.2])
    bare = replace(device, matmul=rates, kernel_launch_s=0.0, memory_bandwidth=1e30)
    whole, parts = cost(bare, None), cost(bare, Documents(((LENGTH // 4, 4.0),)))
    assert parts.forward_s == pytest.approx(whole.forward_s / 4 * 0.15 / 0.075)
