"""Block repetition on hand-written graphs: what is a block, which blocks are equal, what crosses a cut."""

from __future__ import annotations

import operator
import time

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from autopar.ir.analysis.blocks import BlockRepetition, find_repetition
from autopar.ir.graph import CapturedModel, call_nodes
from tests.ir.tracing import Tracer, aten

D = 16


def check(captured: CapturedModel, repetition: BlockRepetition) -> None:
    """Properties of every block repetition."""
    calls = list(call_nodes(captured.graph))
    inside = [node for block in repetition.blocks for node in block.nodes]
    assert len(inside) == len(set(inside))
    assert {*inside, *repetition.prelude} == set(calls)
    assert set(repetition.block_of) == set(inside)
    assert [block.index for block in repetition.blocks] == list(range(len(repetition.blocks)))
    done = set(repetition.prelude) | {n for n in captured.graph.nodes if n.op == "placeholder"}
    for node in inside:
        assert set(node.all_input_nodes) <= done, f"{node} runs before what it reads"
        done.add(node)
        if node.target is operator.getitem:
            assert repetition.block_of[node] == repetition.block_of[node.args[0]]  # type: ignore[index]
    assert [k for k, kind in enumerate(repetition.kinds) for _ in range(kind.repeats)] == [
        b.kind for b in repetition.blocks
    ]
    assert len({kind.name for kind in repetition.kinds}) == len(repetition.kinds)
    for block in repetition.blocks:
        kind = repetition.kinds[block.kind]
        first = next(b for b in repetition.blocks if b.kind == block.kind)
        assert len(set(kind.keys)) == len(kind.keys) == len(block.nodes)
        assert tuple(repetition.key[n] for n in block.nodes) == kind.keys
        assert tuple(repetition.representative[n] for n in block.nodes) == first.nodes
        assert [n.target for n in block.nodes] == [n.target for n in first.nodes]
    for cut in range(len(repetition.blocks) + 1):
        needed = {
            n
            for n in inside
            if repetition.block_of[n] < cut and any(repetition.block_of.get(u, -1) >= cut for u in n.users)
        }
        assert set(repetition.crossing(cut)) == needed
    loss = captured.loss_node()
    if loss is not None:
        assert repetition.block_of[loss] == len(repetition.blocks) - 1


def listing(repetition: BlockRepetition) -> list[tuple[str, int, int]]:
    return [(kind.name, kind.repeats, len(kind.keys)) for kind in repetition.kinds]


def loss_of(t: Tracer, x: fx.Node) -> fx.Node:
    t.path = ""
    return t.call(aten.mean.default, t.call(aten.mul.Tensor, x, x))


def mlp_block(t: Tracer, path: str, x: fx.Node, width: int = 32) -> fx.Node:
    t.path = f"{path}.up"
    h = t.linear(f"{path}.up", x, width)
    t.path = f"{path}.act"
    h = t.call(aten.relu.default, h)
    t.path = f"{path}.down"
    h = t.linear(f"{path}.down", h, D)
    t.path = path
    return t.call(aten.add.Tensor, x, h)


def embedding(t: Tracer) -> fx.Node:
    ids = t.input("ids", 8, 4, dtype=torch.int64)
    t.path = "embed"
    return t.call(aten.embedding.default, t.param("embed.weight", 64, D), ids)


def stack(depth: int) -> CapturedModel:
    t = Tracer()
    x = embedding(t)
    for layer in range(depth):
        x = mlp_block(t, f"layers.{layer}", x)
    t.path = "head"
    return t.done(loss_of(t, t.linear("head", x, 64)))


def test_layers_repeat_one_kind() -> None:
    captured = stack(4)
    repetition = find_repetition(captured)
    check(captured, repetition)
    assert listing(repetition) == [("embed", 1, 1), ("layers.*", 4, 4), ("head", 1, 3)]
    assert repetition.kinds[1].keys == ("up/linear", "act/relu", "down/linear", "add")
    assert [block.name for block in repetition.blocks] == ["embed", *(f"layers.{i}" for i in range(4)), "head"]
    assert [len(repetition.crossing(cut)) for cut in range(7)] == [0, 1, 1, 1, 1, 1, 0]


