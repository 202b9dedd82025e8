"""Saved activations equal what autograd really keeps; sharding and microbatches divide them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from autopar.cost_model.compute.flops import op_name
from autopar.cost_model.memory.activations import BlockActivations
from autopar.cost_model.stacks.known_memory import AUTOPAR
from autopar.cost_model.stacks.memory import LossMemory, StackMemory
from autopar.ir.analysis.gradient_flow import gradient_flow
from autopar.ir.analysis.views import storage_of
from autopar.ir.capture.capture import capture
from autopar.ir.graph import CapturedModel, op_nodes, tensor_results
from autopar.ir.mesh import Mesh
from autopar.ir.rule import Assignment
from autopar.ir.rules import rule_for
from autopar.passes.normalise import normalise

ONE = Mesh.of(x=1)
BATCH, SEQ, HIDDEN, VOCABULARY = 4, 16, 32, 50


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.up, self.gate, self.down = nn.Linear(HIDDEN, 64), nn.Linear(HIDDEN, 64), nn.Linear(64, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (p(y).view(*y.shape[:2], 4, -1).transpose(1, 2) for p in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), target.flatten())


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.norm(self.first(x)))).square().mean()


TOKENS = torch.arange(BATCH * SEQ).view(BATCH, SEQ) % VOCABULARY
MODELS = {"decoder": (Decoder, (TOKENS, TOKENS)), "convolutions": (Convolutions, (torch.ones(4, 3, 12, 12),))}


@cache
def captured(name: str) -> tuple[nn.Module, CapturedModel]:
    kind, inputs = MODELS[name]
    model = kind()
    return model, normalise(capture(model, inputs))


def measure(
    program: CapturedModel, nodes: list[fx.Node], precision: str = "fp32", memory: StackMemory = AUTOPAR
) -> BlockActivations:
    shared = {node for node in program.graph.nodes if node.op == "placeholder"}
    batches = {
        node: rule_for(node).results[0][0][0]
        for node in nodes
        if tensor_results(node)[0].dim() == 3 and tensor_results(node)[0].shape[0] == BATCH
    }
    return BlockActivations.of(
        nodes,
        precision=precision,
        batch_factors=batches,
        shared=shared,
        needs_grad=gradient_flow(program),
        memory=memory,
    )


def ops(program: CapturedModel) -> list[fx.Node]:
    return [node for node in op_nodes(program.graph) if tensor_results(node)]


def whole(nodes: list[fx.Node]) -> dict[fx.Node, Assignment]:
    return dict.fromkeys(nodes, (None,))


def really_saved(model: nn.Module, program: CapturedModel, inputs: tuple[Tensor, ...]) -> int:
    """Bytes of the distinct storages that autograd holds after a forward, parameters and inputs excluded."""
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    feed = iter(inputs)
    values = []
    for node in program.graph.nodes:
        if node.op == "placeholder":
            name = node.name
            if name in program.parameters:
                values.append(own[program.parameters[name].name])
            elif name in program.buffers:
                values.append(own[program.buffers[name].name])
            else:
                values.append(program.constants[name] if name in program.constants else next(feed))
    held = {value.untyped_storage().data_ptr() for value in values}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in held:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = program.graph_module(*values)
    assert result
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("name", MODELS)
def test_prediction_equals_what_autograd_keeps(name: str) -> None:
    model, program = captured(name)
    nodes = ops(program)
    predicted = measure(program, nodes).saved_bytes(whole(nodes), ONE)
    assert predicted == pytest.approx(really_saved(model, program, MODELS[name][1]), rel=0.01)


def test_levels_are_ordered() -> None:
    _, program = captured("decoder")
    nodes = ops(program)
    layer = [node for node in nodes if "layers.1" in str(node.meta.get("path"))]
    block = measure(program, layer)
    none, selective, full = (block.saved_bytes(whole(nodes), ONE, 1, level) for level in ("none", "selective", "full"))
    tensor = 4 * BATCH * SEQ * HIDDEN
    assert full == tensor  # the hidden state that enters the layer
    # Beside it the outputs of q, k, v, attention and o, of up and gate (twice as wide) and of down.
    assert selective == (1 + 5 + 2 * 2 + 1) * tensor
    assert selective < none


def test_prices_per_op_add_up() -> None:
    _, program = captured("decoder")
    nodes = ops(program)
    block = measure(program, nodes)
    total = sum(block.additive_bytes(node, (None,), ONE) for node in nodes)
    assert total == pytest.approx(block.saved_bytes(whole(nodes), ONE))


def test_a_tensor_gathered_for_several_ops_is_kept_once() -> None:
    _, program = captured("decoder")
    nodes = [n for n in ops(program) if "layers.0" in str(n.meta.get("path"))]
    block = measure(program, nodes)
    mesh = Mesh.of(tp=2)
    assignments: dict[fx.Node, Assignment] = dict.fromkeys(nodes, (None,))
    plain = block.saved_bytes(assignments, mesh)
    norm = next(n for n in nodes if op_name(n) == "layer_norm")
    sequence = rule_for(norm).results[0][1][0]
    assignments[norm] = (sequence,)
    tensor = 4 * BATCH * SEQ * HIDDEN
    # The norm keeps half of its input (one copy cut, the residual's users none); q, k, v share one gathered input.
    assert block.saved_bytes(assignments, mesh) < plain
    assert plain - block.saved_bytes(assignments, mesh) <= tensor
    selective = block.saved_bytes(assignments, mesh, 1, "selective")
    assert selective >= block.saved_bytes(dict.fromkeys(nodes, (None,)), mesh, 1, "selective")


def test_what_ranks_exchange_is_kept_and_sums_replace_their_summands() -> None:
    _, program = captured("decoder")
    nodes = [n for n in ops(program) if "layers.0" in str(n.meta.get("path"))]
    block, mesh = measure(program, nodes), Mesh.of(tp=2)
    assignments: dict[fx.Node, Assignment] = dict.fromkeys(nodes, (None,))
    norm = next(n for n in nodes if op_name(n) == "layer_norm")
    assignments[norm] = (rule_for(norm).results[0][1][0],)
    gathered = block.saved_bytes(assignments, mesh, 1, "selective")
    for linear in norm.users:
        assignments[linear] = tuple(rule_for(linear).summed)
    # Sequence to features, once for the three; each result is a partial sum that only its reduction reads.
    tensor = 4 * BATCH * SEQ * HIDDEN
    assert block.saved_bytes(assignments, mesh, 1, "selective") == gathered + tensor / 2


def test_sharding_a_linear_divides_its_activations() -> None:
    _, program = captured("decoder")
    nodes = [n for n in ops(program) if str(n.meta.get("path")).endswith("layers.0.down")]
    block = measure(program, nodes)
    linear = next(n for n in nodes if op_name(n) == "linear")
    rule = rule_for(linear)
    inner = next(iter(rule.summed))
    mesh = Mesh.of(tp=2)
    whole_bytes = block.saved_bytes(dict.fromkeys(nodes, (None,)), mesh)
    assert block.saved_bytes({n: (inner,) if n is linear else (None,) for n in nodes}, mesh) == whole_bytes / 2


def test_microbatches_divide_what_carries_the_batch() -> None:
    _, program = captured("decoder")
    nodes = [n for n in ops(program) if str(n.meta.get("path")).endswith("layers.0.up")]
    block = measure(program, nodes)
    assert block.saved_bytes(whole(nodes), ONE, 4) == block.saved_bytes(whole(nodes), ONE) / 4


def test_bf16_halves_activations() -> None:
    _, program = captured("decoder")
    nodes = [n for n in ops(program) if "layers.0.up" in str(n.meta.get("path"))]
    full, half = (measure(program, nodes, p).saved_bytes(whole(nodes), ONE) for p in ("fp32", "bf16"))
    assert half == full / 2


def test_logits_are_the_largest_gradients() -> None:
    _, program = captured("decoder")
    nodes = ops(program)
    logits = BATCH * SEQ * VOCABULARY
    full, half = (measure(program, nodes, p).backward.peak(whole(nodes), ONE) for p in ("fp32", "bf16"))
    # The gradients of log probabilities and of logits, in float32.
    assert full.merged == pytest.approx(8 * logits, rel=0.01)
    assert half.merged == pytest.approx(8 * logits, rel=0.01)


@pytest.mark.parametrize("name", MODELS)
def test_backward_releases_all_that_was_saved(name: str) -> None:
    _, program = captured(name)
    nodes = ops(program)
    block = measure(program, nodes)
    assert block.backward.peak(whole(nodes), ONE).end == pytest.approx(-block.saved_bytes(whole(nodes), ONE))


def test_gradients_that_stay_add_to_the_peak() -> None:
    _, program = captured("decoder")
    nodes = [n for n in ops(program) if "layers.0" in str(n.meta.get("path"))]
    peak = measure(program, nodes, "bf16").backward.peak(whole(nodes), ONE)
    assert peak.merged < peak.unsharded < peak.arriving


def test_views_share_the_storage_of_what_they_view() -> None:
    _, program = captured("decoder")
    attention = next(n for n in ops(program) if op_name(n) == "attention")
    base, index = storage_of(attention.all_input_nodes[0])
    assert (op_name(base), index) == ("linear", 0)


def test_a_tensor_that_is_gathered_again_is_kept_as_a_part() -> None:
    """Under sequence parallelism queries, keys and values read the gathered result of a norm."""
    _, program = captured("decoder")
    nodes = [n for n in ops(program) if "layers.0" in str(n.meta.get("path"))]
    mesh = Mesh.of(tp=2)
    assignments: dict[fx.Node, Assignment] = dict.fromkeys(nodes, (None,))
    norm = next(n for n in nodes if op_name(n) == "layer_norm")
    assignments[norm] = (rule_for(norm).results[0][1][0],)
    kept, again = (measure(program, nodes, memory=replace(AUTOPAR, regathers=gathers)) for gathers in (False, True))
    tensor = 4 * BATCH * SEQ * HIDDEN
    assert kept.saved_bytes(assignments, mesh) - again.saved_bytes(assignments, mesh) == tensor / 2
    # What backward releases of it is what was kept.
    left = [own.backward.peak(assignments, mesh).end + own.saved_bytes(assignments, mesh) for own in (kept, again)]
    assert left[0] == pytest.approx(left[1])
    # On ranks that share nothing it is one tensor.
    alone = dict.fromkeys(nodes, (None,))
    assert kept.saved_bytes(alone, mesh) == again.saved_bytes(alone, mesh)


def test_a_fused_gate_keeps_what_it_reads_alone() -> None:
    _, program = captured("decoder")
    nodes = [n for n in ops(program) if "layers.0" in str(n.meta.get("path"))]
    apart, fused = (
        measure(program, nodes, memory=replace(AUTOPAR, recomputes=names)).saved_bytes(whole(nodes), ONE)
        for names in (frozenset[str](), frozenset({"silu"}))
    )
    assert apart - fused == 4 * BATCH * SEQ * 64


def test_a_loss_keeps_and_works_with_what_its_stack_says() -> None:
    _, program = captured("decoder")
    nodes = ops(program)
    logits = BATCH * SEQ * VOCABULARY
    ours = measure(program, nodes, "bf16")
    theirs = measure(program, nodes, "bf16", replace(AUTOPAR, loss=LossMemory(kept=2.0, working=6.0)))
    assert ours.saved_bytes(whole(nodes), ONE) - theirs.saved_bytes(whole(nodes), ONE) == 2 * logits
    assert theirs.backward.peak(whole(nodes), ONE).merged == pytest.approx(6 * logits, rel=0.01)
