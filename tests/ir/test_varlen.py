"""Documents as one call of a variable-length kernel: what it is told of whole rows, and of some queries of them.

The kernel runs on GPUs alone. Here a function in its place computes what its documentation says, sequence by sequence.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.ir.lowered import attention as local
from autopar.ir.ops import composite, varlen
from autopar.ir.ops.documents import runs_of
from tests.ir.test_packed_order import documents_of

SIZE = 8


def as_documented(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool = False,
) -> Tensor:
    """(T_q, H, D). A window counts from the query's place when the last query and the last key are aligned."""
    assert enable_gqa or query.shape[1] == key.shape[1]
    found = []
    for (q0, q1), (k0, k1) in zip(cu_seq_q.unfold(0, 2, 1).tolist(), cu_seq_k.unfold(0, 2, 1).tolist(), strict=True):
        assert q1 - q0 <= max_q and k1 - k0 <= max_k
        place, other = torch.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0), torch.arange(k1 - k0)
        left, right = (k1 - k0 if reach < 0 else reach for reach in window_size)
        seen = (other >= place - left) & (other <= place + right)
        q, k, v = query[q0:q1], key[k0:k1], value[k0:k1]
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = (torch.einsum("shd,thd->hst", q, k) * scale).masked_fill(~seen, float("-inf"))
        found.append(torch.einsum("hst,thd->shd", scores.softmax(-1), v))
    return torch.cat(found)


@pytest.mark.parametrize("takes_groups", [True, False])
@pytest.mark.parametrize(("kind", "window"), [("causal", None), ("full", None), ("sliding", 3)])
def test_it_is_attention_document_by_document(
    kind: composite.AttentionKind, window: int | None, takes_groups: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(varlen, "_kernel", lambda: (as_documented, takes_groups))
    for documents in (documents_of([[5, 1, 10], [3, 13]]), documents_of([[7, 9]])):
        q, k, v = (torch.randn(2, heads, 16, SIZE, dtype=torch.float64) for heads in (4, 2, 2))
        options: dict[str, Any] = {"kind": kind, "window": window, "scale": 0.4}
        expected = composite.attention(q, k, v, None, None, documents, **options)
        whole = varlen.attend_at_once(q, k, v, runs_of(documents), 0, **options)
        torch.testing.assert_close(whole, expected)
        for first, last in ((0, 6), (4, 12), (6, 16), (15, 16)):
            part = varlen.attend_at_once(q[:, :, first:last], k, v, runs_of(documents), first, **options)
            torch.testing.assert_close(part, expected[:, :, first:last])


def test_cpus_take_documents_one_by_one() -> None:
    q = torch.randn(1, 2, 4, SIZE, dtype=torch.bfloat16)
    assert not varlen.takes_documents(q, q, None, None, "causal", 0.0)
    assert local.takes_documents is composite.takes_documents is varlen.takes_documents
    assert varlen._kernel() is not None, "this torch has the kernel, whose parameters are as they were"