def test_parameters_are_represented_by_those_of_the_first_instance() -> None:
    captured = stack(3)
    repetition = find_repetition(captured)
    by_name = {node.name: node for node in captured.graph.nodes}
    assert repetition.representative[by_name["layers_2_up_weight"]] is by_name["layers_0_up_weight"]
    assert repetition.representative[by_name["head_weight"]] is by_name["head_weight"]


def test_a_chain_without_repeats_is_cut_before_every_heavy_op() -> None:
    t = Tracer()
    x = t.input("x", 8, 16)
    for number, width in enumerate((64, 32, 24, 4)):
        t.path = str(2 * number)
        x = t.linear(f"fc{number}", x, width)
        t.path = str(2 * number + 1)
        x = t.call(aten.relu.default, x)
    captured = t.done(loss_of(t, x))
    repetition = find_repetition(captured)
    check(captured, repetition)
    assert listing(repetition) == [("0", 1, 2), ("2", 1, 2), ("4", 1, 2), ("6", 1, 4)]


def test_residual_branches_stay_whole() -> None:
    t = Tracer()
    x = embedding(t)
    for layer, width in enumerate((24, 32, 40)):
        x = mlp_block(t, f"stage{layer}", x, width)
    t.path = "head"
    captured = t.done(loss_of(t, t.linear("head", x, 64)))
    repetition = find_repetition(captured)
    check(captured, repetition)
    assert listing(repetition) == [("embed", 1, 5), ("stage1", 1, 4), ("stage2", 1, 4), ("head", 1, 3)]


def test_a_bias_that_the_first_layer_makes_for_all_is_made_before_them() -> None:
    """As in T5: computed inside layer 0, read by every layer, joined with a mask made of a step input."""
    t = Tracer()
    x = embedding(t)
    mask = t.input("mask", 8, 1, dtype=torch.float32)
    for layer in range(3):
        t.path = f"layers.{layer}"
        h = t.linear(f"layers.{layer}.proj", x, D)
        if layer == 0:
            positions = t.call(aten.arange.default, 4, device="meta")
            looked_up = t.call(aten.embedding.default, t.param("layers.0.bias.weight", 4, D), positions)
            wide = t.call(aten.unsqueeze.default, looked_up, 0)
            bias = t.call(aten.add.Tensor, wide, t.call(aten.unsqueeze.default, mask, 2))
        h = t.call(aten.add.Tensor, h, bias)
        x = t.call(aten.add.Tensor, x, h)
    captured = t.done(loss_of(t, x))
    repetition = find_repetition(captured)
    check(captured, repetition)
    assert listing(repetition)[:2] == [("embed", 1, 4), ("layers.*", 3, 3)]
    assert bias in repetition.crossing(1) and bias in repetition.crossing(3)
    assert {n.name for n in repetition.prelude} == {"arange_default", "unsqueeze_default_1"}


def test_rope_tables_and_masks_are_prelude() -> None:
    t = Tracer()
    x = embedding(t)
    for layer in range(2):
        t.path = f"layers.{layer}"
        if layer == 0:
            table = t.call(aten.cos.default, t.call(aten.arange.default, D, device="meta", dtype=torch.float32))
        x = t.call(aten.mul.Tensor, mlp_block(t, f"layers.{layer}", x), table)
    captured = t.done(loss_of(t, x))
    repetition = find_repetition(captured)
    check(captured, repetition)
    assert [n.target for n in repetition.prelude] == [aten.arange.default, aten.cos.default]
    assert ("layers.*", 2, 5) in listing(repetition)


