"""Loops over the steps of a sequence: which become one op, that it is exact, and which stay as they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.ir.capture.capture import capture
from autopar.ir.capture.rolling import MIN_STEPS
from autopar.ir.graph import CapturedModel, call_nodes
from autopar.ir.rules import rule_for
from autopar.passes.normalise import normalise

STEPS = MIN_STEPS + 4
WIDTH = 4


class Looping(nn.Module):
    """``run(module, x)`` of the states (batch, steps, width) of a linear layer, squared and summed."""

    def __init__(self, run: Callable[[Looping, Tensor], Tensor]) -> None:
        super().__init__()
        self.run = run
        self.inner, self.mix = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.cell = nn.LSTMCell(WIDTH, WIDTH)
        self.stacked = nn.Parameter(torch.randn(STEPS, WIDTH, WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, self.inner(x)).square().sum()


def appended(module: Looping, x: Tensor) -> Tensor:
    state, seen, gate = torch.zeros_like(x[:, 0]), [], torch.sigmoid(x)
    for t in range(x.shape[1]):
        state = gate[:, t] * state + x[:, t]
        seen.append(state * 2)
    return torch.stack(seen, 1)


def written(module: Looping, x: Tensor) -> Tensor:
    state, out = torch.zeros_like(x[:, 0]), torch.empty_like(x)
    for t in range(x.shape[1]):
        state = torch.tanh(module.mix(state) + x[:, t])
        out[:, t] = state
    return out


def backwards(module: Looping, x: Tensor) -> Tensor:
    state, seen = torch.zeros_like(x[:, 0]), []
    for t in reversed(range(x.shape[1])):
        state = torch.tanh(module.mix(state) + x[:, t])
        seen.append(state)
    return torch.stack(seen[::-1], 1)


def by_slices(module: Looping, x: Tensor) -> Tensor:
    state, seen = torch.zeros_like(x[:, :1]), []
    for row in x.split(1, dim=1):
        state = torch.tanh(module.mix(state) + row)
        seen.append(state)
    return torch.cat(seen, 1)


def by_cell(module: Looping, x: Tensor) -> Tensor:
    h = c = torch.zeros_like(x[:, 0])
    seen = []
    for row in x.unbind(1):
        h, c = module.cell(row, (h, c))
        seen.append(h)
    return torch.stack(seen, 1)


def started_late(module: Looping, x: Tensor) -> Tensor:
    seen = [x[:, 0]]
    for t in range(1, x.shape[1]):
        seen.append(torch.tanh(module.mix(seen[-1]) + x[:, t] * 0.5))
    return torch.stack(seen, 1)


def last_alone(module: Looping, x: Tensor) -> Tensor:
    state = torch.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        state = torch.tanh(module.mix(state) + x[:, t])
    return state


def picked(module: Looping, x: Tensor) -> Tensor:
    state, seen = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        state = state.cumsum(-1) * 0.1 + x[:, t]
        seen.append(state)
    return seen[3] + seen[-1] * seen[-2]


def in_layers(module: Looping, x: Tensor) -> Tensor:
    rows = list(x.unbind(1))
    for _ in range(2):
        state, seen = torch.zeros_like(rows[0]), []
        for row in rows:
            state = torch.tanh(module.mix(state) + row)
            seen.append(state)
        rows = seen
    return torch.stack(rows, 1)


def second_order(module: Looping, x: Tensor) -> Tensor:
    seen = [x[:, 0], x[:, 1]]
    for t in range(2, x.shape[1]):
        seen.append(seen[-1] * 0.5 + seen[-2] * 0.1 + x[:, t])
    return torch.stack(seen, 1)


LOOPS = [appended, written, backwards, by_slices, by_cell, started_late, last_alone, picked, second_order, in_layers]


def captured(run: Callable[[Looping, Tensor], Tensor], *, steps: int = STEPS) -> tuple[Looping, Tensor, CapturedModel]:
    torch.manual_seed(0)
    model, x = Looping(run), torch.randn(6, steps, WIDTH)
    return model, x, normalise(capture(model, (x,)))


def num_ops(model: CapturedModel) -> int:
    return sum(1 for _ in call_nodes(model.graph))


@pytest.mark.parametrize("run", LOOPS)
def test_a_loop_is_one_op_and_exact(run: Callable[[Looping, Tensor], Tensor]) -> None:
    model, x, graph = captured(run)
    scans = [node for node in call_nodes(graph.graph) if node.name.startswith("scan")]
    assert len(scans) == (2 if run is in_layers else 1)
    assert all(rule_for(node).shardable()[0] for node in scans)
    values = [
        dict(model.named_parameters())[graph.parameters[n.name].name] if n.name in graph.parameters else x
        for n in graph.graph.nodes
        if n.op == "placeholder"
    ]
    loss = graph.graph_module(*values)[0]
    torch.testing.assert_close(loss, model(x))
    used = [p for name, p in model.named_parameters() if name.split(".")[0] in ("inner", "mix", "cell")]
    for mine, theirs in zip(
        torch.autograd.grad(loss, used, allow_unused=True),
        torch.autograd.grad(model(x), used, allow_unused=True),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("run", LOOPS)
def test_a_longer_loop_has_no_more_ops(run: Callable[[Looping, Tensor], Tensor]) -> None:
    assert num_ops(captured(run, steps=40)[2]) == num_ops(captured(run, steps=20)[2]) < 40


def layers(module: Looping, x: Tensor) -> Tensor:
    for weight in module.stacked:
        x = torch.tanh(x @ weight)
    return x


def experts(module: Looping, x: Tensor) -> Tensor:
    out, gate = torch.zeros_like(x), x.softmax(1)
    for number in range(STEPS):
        out = out + gate[:, number : number + 1] * (x @ module.stacked[number])
    return out


def drawing(module: Looping, x: Tensor) -> Tensor:
    state = torch.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        state = nn.functional.dropout(state + x[:, t], 0.5)
    return state


def third_order(module: Looping, x: Tensor) -> Tensor:
    seen = [x[:, 0], x[:, 1], x[:, 2]]
    for t in range(3, x.shape[1]):
        seen.append(seen[-1] * 0.5 + seen[-3] * 0.1 + x[:, t])
    return torch.stack(seen, 1)


@pytest.mark.parametrize("run", [layers, experts, drawing, third_order])
def test_what_is_no_loop_over_steps_stays_as_it_is(run: Callable[[Looping, Tensor], Tensor]) -> None:
    graph = captured(run)[2]
    assert not [node for node in call_nodes(graph.graph) if node.name.startswith("scan")]


def test_a_short_loop_stays_as_it_is() -> None:
    graph = captured(appended, steps=MIN_STEPS - 1)[2]
    assert not [node for node in call_nodes(graph.graph) if node.name.startswith("scan")]


def test_mamba_has_as_many_ops_for_any_length() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MambaConfig(vocab_size=32, hidden_size=16, state_size=4, num_hidden_layers=2, use_cache=False)
    model = transformers.MambaForCausalLM(config)

    def ops(length: int) -> int:
        tokens = torch.randint(32, (4, length))
        graph = normalise(capture(model, {"input_ids": tokens, "labels": tokens, "use_cache": False}))
        assert sum(node.name.startswith("scan") for node in call_nodes(graph.graph)) == 2
        return num_ops(graph)

    assert ops(MIN_STEPS) == ops(2 * MIN_STEPS) < 120
