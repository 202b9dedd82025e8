"""A fused query-key-value projection is split by heads; whole state dicts hold it in one piece."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.ir.errors import InvalidInput
from tests.harness import run_ranks

B, S, H, HEADS = 4, 6, 16, 4


class Layer(nn.Module):
    """Attention with one projection to queries (all heads), keys and values (half as many)."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Linear(H, 2 * H)
        self.out = nn.Linear(H, H)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        q, k, v = self.fused(x).split([H, H // 2, H // 2], -1)
        q, k, v = (y.unflatten(-1, (-1, H // HEADS)).transpose(1, 2) for y in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return F.mse_loss(x + self.out(attended.transpose(1, 2).flatten(2)), target)


def _model() -> Layer:
    torch.manual_seed(0)
    return Layer()


def _batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(B, S, H, generator=generator) for name in ("x", "target")}


def _train() -> dict[str, Any]:
    parallel = autopar.parallelize(_model(), 2, example_inputs=_batch(), tp=2, sp=False)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    loss = parallel.step(**_batch())
    gradients = parallel.full_gradients()
    optimizer.step()
    state = parallel.full_state_dict()
    shapes = {name: tuple(p.to_local().shape) for name, p in parallel.named_parameters()}
    other = {name: torch.randn_like(value) for name, value in state.items()}
    parallel.load_state_dict(other)
    torch.testing.assert_close(parallel.full_state_dict(), other)
    assert list(parallel.state_dict()) == list(shapes)
    refusal = ""
    try:
        parallel.load_state_dict({**other, "fused.weight": torch.zeros(H, H)})
    except InvalidInput as error:
        refusal = str(error)
    return {"loss": loss, "gradients": gradients, "state": state, "shapes": shapes, "refusal": refusal}


def test_heads_are_split_and_the_whole_is_put_together() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(**_batch())
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    for result in run_ranks(_train, 2):
        torch.testing.assert_close(result["loss"], loss.detach())
        assert list(result["state"]) == list(model.state_dict())
        torch.testing.assert_close(result["gradients"], gradients)
        torch.testing.assert_close(result["state"], dict(model.state_dict()))
        assert result["shapes"]["fused.weight[0:16]"] == (8, H)
        assert result["shapes"]["fused.weight[16:24]"] == (4, H)
        assert result["shapes"]["fused.bias[24:32]"] == (4,)
        assert "fused.weight has shape (16, 16), expected (32, 16)" in result["refusal"]
