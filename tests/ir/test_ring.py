"""Ring attention on several processes: equal to whole attention, in 1 / N of the memory, with balanced work."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.ir.lowered import blockwise
from autopar.ir.lowered.ring import ring_attention
from autopar.ir.mesh import Mesh
from autopar.ir.ops import composite
from autopar.ir.primitives.collective_counter import CollectiveCounter
from autopar.ir.primitives.collectives import all_to_all
from autopar.ir.sequence import Block, Sight, Span, spans
from tests.harness import run_ranks
from tests.ir.layouts import axis_groups

RANKS = 4


@dataclass(frozen=True)
class Case:
    """An attention and how it is cut: by ``axes`` ranks, keys along those in ``ring``."""

    kind: composite.AttentionKind
    lengths: tuple[int, int]
    heads: tuple[int, int]
    sizes: tuple[int, int]
    window: int | None
    mask: str
    zigzag: bool
    axes: tuple[int, ...]
    ring: tuple[bool, ...]
    dtype: torch.dtype = torch.float64

    def operands(self) -> list[Tensor | None]:
        """q, k, v and the mask, all of them whole; every query sees a key."""
        generator = torch.Generator().manual_seed(3)
        queries, keys = self.lengths
        shapes = zip(self.heads, (queries, keys), strict=True)
        q, k = (torch.randn(2, h, n, self.sizes[0], generator=generator, dtype=self.dtype) for h, n in shapes)
        v = torch.randn(2, self.heads[1], keys, self.sizes[1], generator=generator, dtype=self.dtype)
        mask = None
        if self.mask == "bias":
            mask = torch.randn(1, self.heads[0], queries, keys, generator=generator, dtype=self.dtype)
        elif self.mask == "documents":
            mask = (torch.arange(queries)[:, None] // 5 == torch.arange(keys) // 5)[None, None]
        return [q, k, v, mask]

    def whole(self, *operands: Tensor | None) -> Tensor:
        q, k, v, mask = operands
        return composite.attention(q, k, v, mask, kind=self.kind, window=self.window, scale=0.3)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kind = draw(st.sampled_from(["full", "causal", "sliding"]))
    axes, ring = draw(
        st.sampled_from(
            [
                ((4,), (True,)),
                ((4,), (False,)),
                *(((2, 2), ring) for ring in [(True, True), (False, True), (True, False)]),
            ]
        )
    )
    zigzag = draw(st.booleans())
    queries = 8 * draw(st.integers(1, 3)) if zigzag else draw(st.integers(1, 25))
    keys = queries if kind != "full" or draw(st.booleans()) else draw(st.integers(1, 25))
    if zigzag and keys % 8:
        keys = queries
    groups = draw(st.integers(1, 2))
    size = draw(st.integers(1, 5))
    return Case(
        kind=kind,
        lengths=(queries, keys),
        heads=(groups * draw(st.integers(1, 3)), groups),
        sizes=(size, draw(st.sampled_from([size, 3]))),
        window=draw(st.integers(1, 9)) if kind == "sliding" else None,
        mask=draw(st.sampled_from(["none", "none", "bias", "documents"] if queries == keys else ["none"])),
        zigzag=zigzag,
        axes=axes,
        ring=ring,
    )


def _index(held: tuple[Span, ...]) -> list[int]:
    return [position for span in held for position in range(*span)]


def _ring(case: Case, groups: tuple[str, ...]) -> tuple[list[Tensor | None], list[list[int]], Any]:
    """This rank's operands, which positions of queries and keys they are, and the call."""
    rank, place = dist.get_rank(), []
    for size in reversed(case.axes):
        rank, own = divmod(rank, size)
        place.insert(0, own)
    zigzag_ranks = RANKS if case.zigzag else 1
    cuts = [(size, own) for size, own, ring in zip(case.axes, place, case.ring) if ring]
    positions = []
    for length, parts in zip(case.lengths, (list(zip(case.axes, place)), cuts)):
        index = count = 0
        for size, own in parts:
            index, count = index * size + own, max(count, 1) * size
        positions.append(_index(spans(length, zigzag_ranks, index, max(count, 1))))
    order = _index(spans(case.lengths[1], zigzag_ranks))
    q, k, v, mask = case.operands()
    local = [q[:, :, positions[0]], k[:, :, positions[1]], v[:, :, positions[1]], mask]
    if mask is not None:
        local[3] = mask[:, :, positions[0]][..., order]
    for x in local:
        if x is not None and x.is_floating_point():
            x.requires_grad_()

    def call() -> Tensor:
        return ring_attention(
            *local,
            kind=case.kind,
            window=case.window,
            scale=0.3,
            lengths=case.lengths,
            zigzag_ranks=zigzag_ranks,
            query_groups=groups,
            key_groups=tuple(group for group, ring in zip(groups, case.ring) if ring),
        )

    return local, positions, call