def test_chance_and_updated_state_are_not_prelude() -> None:
    t = Tracer()
    x = embedding(t)
    count = t.buffer("count", dtype=torch.int64)
    noise = t.call(aten.bernoulli.p, t.call(aten.ones.default, [D], device="meta"), 0.5)
    t.path = "norm"
    counted = t.call(aten.add.Tensor, count, 1)
    x = t.call(aten.mul.Tensor, t.linear("norm", x, D), noise)
    t.updated_by(count, counted)
    captured = t.done(loss_of(t, x), counted)
    repetition = find_repetition(captured)
    check(captured, repetition)
    assert {n.target for n in repetition.prelude} == {aten.ones.default}
    assert counted in repetition.block_of


def test_alternating_layers_are_one_kind() -> None:
    t = Tracer()
    x = embedding(t)
    for layer in range(6):
        x = mlp_block(t, f"layers.{layer}", x, 32 if layer % 2 else 48)
    captured = t.done(loss_of(t, x))
    repetition = find_repetition(captured)
    check(captured, repetition)
    assert ("layers.*", 3, 8) in listing(repetition)


def test_encoder_output_is_shared_by_all_decoder_layers() -> None:
    t = Tracer()
    x = embedding(t)
    for layer in range(2):
        x = mlp_block(t, f"encoder.{layer}", x)
    t.path = "bridge"
    memory = t.linear("bridge", x, D)
    y = t.call(aten.relu.default, memory)
    for layer in range(3):
        t.path = f"decoder.{layer}"
        cross = t.linear(f"decoder.{layer}.cross", memory, D)
        y = t.call(aten.add.Tensor, t.linear(f"decoder.{layer}.own", y, D), cross)
    captured = t.done(loss_of(t, y))
    repetition = find_repetition(captured)
    check(captured, repetition)
    names = [kind.name for kind in repetition.kinds]
    assert "encoder.*" in names and "decoder.*" in names
    last = max(block.index for block in repetition.blocks if block.name.startswith("decoder"))
    assert set(repetition.crossing(last)) >= {memory}


def test_outputs_collected_from_all_layers_do_not_break_the_repeat() -> None:
    """As router logits: every layer makes one, the loss reads all."""
    t = Tracer()
    x = embedding(t)
    logits = []
    for layer in range(3):
        t.path = f"layers.{layer}.router"
        logits.append(t.linear(f"layers.{layer}.router", x, 4))
        x = mlp_block(t, f"layers.{layer}", x)
    t.path = ""
    both = t.call(aten.add.Tensor, loss_of(t, x), t.call(aten.sum.default, t.call(aten.cat.default, logits)))
    captured = t.done(both)
    repetition = find_repetition(captured)
    check(captured, repetition)
    assert ("layers.*", 3, 5) in listing(repetition)


def test_tied_weights_do_not_matter_to_the_structure() -> None:
    t = Tracer()
    ids = t.input("ids", 8, 4, dtype=torch.int64)
    weight = t.param("embed.weight", 64, D)
    t.path = "embed"
    x = t.call(aten.embedding.default, weight, ids)
    for layer in range(2):
        x = mlp_block(t, f"layers.{layer}", x)
    t.path = "head"
    captured = t.done(loss_of(t, t.call(aten.linear.default, x, weight)))
    repetition = find_repetition(captured)
    check(captured, repetition)
    assert repetition.representative[weight] is weight
    assert listing(repetition) == [("embed", 1, 1), ("layers.*", 2, 4), ("head", 1, 3)]


def test_layers_that_share_their_weights_repeat_but_keep_them() -> None:
    t = Tracer()
    x = embedding(t)
    weight = t.param("shared", D, D)
    for layer in range(3):
        t.path = f"layers.{layer}"
        x = t.call(aten.relu.default, t.call(aten.linear.default, x, weight))
    captured = t.done(loss_of(t, x))
    repetition = find_repetition(captured)
    check(captured, repetition)
    assert ("layers.*", 3, 2) in listing(repetition)
    assert repetition.representative[weight] is weight


