"""The fused attention of CPUs, forward and backward, which the public function does not give with its normalisers.

It reads the elements of a head one after the other and does not check that they lie so: of operands that do not, such
as heads that are the last dimension in memory, it makes something else. Here they are copied first.
"""

from __future__ import annotations

from torch import Tensor

from autopar.ir.torch_private import FLASH_CPU, FLASH_CPU_BACKWARD


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """The result (B, H, S, D), and the logarithm of the normaliser of each row, (B, H, S).

    q: (B, H, S, D). k, v: (B, H, T, D). mask: added to the scores; it broadcasts to (B, H, S, T).
    """
    out: Tensor
    out, lse = FLASH_CPU(_dense(q), _dense(k), _dense(v), 0.0, causal, attn_mask=mask, scale=scale)
    return out, lse


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v of ``flash_forward`` without a mask."""
    operands = (_dense(x) for x in (grad, q, k, v, out))
    found: tuple[Tensor, Tensor, Tensor] = FLASH_CPU_BACKWARD(*operands, lse, 0.0, causal, scale=scale)
    return found


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