def _check(batch: list[Case]) -> list[str]:
    """What differs from whole attention on this rank."""
    found = []
    every = {axes: axis_groups(Mesh.of(**{f"a{n}": s for n, s in enumerate(axes)})) for axes in ((4,), (2, 2))}
    groups = {axes: {f"a{n}": known[f"a{n}"] for n in range(len(axes))} for axes, known in every.items()}
    for case in batch:
        whole = [None if x is None else x.requires_grad_(x.is_floating_point()) for x in case.operands()]
        expected = case.whole(*whole)
        cotangent = torch.randn(expected.shape, generator=torch.Generator().manual_seed(4), dtype=case.dtype)
        expected.backward(cotangent)
        local, (rows, _), call = _ring(case, tuple(groups[case.axes].values()))
        out = call()
        out.backward(cotangent[:, :, rows])
        pairs = {"result": (out, expected[:, :, rows]), "q": (local[0].grad, whole[0].grad[:, :, rows])}
        for name, own, x in zip("kv", local[1:], whole[1:]):
            # Queries that are cut where keys are not: each rank has a summand.
            grad = own.grad.clone()
            for number, ring in enumerate(case.ring):
                if not ring:
                    group = groups[case.axes][f"a{number}"]
                    dist.all_reduce(grad, group=dist.distributed_c10d._resolve_process_group(group))
            pairs[name] = (grad, x.grad[:, :, _ring(case, tuple(groups[case.axes].values()))[1][1]])
        if local[3] is not None and local[3].grad is not None:
            order = _index(spans(case.lengths[1], RANKS if case.zigzag else 1))
            pairs["mask"] = (local[3].grad, whole[3].grad[:, :, rows][..., order])
        tolerance = 1e-9 if case.dtype is torch.float64 else 2e-2
        for name, (own, other) in pairs.items():
            if own.shape != other.shape or not torch.allclose(own, other, rtol=tolerance, atol=tolerance):
                found.append(f"{name} of {case}")
    return found