def test_a_module_that_is_called_again_gives_blocks_of_different_names() -> None:
    """They may differ in what is read of them later, and each has its own place in the program."""
    t = Tracer()
    x = embedding(t)
    weight = t.param("cell.weight", D, D)
    for _ in range(4):
        t.path = "cell"
        x = t.call(aten.relu.default, t.call(aten.linear.default, x, weight))
    repetition = find_repetition(t.done(loss_of(t, x)))
    names = [block.name for block in repetition.blocks]
    assert len(set(names)) == len(names) > len(repetition.kinds)


def test_integers_do_not_cross_where_that_can_be_helped() -> None:
    """The narrowest cut by bytes would send the chosen indices."""
    t = Tracer()
    x = embedding(t)
    for layer in range(3):
        t.path = f"layers.{layer}"
        best = t.call(aten.argmax.default, t.linear(f"layers.{layer}.score", x, 64), -1)
        x = t.call(aten.embedding.default, t.param(f"layers.{layer}.values", 64, D), best)
    captured = t.done(loss_of(t, x))
    repetition = find_repetition(captured)
    check(captured, repetition)
    assert all(
        n.meta["val"].dtype.is_floating_point for cut in range(len(repetition.blocks)) for n in repetition.crossing(cut)
    )


def test_multi_output_ops_keep_their_results() -> None:
    t = Tracer()
    x = embedding(t)
    for layer in range(2):
        t.path = f"layers.{layer}"
        both = t.call(aten.split.Tensor, t.linear(f"layers.{layer}.qk", x, 2 * D), D, -1)
        first, second = t.call(operator.getitem, both, 0), t.call(operator.getitem, both, 1)
        x = t.call(aten.mul.Tensor, first, second)
    captured = t.done(loss_of(t, x))
    repetition = find_repetition(captured)
    check(captured, repetition)
    assert ("layers.*", 2, 5) in listing(repetition)


_STEP = st.sampled_from(["linear", "relu", "residual", "scale"])


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[tuple[list[str], int]], int]:
    """Blocks (steps, repeats) between an embedding and a loss."""
    kinds = draw(
        st.lists(st.tuples(st.lists(_STEP, min_size=1, max_size=4), st.integers(1, 4)), min_size=1, max_size=3)
    )
    return kinds, draw(st.integers(0, 1))


@given(programs())
@settings(max_examples=40)
def test_random_stacks_repeat_at_least_as_far_as_they_were_written(
    program: tuple[list[tuple[list[str], int]], int],
) -> None:
    kinds, head = program
    t = Tracer()
    x = embedding(t)
    written = 1
    for number, (steps, repeats) in enumerate(kinds):
        for instance in range(repeats):
            t.path = f"kind{number}.{instance}"
            entry = x
            # A width of its own tells this kind from its neighbours.
            x = t.linear(f"kind{number}.{instance}.in", x, 24 + number)
            x = t.linear(f"kind{number}.{instance}.out", x, D)
            for at, step in enumerate(steps):
                if step == "linear":
                    x = t.linear(f"kind{number}.{instance}.{at}", x, D)
                elif step == "relu":
                    x = t.call(aten.relu.default, x)
                elif step == "residual":
                    x = t.call(aten.add.Tensor, x, entry)
                else:
                    x = t.call(aten.mul.Tensor, x, t.param(f"kind{number}.{instance}.{at}", D))
        written += 2 + len(steps)
    if head:
        x = t.linear("head", x, 64)
    captured = t.done(loss_of(t, x))
    repetition = find_repetition(captured)
    check(captured, repetition)
    assert sum(len(kind.keys) for kind in repetition.kinds) <= written + head + 2


def test_time_grows_with_the_nodes_and_not_with_their_square() -> None:
    captured = stack(300)
    started = time.process_time()
    repetition = find_repetition(captured)
    elapsed = time.process_time() - started
    assert listing(repetition) == [("embed", 1, 1), ("layers.*", 300, 4), ("head", 1, 3)]
    # Measured 0.1 s (5,000 nodes: 0.5 s); the margin is for a busy machine.
    assert elapsed < 2
