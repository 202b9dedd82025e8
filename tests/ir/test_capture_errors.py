from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.while_loop import while_loop

from autopar.ir.capture.capture import capture
from autopar.ir.errors import CaptureError
from tests.ir.models import assert_same_training


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x
        return -x


class Counting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.max().item()


class Selecting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.nonzero(x)[: int(x[0])]


class Masking(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0]


class LeavingTorch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(x.numpy())


class Mistaken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("make", "line", "remedy"),
    [
        (Branching, "if x.sum() > 0:", "torch.where"),
        (Counting, "return x * x.max().item()", ".item()"),
        (Selecting, "return torch.nonzero(x)[: int(x[0])]", "try:"),
        (Masking, "return x[x > 0]", "masks in place of"),
        (LeavingTorch, "torch.from_numpy(x.numpy())", "torch ops in place of numpy"),
        (Mistaken, "return self.up(x)", "running forward"),
    ],
)
def test_the_message_names_the_users_line_and_what_to_change(
    make: Callable[[], nn.Module], line: str, remedy: str
) -> None:
    with pytest.raises(CaptureError) as caught:
        capture(make(), torch.randn(4))
    message = str(caught.value)
    assert message.startswith(f"{make.__name__} cannot be captured")
    assert "test_capture_errors.py" in message and line in message and remedy in message


class Autocasting(Mistaken):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.up(x)  # type: ignore[no-any-return]


class WritingThroughChunks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        y.unfold(0, 2, 1).add_(1)
        return y


@pytest.mark.parametrize(
    ("make", "line", "remedy"),
    [
        (Autocasting, "return self.up(x)", "precision"),
        (WritingThroughChunks, "y.unfold(0, 2, 1).add_(1)", "out-of-place"),
    ],
)
def test_what_a_functional_graph_cannot_say_is_refused(make: Callable[[], nn.Module], line: str, remedy: str) -> None:
    with pytest.raises(CaptureError) as caught:
        capture(make(), torch.randn(5, 3))
    assert line in str(caught.value) and remedy in str(caught.value)


def test_a_call_that_does_not_fit_the_signature() -> None:
    with pytest.raises(CaptureError, match="do not fit the signature"):
        capture(Mistaken(), {"x": torch.randn(4, 3), "y": torch.randn(4, 3)})


def test_a_loss_function_without_a_target() -> None:
    with pytest.raises(CaptureError, match="example_target"):
        capture(Mistaken(), torch.randn(4, 3), loss_fn=lambda output, target: output.sum())


def test_a_loss_that_is_not_a_scalar() -> None:
    with pytest.raises(CaptureError, match=r"loss_fn returned a tensor of shape \(4, 3\)"):
        capture(Mistaken(), torch.randn(4, 3), loss_fn=lambda output, target: output, example_target=torch.randn(4))


def test_no_tensor_at_all() -> None:
    with pytest.raises(CaptureError, match="hold no tensor"):
        capture(Mistaken(), {"x": 3})


def test_a_tensor_without_storage_that_is_no_buffer() -> None:
    model = Mistaken()
    model.table = torch.empty(3, device="meta")  # type: ignore[assignment]
    with pytest.raises(CaptureError, match="register_buffer"):
        capture(model, torch.randn(4, 3))


def test_a_model_that_cannot_be_copied() -> None:
    model = Mistaken()
    model.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(CaptureError, match="cannot be copied"):
        capture(model, torch.randn(4, 3))


class Sampling(Mistaken):
    def forward(self, x: Tensor) -> Tensor:
        posterior = torch.distributions.Normal(self.up(x), 1.0 + self.up(x).square())
        prior = torch.distributions.Normal(torch.zeros_like(x), torch.ones_like(x))
        divergence = torch.distributions.kl_divergence(posterior, prior).mean()
        return divergence - posterior.log_prob(posterior.rsample()).mean()  # type: ignore[no-any-return]


class Checking(Mistaken):
    def forward(self, x: Tensor) -> Tensor:
        torch._check((x > -1e9).all().item())
        torch._assert_async((x < 1e9).all())
        return self.up(x).square().mean()  # type: ignore[no-any-return]


class Converting(Mistaken):
    def forward(self, x: Tensor) -> Tensor:
        self.up = self.up.to(torch.float32)
        return self.up(x).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [Sampling, Checking, Converting])
def test_checks_of_values_are_no_part_of_the_program(make: Callable[[], nn.Module]) -> None:
    checked = torch.distributions.Distribution._validate_args
    model, x = make(), torch.randn(4, 3)
    assert_same_training(capture(model, x), model, (x,))
    assert torch.distributions.Distribution._validate_args is checked


class Asserting(Mistaken):
    def forward(self, x: Tensor) -> Tensor:
        assert [1, 2][int(torch.isnan(x).any())]
        return self.up(x).square().mean()  # type: ignore[no-any-return]


class Dropping(Mistaken):
    layerdrop = 0.1

    def forward(self, x: Tensor) -> Tensor:
        if torch.rand(()) < self.layerdrop:
            return x.square().mean()
        return self.up(x).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("make", "remedy"), [(Asserting, "without the assertion"), (Dropping, "layerdrop=0.0")])
def test_the_message_names_the_switch(make: Callable[[], nn.Module], remedy: str) -> None:
    with pytest.raises(CaptureError, match=remedy):
        capture(make(), torch.randn(4, 3))


def test_a_loop_over_chosen_experts_is_captured_as_grouped_products() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4, experts_implementation="eager",
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config)
    tokens = torch.randint(32, (2, 8))
    assert capture(model, {"input_ids": tokens, "labels": tokens}).has_loss
    assert model.config._experts_implementation == "eager", "the user's model stays as it is"


def test_packed_sequences_are_refused_by_name() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 4, batch_first=True)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            h, _ = self.lstm(packed)
            return nn.utils.rnn.pad_packed_sequence(h, batch_first=True)[0].sum()

    with pytest.raises(CaptureError, match=r"packed sequence(.|\n)*test_capture_errors\.py(.|\n)*the padded sequence"):
        capture(Packed(), (torch.randn(4, 6, 4), torch.tensor([6, 3, 2, 5])))


def test_a_loop_that_ends_by_a_value_is_refused_by_name() -> None:
    class Looping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            (state,) = while_loop(lambda s: s.sum() < 9, lambda s: (s * 2,), (self.inner(x).exp(),))
            total: Tensor = state.sum()
            return total

    with pytest.raises(CaptureError, match=r"torch's while_loop(.|\n)*a recurrent layer"):
        capture(Looping(), (torch.randn(4, 4),))


def test_lazy_modules_are_refused_by_name() -> None:
    with pytest.raises(CaptureError, match=r"'weight' has no shape(.|\n)*a call of the model on one batch"):
        capture(nn.LazyLinear(4), torch.randn(4, 8))
