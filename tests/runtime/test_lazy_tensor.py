"""Lazy tensors give what plain ones do, and read no more of their source than is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from autopar.runtime.lazy_tensor import Box, LastRead, LazyTensor, cut

SOURCES = [torch.arange(24.0).view(4, 6), torch.arange(24.0, 48.0).view(4, 6)]


class Counted:
    """Lazy tensors of SOURCES, and the elements that were read of them."""

    def __init__(self) -> None:
        self.read = 0
        self.tensors = [LazyTensor(source.shape, source.dtype, self._fetch(source)) for source in SOURCES]

    def _fetch(self, source: Tensor) -> Callable[[Box], Tensor]:
        def fetch(box: Box) -> Tensor:
            found = cut(source, box)
            self.read += found.numel()
            return found

        return fetch


# (op, elements that it reads)
CASES: dict[str, tuple[Callable[[Sequence[Tensor]], Tensor], int]] = {
    "narrow": (lambda t: t[0].narrow(1, 2, 3), 12),
    "nested": (lambda t: t[0].narrow(0, 1, 3).narrow(0, 1, 2).narrow(1, 4, 2), 4),
    "index": (lambda t: t[0][1, 2:5], 3),
    "negative": (lambda t: t[0][-2:, :-1], 10),
    "chunk": (lambda t: torch.chunk(t[0], 3, dim=0)[1], 12),
    "chunk uneven": (lambda t: torch.chunk(t[0], 4, dim=1)[2], 8),
    "split": (lambda t: torch.split(t[0], [1, 2, 3], dim=1)[2], 12),
    "empty": (lambda t: t[0][:0], 0),
    "cat": (lambda t: torch.cat(list(t), dim=0).narrow(0, 3, 2), 12),
    "cat columns": (lambda t: torch.cat(list(t), dim=1).narrow(1, 0, 2), 8),
    "stack": (lambda t: torch.stack(list(t), dim=0)[1].narrow(0, 0, 1), 6),
    "stack inside": (lambda t: torch.stack(list(t), dim=1).narrow(0, 2, 1), 12),
    "transpose": (lambda t: t[0].transpose(0, 1).narrow(0, 1, 2), 8),
    "matrix transposed": (lambda t: t[0].t()[3:4], 4),
    "permute": (lambda t: torch.stack(list(t)).permute(2, 0, 1).narrow(0, 5, 1), 8),
    "unbind": (lambda t: t[0].unbind(1)[2], 4),
    "squeeze": (lambda t: t[0].narrow(0, 2, 1).squeeze(0), 6),
    "cast": (lambda t: t[0].to(torch.bfloat16).narrow(0, 0, 1), 6),
    "clone": (lambda t: t[0].clone().detach().contiguous().narrow(0, 0, 1), 6),
    # Whatever else: the op's operands whole.
    "reshape": (lambda t: t[0].reshape(2, 2, 6).transpose(1, 2).reshape(4, 6).narrow(0, 0, 1), 24),
    "strided": (lambda t: t[0][::2], 24),
    "add": (lambda t: (t[0] + 1).narrow(0, 0, 1), 24),
}


@pytest.mark.parametrize("case", CASES)
def test_ops_give_what_they_give_on_plain_tensors(case: str) -> None:
    work, elements = CASES[case]
    lazy = Counted()
    found, expected = work(lazy.tensors), work(SOURCES)
    assert isinstance(found, LazyTensor) and lazy.read == 0
    assert found.shape == expected.shape and found.dtype == expected.dtype
    assert torch.equal(found.read(), expected)
    assert lazy.read == elements


def test_copying_into_a_plain_tensor_reads() -> None:
    lazy, target = Counted(), torch.zeros(2, 6, dtype=torch.float64)
    target.copy_(lazy.tensors[1].narrow(0, 2, 2))
    assert torch.equal(target, SOURCES[1][2:].double())
    assert lazy.read == 12


def test_the_last_tensor_is_kept() -> None:
    reads: list[str] = []

    def read(key: str) -> Tensor:
        reads.append(key)
        return torch.zeros(1)

    remembered = LastRead(read)
    for key in ("a", "a", "b", "b", "a"):
        remembered(key)
    assert reads == ["a", "b", "a"]
