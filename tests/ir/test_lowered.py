"""Every lowering equals the whole op: results and gradients, on each way that its rule allows to shard it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from autopar.ir.errors import UnsupportedOp
from autopar.ir.lowered.attention import attention
from autopar.ir.lowered.random import derive_seed, seeded, shared_randomness
from autopar.ir.lowered.table import LOWERINGS, lowering_of
from autopar.ir.mesh import Mesh
from autopar.ir.ops import composite
from autopar.ir.placement import Layout, dual, local_shape
from autopar.ir.primitives.collective_counter import CollectiveCounter
from autopar.ir.primitives.collectives import bind_groups
from autopar.ir.primitives.group_communication import unbound_groups
from autopar.ir.rule import Assignment, FactorRule, parse_rule
from autopar.ir.rules import rule_for
from tests.harness import run_ranks
from tests.ir.layouts import axis_groups, piece, whole_of

aten = torch.ops.aten
MESH = Mesh.of(a=2, b=2)


@dataclass(frozen=True)
class Case:
    """An op on global tensors: ``tensors`` makes its operands, ``args`` and ``kwargs`` hold their numbers.

    constants: numbers of the operands that get no gradient.
    """

    target: Any
    tensors: Callable[[], list[Tensor]]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    constants: tuple[int, ...] = ()
    tolerance: float = 1e-9

    def leaf(self, number: int, x: Tensor) -> Tensor:
        return x.requires_grad_(x.is_floating_point() and number not in self.constants)


class T(int):
    """Number of a tensor operand among the arguments."""


def _randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def _targets(classes: int, *shape: int, ignored: int = -100) -> Tensor:
    target = torch.randint(0, classes, shape)
    target.view(-1)[::3] = ignored
    return target


def _logits() -> list[Tensor]:
    # Large, so that a sum of exponentials that is not shifted overflows.
    return [_randn(4, 8, 12) * 300, _targets(12, 4, 8)]


def _attention_inputs(length: int) -> list[Tensor]:
    return [_randn(2, 4, length, 3), _randn(2, 2, length, 3), _randn(2, 2, length, 5)]


def _batch_norm_inputs() -> list[Tensor]:
    return [_randn(8, 4, 2, 3) * 3 + 100, _randn(4), _randn(4), _randn(4), _randn(4).abs()]


def _batch_norm_case(*given: int) -> Case:
    """Of input, weight, bias, running mean and variance, those ``given``."""
    args = [T(given.index(n)) if n in given else None for n in range(5)]
    constants = tuple(given.index(n) for n in (3, 4) if n in given)
    functional = aten._native_batch_norm_legit_functional.default
    target = functional if constants else aten._native_batch_norm_legit.no_stats
    called = (*args[: 5 if constants else 3], True, 0.1, 1e-5)
    return Case(target, lambda: [_batch_norm_inputs()[n] for n in given], called, {}, constants, 1e-7)


def _cross_entropy_case(**options: Any) -> Case:
    return Case(composite.cross_entropy, _logits, (T(0), T(1)), options)


def _attention_case(kind: str, length: int = 16, window: int | None = None, *masks: Tensor) -> Case:
    kwargs = {"kind": kind, "window": window, "scale": 0.5}
    args = (T(0), T(1), T(2), *(T(3) for _ in masks))
    return Case(composite.attention, lambda: [*_attention_inputs(length), *(m.clone() for m in masks)], args, kwargs)


def _sink_case(kind: str, length: int = 16, window: int | None = None, *masks: Tensor) -> Case:
    """An attention with a sink for each of four heads."""
    plain = _attention_case(kind, length, window, *masks)
    args = (*plain.args[:3], T(3) if masks else None, T(3 + len(masks)))
    return Case(composite.attention, lambda: [*plain.tensors(), _randn(4)], args, plain.kwargs)


def _see_self(mask: Tensor) -> Tensor:
    """A mask under which every query sees itself, so that no row is empty."""
    return mask | torch.eye(mask.shape[-1], dtype=torch.bool)


PADDING = _see_self((torch.arange(16) > 2)[None, None, None].expand(2, 1, 1, 16))
BIAS = torch.linspace(-1, 1, 16 * 16, dtype=torch.float64).view(1, 1, 16, 16)
DOCUMENTS = (torch.arange(16)[:, None] // 5 == torch.arange(16) // 5)[None, None]


def _moe_case(*experts: int, up: int = 10, biases: int = 0, **options: Any) -> Case:
    """Eight experts of inner width 10 or, gated, 5, two a token, of which only ``experts`` get any."""
    inner = up // 2 if options["gated"] else up

    def tensors() -> list[Tensor]:
        index = torch.tensor(experts)[torch.randint(0, len(experts), (4, 6, 2))]
        found = [_randn(4, 6, 3), index, _randn(4, 6, 2), _randn(8, up, 3), _randn(8, 3, inner)]
        return [*found, *[_randn(8, up), _randn(8, 3)][:biases]]

    return Case(composite.moe, tensors, tuple(T(n) for n in range(5 + biases)), options)


CASES = {
    "embedding": Case(aten.embedding.default, lambda: [_randn(12, 4), torch.randint(0, 12, (4, 6))], (T(0), T(1))),
    "embedding-padding": Case(
        aten.embedding.default, lambda: [_randn(12, 4), torch.arange(24).view(4, 6) % 12], (T(0), T(1), 7)
    ),
    "bag": Case(
        composite.embedding_bag,
        lambda: [_randn(12, 4), torch.randint(0, 12, (4, 6)), _randn(4, 6)],
        (T(0), T(1), T(2)),
        {"mode": "sum", "padding_idx": 7},
    ),
    "bag-mean": Case(
        composite.embedding_bag,
        lambda: [_randn(12, 4), torch.arange(24).view(4, 6) % 5],
        (T(0), T(1)),
        {"mode": "mean", "padding_idx": 3},
    ),
    "bag-ragged": Case(
        composite.embedding_bag,
        lambda: [_randn(12, 4), torch.arange(24) % 12, torch.tensor([0, 2, 2, 10])],
        (T(0), T(1), None, T(2)),
        {"mode": "mean"},
    ),
    "cross-entropy": _cross_entropy_case(reduction="sum"),
    "cross-entropy-mean": _cross_entropy_case(),
    "cross-entropy-sum": _cross_entropy_case(reduction="sum", label_smoothing=0.1),
    "cross-entropy-none": _cross_entropy_case(reduction="none"),
    "cross-entropy-smooth": _cross_entropy_case(label_smoothing=0.2),
    "cross-entropy-ignore": Case(
        composite.cross_entropy,
        lambda: [_randn(4, 8, 12), _targets(12, 4, 8, ignored=5)],
        (T(0), T(1)),
        {"ignore_index": 5},
    ),
    "aten-cross-entropy": Case(
        aten.cross_entropy_loss.default, lambda: [_randn(8, 12, 4), _targets(12, 8, 4)], (T(0), T(1))
    ),
    "aten-cross-entropy-smooth-sum": Case(
        aten.cross_entropy_loss.default, lambda: [_randn(8, 12), _targets(12, 8)], (T(0), T(1), None, 2, -100, 0.1)
    ),
    "aten-cross-entropy-probabilities": Case(
        aten.cross_entropy_loss.default, lambda: [_randn(8, 12), _randn(8, 12).softmax(1)], (T(0), T(1))
    ),
    "batch-norm": _batch_norm_case(0, 1, 2, 3, 4),
    "batch-norm-no-weight": _batch_norm_case(0, 3, 4),
    "batch-norm-no-statistics": _batch_norm_case(0, 1, 2),
    "attention-causal": _attention_case("causal"),
    "attention-sliding": _attention_case("sliding", 256, 5),
    "attention-sliding-wide": _attention_case("sliding", 16, 9),
    "attention-causal-padding": _attention_case("causal", 16, None, PADDING),
    "attention-causal-bias": _attention_case("causal", 16, None, BIAS),
    "attention-full": _attention_case("full"),
    "attention-mask": _attention_case("mask", 16, None, BIAS),
    "attention-mask-heads": _attention_case("mask", 16, None, BIAS.tile(2, 4, 1, 1)),
    "attention-mask-columns": _attention_case("mask", 16, None, BIAS[:, :, :1]),
    "attention-sinks": _sink_case("causal"),
    "attention-sinks-sliding": _sink_case("sliding", 64, 5),
    "attention-sinks-bias": _sink_case("causal", 16, None, BIAS),
    "attention-document": _attention_case("causal", 16, None, DOCUMENTS),
    "attention-cross": Case(
        composite.attention,
        lambda: [_randn(2, 4, 8, 4), _randn(2, 2, 12, 4), _randn(2, 2, 12, 4)],
        (T(0), T(1), T(2)),
        {"kind": "full", "scale": 0.5},
    ),
    "attention-one-head-size": Case(
        composite.attention,
        lambda: [_randn(2, 4, 16, 4), _randn(2, 2, 16, 4), _randn(2, 2, 16, 4)],
        (T(0), T(1), T(2)),
        {"kind": "causal", "scale": 0.5},
    ),
    "aten-attention-causal": Case(
        aten.scaled_dot_product_attention.default,
        lambda: [_randn(2, 4, 8, 3), _randn(2, 4, 8, 3), _randn(2, 4, 8, 3)],
        (T(0), T(1), T(2), None, 0.0, True),
    ),
    "moe": _moe_case(*range(8), activation="silu", gated=True),
    "moe-biased": _moe_case(*range(8), biases=2, activation="gelu", gated=False),
    "moe-interleaved": _moe_case(
        *range(8), biases=2, activation="mul(add(value, 1), sigmoid(gate))", gated=True, interleaved=True
    ),
    "moe-skewed": _moe_case(0, 5, 5, 5, activation="silu", gated=True),
    "moe-capacity": _moe_case(*range(8), activation="silu", gated=True, capacity_factor=0.9),
    "moe-capacity-skewed": _moe_case(0, 5, 5, 5, biases=2, activation="gelu", gated=False, capacity_factor=1.5),
    "moe-one-expert": _moe_case(3, activation="relu", gated=False),
    "moe-by-tensor": _moe_case(*range(8), up=64, biases=2, activation="gelu", gated=False, recipe="fp8-tensor"),
    "moe-by-row": _moe_case(0, 5, 5, 5, up=64, activation="gelu", gated=False, recipe="fp8-row"),
    "moe-by-row-capacity": _moe_case(
        *range(8), up=64, activation="silu", gated=True, recipe="fp8-row", capacity_factor=0.9
    ),
    "moe-by-tile": _moe_case(*range(8), up=128, activation="gelu", gated=False, recipe="mxfp8"),
    "moe-by-tile-and-tensor": _moe_case(*range(8), up=128, activation="silu", gated=True, recipe="nvfp4"),
    "mean": Case(aten.mean.default, lambda: [_randn(4, 8)], (T(0),)),
    "mean-dim": Case(aten.mean.dim, lambda: [_randn(4, 8, 4)], (T(0), [0, 2], True)),
    "mse-loss": Case(aten.mse_loss.default, lambda: [_randn(4, 8), _randn(4, 8)], (T(0), T(1))),
    "linear": Case(aten.linear.default, lambda: [_randn(2, 4, 8), _randn(6, 8), _randn(6)], (T(0), T(1), T(2))),
    "columns-linear": Case(
        composite.columns_linear, lambda: [_randn(2, 4, 8), _randn(8, 6), _randn(6)], (T(0), T(1), T(2))
    ),
    "addmm": Case(
        aten.addmm.default, lambda: [_randn(6), _randn(4, 8), _randn(8, 6)], (T(0), T(1), T(2)), {"beta": 0.5}
    ),
    "conv2d": Case(
        aten.conv2d.default,
        lambda: [_randn(4, 4, 5, 5), _randn(6, 4, 3, 3), _randn(6)],
        (T(0), T(1)),
        {"bias": T(2), "padding": [1, 1]},
    ),
}


def _tensors(case: Case) -> list[Tensor]:
    torch.manual_seed(5)
    return case.tensors()


def _outputs(result: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]


def _node(case: Case, operands: list[Tensor], results: Any) -> fx.Node:
    """A node that calls the op, with the values of its operands and results."""
    graph = fx.Graph()
    nodes = []
    for number, operand in enumerate(operands):
        nodes.append(graph.placeholder(f"x{number}"))
        nodes[-1].meta["val"] = operand
    args, kwargs = pytree.tree_map_only(T, lambda number: nodes[number], (case.args, case.kwargs))
    node = graph.call_function(case.target, args, kwargs)
    node.meta["val"] = results
    graph.output(node)
    return node


def _whole(case: Case) -> tuple[fx.Node, FactorRule, list[Tensor], list[Tensor | None], list[Tensor]]:
    """The op on one process: its node, rule, results, gradients of the operands, gradients given to the results."""
    operands = [case.leaf(number, x) for number, x in enumerate(_tensors(case))]
    args, kwargs = pytree.tree_map_only(T, lambda number: operands[number], (case.args, case.kwargs))
    result = case.target(*args, **kwargs)
    outputs = _outputs(result)
    grads = [torch.randn_like(x) for x in outputs]
    node = _node(case, operands, pytree.tree_map_only(Tensor, lambda x: x.detach(), result))
    outputs[0].backward(grads[0])  # type: ignore[no-untyped-call]
    return node, rule_for(node), [x.detach() for x in outputs], [x.grad for x in operands], grads


def _assignments(rule: FactorRule) -> list[Assignment]:
    """Lowered factors on the inner axis, or on both; beside each None and one factor that is not lowered."""
    lowered = [choice for choice in rule.choices() if choice in rule.lowered]
    plain = [choice for choice in rule.choices() if choice is not None and choice not in rule.lowered]
    pairs = itertools.product([None, *lowered, *plain[:1]], lowered)
    return [pair for pair in pairs if rule.allows(pair, MESH)]


def _lowered(
    case: Case, node: fx.Node, rule: FactorRule, assignment: Assignment, cut: Callable[[Tensor, Layout], Tensor]
) -> tuple[fx.Graph, list[Tensor]]:
    """The graph of one rank, with axis names as groups, and its operands, ``cut`` from the whole ones."""
    graph = fx.Graph()
    operands = []
    for number, x in enumerate(_tensors(case)):
        placeholder = graph.placeholder(f"x{number}")
        operands.append(case.leaf(number, cut(x, rule.operand_layout(number, assignment)[0])))
        placeholder.meta["val"] = operands[-1]
    nodes = dict(zip(node.graph.find_nodes(op="placeholder"), graph.find_nodes(op="placeholder")))
    args, kwargs = pytree.tree_map_only(fx.Node, lambda n: nodes[n], (node.args, node.kwargs))
    local = graph.call_function(node.target, args, kwargs)
    lowering = lowering_of(rule, assignment)
    assert lowering is not None
    local.target, local.args, local.kwargs = LOWERINGS[lowering](local, rule, assignment, MESH)
    graph.output(local)
    graph.lint()
    return graph, operands


# One rank's results and gradients, and the bytes it sent, under one assignment.
Found = tuple[list[Tensor], list[Tensor | None], int]


def _all_local() -> dict[str, list[Found]]:
    names = axis_groups(MESH)
    return {name: _local(case, names) for name, case in CASES.items()}


def _local(case: Case, names: dict[str, str]) -> list[Found]:
    """What this rank finds under every assignment."""
    rank = dist.get_rank()
    node, rule, _, _, grads = _whole(case)
    found = []
    for assignment in _assignments(rule):
        graph, operands = _lowered(case, node, rule, assignment, lambda x, layout: piece(x, layout, MESH, rank))
        bind_groups(graph, names)
        with CollectiveCounter() as counter:
            outputs = _outputs(fx.GraphModule({}, graph)(*operands))
            layout = tuple(dual(p) for p in rule.result_layout(0, assignment))
            outputs[0].backward(piece(grads[0], layout, MESH, rank))  # type: ignore[no-untyped-call]
        found.append(([x.detach() for x in outputs], [x.grad for x in operands], int(counter.sent_bytes())))
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, list[Found]]]:
    """By rank: what it found in every case."""
    return run_ranks(_all_local, MESH.size)


@pytest.mark.parametrize("name", CASES)
def test_lowering_equals_the_whole_op(name: str, found: list[dict[str, list[Found]]]) -> None:
    case = CASES[name]
    ranks = [rank[name] for rank in found]
    _, rule, results, grads, _ = _whole(case)
    assignments = _assignments(rule)
    assert assignments, f"{name} has no lowered factor to shard"
    for number, assignment in enumerate(assignments):
        compare = {"rtol": case.tolerance, "atol": case.tolerance, "equal_nan": True}
        for position, expected in enumerate(results):
            pieces = [rank[number][0][position] for rank in ranks]
            whole = whole_of(pieces, rule.result_layout(position, assignment), MESH)
            assert whole.dtype is expected.dtype
            torch.testing.assert_close(whole, expected, **compare, msg=lambda m, a=assignment: f"result, {a}: {m}")
        for position, gradient in enumerate(grads):
            if gradient is None:
                continue
            pieces = [rank[number][1][position] for rank in ranks]
            whole = whole_of(pieces, rule.operand_layout(position, assignment)[1], MESH)
            torch.testing.assert_close(
                whole, gradient, **compare, msg=lambda m, a=assignment, p=position: f"gradient {p}, {a}: {m}"
            )


@pytest.mark.parametrize("name", ["embedding", "bag", "attention-sliding", "linear", "mean"])
def test_summands_need_no_communication(name: str, found: list[dict[str, list[Found]]]) -> None:
    rule = _whole(CASES[name])[1]
    for assignment, (*_, sent) in zip(_assignments(rule), found[0][name], strict=True):
        assert (sent > 0) == any(choice in rule.joint for choice in assignment), assignment


def test_split_classes_exchange_two_numbers_a_token(found: list[dict[str, list[Found]]]) -> None:
    rule = _whole(CASES["cross-entropy"])[1]
    sent = dict(zip(_assignments(rule), (one[2] for one in found[0]["cross-entropy"])))
    tokens, size = 4 * 8, 8
    assert sent[(None, "c")] == 2 * tokens * size
    assert sent[("d0", "c")] == 2 * tokens // 2 * size


@pytest.mark.parametrize("name", CASES)
def test_shapes_without_processes(name: str) -> None:
    case = CASES[name]
    node, rule, results, _, _ = _whole(case)
    assignment = _assignments(rule)[-1]
    with FakeTensorMode(allow_non_fake_inputs=True), unbound_groups(MESH, {"a": 1, "b": 1}):
        local, operands = _lowered(
            case, node, rule, assignment, lambda x, layout: x.new_empty(local_shape(x.shape, layout, MESH))
        )
        outputs = _outputs(fx.GraphModule({}, local)(*operands))
        outputs[0].sum().backward()  # type: ignore[no-untyped-call]
    for position, (output, whole) in enumerate(zip(outputs, results, strict=True)):
        assert output.shape == local_shape(whole.shape, rule.result_layout(position, assignment), MESH)
        assert output.dtype is whole.dtype


def test_sparse_embedding_is_refused() -> None:
    rule = parse_rule("v h, d0 d1 -> d0 d1 h", {"v": 12, "h": 4, "d0": 4, "d1": 6}, lowered={"v": "embedding"})
    case = Case(aten.embedding.default, CASES["embedding"].tensors, (T(0), T(1), -1, False, True))
    operands = _tensors(case)
    node = _node(case, operands, torch.empty(4, 6, 4))
    with pytest.raises(UnsupportedOp, match="sparse=False"):
        LOWERINGS["embedding"](node, rule, ("v", None), MESH)


def _dropped(p: float) -> dict[str, Any]:
    names = axis_groups(MESH)
    x = torch.ones(64, requires_grad=True)

    def block(x: Tensor, groups: tuple[str, ...]) -> Tensor:
        y, _ = seeded(aten.native_dropout.default, x, p, True, groups=groups)
        return y * seeded(aten.rand_like.default, x, groups=groups)

    torch.manual_seed(dist.get_rank())  # ranks need not have the same state
    with shared_randomness(3, 1):
        shared, split, again = block(x, ()), block(x, (names["a"],)), block(x, (names["a"],))
        kept = checkpoint(block, x, (names["a"],), use_reentrant=False)
    with shared_randomness(3, 1):
        repeated = block(x, ())
    with shared_randomness(3, 2):
        other = block(x, ())
    (gradient,) = torch.autograd.grad(kept.sum(), x)
    q = torch.randn(1, 2, 8, 4, generator=torch.Generator().manual_seed(1))
    with shared_randomness(3, 3):
        call = {"kind": "causal", "scale": 0.5, "dropout_p": 0.5}
        attended = attention(q, q, q, **call, random_groups=(names["a"],))
    return {
        "shared": shared,
        "split": split,
        "again": again,
        "kept": kept,
        "gradient": gradient,
        "repeated": repeated,
        "other": other,
        "attended": attended,
    }


def test_random_numbers_follow_the_shards() -> None:
    ranks = run_ranks(_dropped, MESH.size, 0.5)
    first = ranks[0]
    for number, rank in enumerate(ranks):
        same = number < 2  # ranks 0 and 1 have one place on axis a
        assert torch.equal(rank["shared"], first["shared"])
        assert torch.equal(rank["repeated"], rank["shared"])
        for name in ("split", "again", "kept", "attended"):
            assert torch.equal(rank[name], first[name]) is same, name
        assert not torch.equal(rank["split"], rank["again"])
        assert not torch.equal(rank["shared"], rank["other"])
        assert not torch.equal(rank["split"], rank["shared"])
        # Recomputation draws what the forward drew: the gradient of x (all ones) is the output.
        torch.testing.assert_close(rank["gradient"], rank["kept"])


def test_derived_seeds_are_stable() -> None:
    assert derive_seed(1, 2) == derive_seed(1, 2)
    assert len({derive_seed(a, b) for a in range(30) for b in range(30)}) == 900
    assert all(0 <= derive_seed(a) < 2**63 for a in range(100))
