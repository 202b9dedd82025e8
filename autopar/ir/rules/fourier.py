"""Fourier transforms: linear, and each line along the transformed dimensions for itself.

fft (dim 1)    d0 _1 -> d0 _2

The dimensions that are transformed are blocked; a batch, and every other dimension, is a factor.
"""

from __future__ import annotations

from math import log2, prod

from autopar.ir.rule import FactorRule
from autopar.ir.rules.arrange import along
from autopar.ir.rules.call import Call
from autopar.ir.rules.factors import Rule, dim_of, numel, table

# Operations that a complex transform of n points takes, over n log2 n; a real one takes half of them.
_OF_COMPLEX = 5.0


def transform(call: Call) -> FactorRule | None:
    """Over one dimension, two or several: ``fft``, ``rfft2``, ``irfftn``, ..., and the primitives of ATen."""
    x, result = call.operands[0], call.results[0]
    bound = call.bound()
    rank = len(x.shape)
    dim = bound["dim"]
    if dim is None:
        sizes = bound.get("s")
        dim = range(rank - len(sizes), rank) if sizes else range(rank)
    dims = sorted({dim_of(d, rank) for d in ((dim,) if isinstance(dim, int) else dim)})
    # The longer of the two has all points of the transform.
    points = [max(x.shape[d], result.shape[d]) for d in dims]
    others = prod(size for d, size in enumerate(x.shape) if d not in dims)
    flops = _OF_COMPLEX * others * prod(points) * log2(max(2, prod(points)))
    is_complex = x.dtype.is_complex and result.dtype.is_complex
    return along(call, dims, linear=[[0]], flops=flops if is_complex else flops / 2)


def shift(call: Call) -> FactorRule | None:
    """``fftshift`` and its inverse: halves of a dimension change places."""
    (x,) = call.operands
    dims = call.bound()["dim"]
    rank = len(x.shape)
    moved = range(rank) if dims is None else [dim_of(d, rank) for d in ((dims,) if isinstance(dims, int) else dims)]
    return along(call, moved, linear=[[0]], flops=numel(x.shape))


RULES: dict[str, Rule] = table(
    transform,
    "fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_hfft2 "
    "fft_ihfft2 fft_fftn fft_ifftn fft_rfftn fft_irfftn fft_hfftn fft_ihfftn _fft_r2c _fft_c2c _fft_c2r",
) | table(shift, "fft_fftshift fft_ifftshift")
