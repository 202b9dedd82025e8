"""Ring attention within packed documents: equal to attention document by document, in memory linear in the length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autopar.ir.lowered.ring import ring_attention
from autopar.ir.mesh import Mesh
from autopar.ir.ops import composite
from autopar.ir.ops.documents import runs_of
from autopar.ir.packed_order import order_of, piece
from autopar.ir.sequence import Span, spans, stored
from tests.harness import run_ranks
from tests.ir.layouts import axis_groups
from tests.ir.test_packed_order import documents_of, log_normal

LENGTH = 48


@dataclass(frozen=True)
class Case:
    """axes: sizes of the groups that cut the queries. ring: which of them cut the keys too. order: of the sequence.

    num_ranks: that the order is for; more than cut the queries where heads are divided instead.
    """

    axes: tuple[int, ...]
    ring: tuple[bool, ...]
    order: str
    num_ranks: int
    kind: composite.AttentionKind = "causal"
    window: int | None = None
    mask: str = "none"
    documents: str = "each"


def documents(case: Case) -> Tensor:
    """(2, S), or (1, S) for both rows; "again": a document goes on after another."""
    rows = documents_of([[5, 1, 30, 12], [48], [3, 20, 25]])
    if case.documents == "alike":
        return rows[:1]
    if case.documents == "again":
        return torch.stack([rows[0].masked_fill(rows[0] == 3, 0), rows[2]])
    return rows[:2]


def operands(case: Case) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, h, LENGTH, 4, generator=generator, dtype=torch.float64) for h in (4, 2, 2))
    mask = None
    if case.mask == "padding":
        mask = torch.rand(2, 1, 1, LENGTH, generator=generator) > 0.1
        mask[..., 0] = True
    elif case.mask == "bias":
        mask = torch.randn(2, 4, LENGTH, LENGTH, generator=generator, dtype=torch.float64)
    return [q, k, v, mask]


def orders(case: Case) -> list[tuple[Span, ...]]:
    """Of each of the two rows."""
    if case.order != "documents":
        return [spans(LENGTH, case.num_ranks if case.order == "zigzag" else 1)] * 2
    found = [order_of(runs, LENGTH, case.num_ranks) for runs in runs_of(documents(case))]
    return found * (2 // len(found))


def taken(x: Tensor, case: Case, part: Span, dim: int) -> Tensor:
    """What lies in a part of storage of both rows."""
    rows = []
    for row, order in zip(x, orders(case), strict=True):
        index = [position for span in piece(order, part) for position in range(*span)]
        rows.append(row.index_select(dim - 1, torch.tensor(index, dtype=torch.int64)))
    return torch.stack(rows)


def errors(cases: list[Case]) -> list[str]:
    """What differs from attention document by document on this rank."""
    found = []
    known: dict[tuple[int, ...], dict[str, str]] = {}
    for case in cases:
        axes = case.axes or (dist.get_world_size(),)
        groups = known.setdefault(axes, axis_groups(Mesh.of(**{f"a{n}": s for n, s in enumerate(axes)})))
        names = tuple(groups.values()) if case.axes else ()
        whole = [None if x is None else x.requires_grad_(x.is_floating_point()) for x in operands(case)]
        q, k, v, mask = whole
        expected = composite.attention(
            q, k, v, mask, None, documents(case), kind=case.kind, window=case.window, scale=0.3
        )
        cotangent = torch.randn(expected.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
        (expected * torch.where(expected.isnan(), 0.0, cotangent)).nansum().backward()
        rank, place = dist.get_rank(), []
        for size in reversed(axes):
            rank, own = divmod(rank, size)
            place.insert(0, own)
        number, count, key_number, key_count = 0, 1, 0, 1
        for size, own, ring in zip(case.axes, place, case.ring):
            number, count = number * size + own, count * size
            if ring:
                key_number, key_count = key_number * size + own, key_count * size
        part, keys = stored(LENGTH, number, count), stored(LENGTH, key_number, key_count)
        local = [taken(q.detach(), case, part, 2), *(taken(x.detach(), case, keys, 2) for x in (k, v)), None]
        if mask is not None:
            rows = taken(mask.detach(), case, part, 2) if mask.shape[2] > 1 else mask.detach()
            columns = keys if mask.shape[2] == 1 else Span(0, LENGTH)
            local[3] = taken(rows, case, columns, 3)
        for x in local:
            if x is not None and x.is_floating_point():
                x.requires_grad_()
        out = ring_attention(
            *local, documents(case), kind=case.kind, window=case.window, scale=0.3, lengths=(LENGTH, LENGTH),
            zigzag_ranks=1 if case.order == "natural" else case.num_ranks, by_documents=case.order == "documents",
            query_groups=names, key_groups=tuple(name for name, ring in zip(names, case.ring) if ring),
        )  # fmt: skip
        wanted = taken(expected.nan_to_num(), case, part, 2)
        out.backward(taken(torch.where(expected.isnan(), 0.0, cotangent), case, part, 2))
        pairs = {"result": (out, wanted), "q": (local[0].grad, taken(q.grad, case, part, 2))}
        for name, own, x in zip("kv", local[1:3], (k, v)):
            grad = own.grad.clone()
            for axis, ring in enumerate(case.ring):
                if not ring:
                    dist.all_reduce(grad, group=dist.distributed_c10d._resolve_process_group(groups[f"a{axis}"]))
            pairs[name] = grad, taken(x.grad, case, keys, 2)
        if local[3] is not None and local[3].grad is not None:
            pairs["mask"] = local[3].grad, taken(taken(mask.grad, case, part, 2), case, Span(0, LENGTH), 3)
        for name, (own, other) in pairs.items():
            if own.shape != other.shape or not torch.allclose(own, other, rtol=1e-9, atol=1e-9):
                found.append(f"{name} of {case}")
    return found


def cases(axes: tuple[int, ...], ring: tuple[bool, ...], num_ranks: int) -> list[Case]:
    found = []
    for order in ("natural", "zigzag", "documents"):
        if order == "natural" and not axes:
            continue
        common = axes, ring, order, num_ranks
        found += [Case(*common), Case(*common, kind="full"), Case(*common, kind="sliding", window=7)]
        found += [Case(*common, documents="alike"), Case(*common, documents="again")]
        found += [Case(*common, mask="padding"), Case(*common, mask="bias")]
    return found


def test_two_ranks_equal_documents_one_by_one() -> None:
    batch = [*cases((2,), (True,), 2), *cases((2,), (False,), 2), *cases((), (), 2)]
    assert run_ranks(errors, 2, batch) == [[]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("ring", [(True, True), (True, False), (False, True)])
def test_two_axes_equal_documents_one_by_one(ring: tuple[bool, ...]) -> None:
    assert run_ranks(errors, 4, cases((2, 2), ring, 4)) == [[]] * 4


class Largest(TorchDispatchMode):
    """Notes the most elements that any tensor has, and the queries and keys that kernels are given."""

    numel = 0
    pairs = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        sizes = (leaf.numel() for leaf in tree_leaves(found) if isinstance(leaf, Tensor))
        self.numel = max(self.numel, *sizes, 0)
        if func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
            self.pairs += args[0].shape[2] * args[1].shape[2]
        return found


def largest(length: int) -> tuple[int, int]:
    """The most elements of a tensor in a ring of one rank's part of a row, and pairs that kernels are given."""
    group = axis_groups(Mesh.of(cp=dist.get_world_size()))["cp"]
    local = [torch.randn(1, 2, length // dist.get_world_size(), 8, requires_grad=True) for _ in range(3)]
    packed = documents_of([log_normal(length, 1, median=100.0, sigma=1.0)])
    with Largest() as meter:
        out = ring_attention(
            *local, None, packed, kind="causal", scale=0.3, lengths=(length, length), zigzag_ranks=2,
            by_documents=True, query_groups=(group,), key_groups=(group,),
        )  # fmt: skip
        out.sum().backward()
    return meter.numel, meter.pairs


def both(lengths: tuple[int, ...]) -> list[tuple[int, int]]:
    return [largest(length) for length in lengths]


def test_memory_is_linear_in_the_length() -> None:
    short, long = 2048, 8192
    for (small, few), (large, many) in run_ranks(both, 2, (short, long)):
        assert large <= 1.01 * small * long / short
        assert large <= 4 * 8 * long  # keys and values of a rank, packed for one send
        assert many < 8 * few  # of whole rows there would be 16 times as many