# No shrinking: each example starts processes.
@settings(
    max_examples=3,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(batch=st.lists(cases(), min_size=30, max_size=30))
def test_ring_equals_whole_attention(batch: list[Case]) -> None:
    assert run_ranks(_check, RANKS, batch) == [[]] * RANKS


def test_narrow_types_and_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    common = {"heads": (4, 2), "window": None, "mask": "none", "axes": (4,), "ring": (True,)}
    narrow = [
        Case(kind=kind, lengths=(64, 64), sizes=(8, 8), zigzag=zigzag, dtype=dtype, **common)
        for kind in ("full", "causal")
        for zigzag in (False, True)
        for dtype in (torch.bfloat16, torch.float16)
    ]
    assert run_ranks(_check, RANKS, narrow) == [[]] * RANKS
    # Tiles: one process is enough.
    monkeypatch.setattr(blockwise, "TILE", 3)
    for kind, window in (("causal", None), ("sliding", 4)):
        case = Case(**{**common, "kind": kind, "window": window, "lengths": (11, 11), "sizes": (4, 5)}, zigzag=False)
        alone, tiled = ([x if x is None else x.requires_grad_() for x in case.operands()] for _ in range(2))
        out = ring_attention(
            *tiled, kind=kind, window=window, scale=0.3, lengths=(11, 11), query_groups=(), key_groups=()
        )
        expected = case.whole(*alone)
        torch.testing.assert_close(out, expected)
        for one in (out, expected):
            one.sum().backward()
        for own, other in zip(tiled[:3], alone[:3]):
            torch.testing.assert_close(own.grad, other.grad)


class _Meter(TorchDispatchMode):
    """Most bytes of tensors alive at once, and the pairs of query and key that attention kernels work on."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.peak = self.pairs = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                key = storage._cdata
                if key not in self.alive:
                    self.alive[key] = storage.nbytes()
                    weakref.finalize(storage, self.alive.pop, key, None)
        self.peak = max(self.peak, sum(self.alive.values()))
        name = func._schema.name
        if "flash_attention" in name:
            q, k = args[1:3] if "backward" in name else args[:2]
            causal = True in [arg for arg in args if isinstance(arg, bool)]
            pairs = q.shape[2] * (q.shape[2] + 1) / 2 if causal else q.shape[2] * k.shape[2]
            self.pairs += pairs * q.shape[0] * q.shape[1] * (2.5 if "backward" in name else 1)
        return result


def _measure(group: str, length: int, zigzag: bool) -> tuple[int, float, dict[str, tuple[int, float]]]:
    """Peak bytes of a causal attention, its work and what it sends, of this rank."""
    count = dist.get_world_size()
    local = [torch.randn(1, heads, length // count, 16, requires_grad=True) for heads in (4, 2, 2)]
    grad = torch.randn(1, 4, length // count, 16)
    with CollectiveCounter() as counter, _Meter() as meter:
        out = ring_attention(
            *local, kind="causal", scale=0.25, lengths=(length, length), zigzag_ranks=count if zigzag else 1,
            query_groups=(group,), key_groups=(group,),
        )  # fmt: skip
        out.backward(grad)
    held = sum(x.nbytes for x in (*local, grad))
    sent = {p: (counter.count("send", phase=p), counter.sent_bytes("send", phase=p)) for p in ("forward", "backward")}
    return meter.peak + held, meter.pairs, sent


def _measure_both(length: int) -> list[tuple[int, float, dict[str, tuple[int, float]]]]:
    group = axis_groups(Mesh.of(cp=dist.get_world_size()))["cp"]
    return [_measure(group, length, zigzag) for zigzag in (True, False)]


@pytest.mark.parametrize("counts", [(2, 4), pytest.param((4, 8), marks=pytest.mark.slow)])
def test_memory_falls_as_one_over_n_and_work_is_balanced(counts: tuple[int, int]) -> None:
    length, peaks = 1024, {}
    for count in counts:
        ranks = run_ranks(_measure_both, count, length)
        peaks[count] = max(zigzag[0] for zigzag, _ in ranks)
        zigzag, contiguous = ([rank[n][1] for rank in ranks] for n in (0, 1))
        assert sum(zigzag) == sum(contiguous) == 3.5 * 4 * length * (length + 1) / 2
        assert max(zigzag) <= 1.1 * sum(zigzag) / count
        assert max(contiguous) == pytest.approx((2 * count - 1) / count * sum(contiguous) / count, rel=0.01)
        piece = 2 * 2 * length // count * 16 * 4  # keys and values of two heads
        for rank in ranks:
            for *_, sent in rank:
                assert sent["forward"] == (count - 1, (count - 1) * piece)
                assert sent["backward"] == (2 * count - 1, (2 * count - 1) * piece)
    fewer, more = counts
    assert peaks[more] <= 1.1 * peaks[fewer] * fewer / more, peaks


def _ulysses() -> tuple[list[float], str]:
    """All-to-alls from the sequence to the heads and back around whole attention."""
    group = axis_groups(Mesh.of(cp=dist.get_world_size()))["cp"]
    torch.manual_seed(0)
    whole = [torch.randn(2, 4, 8, 3, requires_grad=True) for _ in range(3)]
    expected = composite.attention(*whole, kind="causal", scale=0.5)
    expected.sum().backward()
    rank, count = dist.get_rank(), dist.get_world_size()
    local = [x.detach().chunk(count, 2)[rank].clone().requires_grad_() for x in whole]
    with CollectiveCounter() as counter:
        heads = [all_to_all(x, gather_dim=2, shard_dim=1, group=group) for x in local]
        out = all_to_all(composite.attention(*heads, kind="causal", scale=0.5), gather_dim=1, shard_dim=2, group=group)
        out.sum().backward()
    pairs = [(out, expected), *((x.grad, y.grad) for x, y in zip(local, whole))]
    return [float((own - other.chunk(count, 2)[rank]).abs().max()) for own, other in pairs], str(counter)


def test_ulysses_is_four_all_to_alls_each_way() -> None:
    for errors, counted in run_ranks(_ulysses, 2):
        assert max(errors) < 1e-5
        assert counted == "forward: 4 all_to_all; backward: 4 all_to_all"


def test_a_block_of_heads_that_are_last_in_memory() -> None:
    """The kernel of CPUs reads past the strides of such operands without a word."""
    n, whole = 32, Span(0, 32)
    scores = blockwise.Scores(0.5, Sight("causal"), Block(whole, whole, whole, whole, whole=False))
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 3, 8, n, generator=generator, requires_grad=True) for _ in range(3))
    expected = composite.attention(q.mT.contiguous(), k.mT.contiguous(), v.mT.contiguous(), kind="causal", scale=0.5)
    grad = torch.randn(2, 3, 8, n, generator=generator).mT
    wanted = torch.autograd.grad(expected, (q, k, v), grad)
    with torch.no_grad():
        out, lse = blockwise.forward(q.mT, k.mT, v.mT, None, scores)
        found = blockwise.backward(grad, q.mT, k.mT, v.mT, None, out, lse, scores, None)
    torch.testing.assert_close(out, expected)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other.mT)
