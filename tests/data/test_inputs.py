"""Rows of tokens become the arguments of a model by their names, or by what the model file says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.data.inputs import TokenInputs
from autopar.ir.errors import InvalidInput

IDS = torch.zeros(2, 3, dtype=torch.long, device="meta")
WINDOWS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
FIRST, FOLLOWING = WINDOWS[:, :3], WINDOWS[:, 1:]


class Shifted(nn.Module):
    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return tokens + targets


class Single(nn.Module):
    def forward(self, words: Tensor) -> Tensor:
        return words


class Regression(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


def filled(example: Any, model: nn.Module | None = None) -> Any:
    return TokenInputs.of(example, model or Shifted(), None, None).fill(WINDOWS)


def test_targets_follow_their_tokens() -> None:
    tokens, targets = filled((IDS, IDS))
    assert torch.equal(tokens, FIRST) and torch.equal(targets, FOLLOWING)
    assert filled([IDS, IDS.int()])[1].dtype == torch.int32


def test_labels_beside_input_ids_are_the_same_ones() -> None:
    found = filled(dict.fromkeys(("input_ids", "attention_mask", "position_ids", "labels"), IDS))
    assert list(found) == ["input_ids", "attention_mask", "position_ids", "labels"]
    assert torch.equal(found["input_ids"], FIRST) and torch.equal(found["labels"], FIRST)
    assert found["attention_mask"].eq(1).all() and found["position_ids"].tolist() == [[0, 1, 2]] * 2


def test_a_single_input_is_the_tokens_whatever_its_name() -> None:
    assert torch.equal(filled(IDS, Single()), FIRST)
    assert torch.equal(filled((IDS,), Single())[0], FIRST)


def test_a_model_file_may_decide() -> None:
    inputs = TokenInputs.of(torch.zeros(2, 7), Regression(), lambda tokens: tokens.float(), 3)
    assert inputs.seq_len == 3 and torch.equal(inputs.fill(WINDOWS), WINDOWS.float())
    with pytest.raises(InvalidInput, match="--seq N"):
        TokenInputs.of(torch.zeros(2, 7), Regression(), lambda tokens: tokens.float(), None)


@pytest.mark.parametrize(
    "example", [(torch.zeros(2, 3), torch.zeros(2, 3)), (IDS, IDS[:, 0]), {"input_ids": IDS, "pixels": torch.ones(2)}]
)
def test_what_is_not_clear_is_refused(example: Any) -> None:
    with pytest.raises(InvalidInput, match=r"(?s)got: .*\[2.*from_tokens"):
        filled(example, Regression())
