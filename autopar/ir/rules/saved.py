"""The tensors that autograd saves of an op between forward and backward.

    linear      input and weight             softmax, relu, tanh   the result
    gelu, silu  the input                    add, view, cat, sum   nothing
    mul         each operand whose partner needs a gradient

From the derivative formulas of ATen (``tools/autograd/derivatives.yaml`` in PyTorch). Bytes that belong to no
operand or result (statistics of a norm, log probabilities inside a loss) are counted apart.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.ir.gates import GATE, VALUE, gate_function
from autopar.ir.graph import has_gradient_dtype, op_nodes, source, tensor_operands, tensor_results
from autopar.ir.ops.composite import goes_in_pieces
from autopar.ir.ops.expert_ffn import ACTIVATIONS
from autopar.ir.rules import loss, recurrent
from autopar.ir.rules import scan as scans
from autopar.ir.rules.call import Call, Operand, call_of
from autopar.ir.rules.factors import aten, numel

# Statistics are kept in float32.
_STATISTIC_BYTES = _WIDE = 4


class Saved(NamedTuple):
    """Positions of the operands and results kept, and bytes of whatever else is, all of global size.

    extra_factors: factors of the rule that divide the extra bytes, beside those of the result. product_bytes: of the
    extra bytes, those of results of products inside the op. dispatched_bytes: of the results of its all-to-alls
    where it dispatches tokens, beside the extra bytes, as backward does not need them; the same factors divide them.
    copied_bytes: of the extra bytes, those of copies of operands, which the op's own code makes again where it is
    recomputed, whether or not its results are kept.
    """

    operands: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    extra_bytes: float = 0.0
    extra_factors: tuple[str, ...] = ()
    product_bytes: float = 0.0
    dispatched_bytes: float = 0.0
    copied_bytes: float = 0.0


def saved_for_backward(
    node: fx.Node, differentiable: Callable[[fx.Node], bool] | None = None, precision: str = "fp32"
) -> Saved:
    """The tensors that the backward of ``node`` needs.

    differentiable: whether a gradient flows through an operand or the op; without it through every floating point one.
    precision: of compute, which what is float32 in the capture has.
    An op of which nothing is known keeps everything.
    """
    if differentiable is not None and not differentiable(node):
        return Saved()
    call = call_of(node, precision)
    operands = call.operands
    needs = {
        operand.position
        for operand, source in zip(operands, tensor_operands(node), strict=True)
        if has_gradient_dtype(operand) and (differentiable is None or differentiable(source))
    }
    if not needs or not any(map(has_gradient_dtype, call.results)):
        return Saved()
    return _saved(call, needs)


def _saved(call: Call, needs: set[int]) -> Saved:
    special = _SPECIAL.get(call.name)
    if special is not None:
        return special(call, needs)
    if call.name in _NOTHING:
        return Saved()
    if call.name in _RESULT:
        return Saved(results=(0,))
    if call.name in _BOTH:
        return Saved((0,), (0,))
    if call.name in _PICKED:
        # A selection keeps where it picked from; without indices, a comparison with the result finds it.
        return Saved(results=(1,)) if len(call.results) > 1 else Saved((0,), (0,))
    if call.name in _INDICES:
        return Saved(tuple(o.position for o in call.operands if not has_gradient_dtype(o)))
    if call.name in _PRODUCT:
        return _product(call, needs)
    everything = tuple(o.position for o in call.operands)
    if torch.Tag.pointwise in getattr(call.target, "tags", ()) or call.name in _OPERANDS:
        return Saved(everything)
    return Saved(everything, tuple(range(len(call.results))))


def _product(call: Call, needs: set[int]) -> Saved:
    """Bilinear: the gradient of either factor takes the other."""
    bound = call.bound()
    others = [bound.get(name) for name in ("bias", "history")]
    pair = [o.position for o in call.operands if all(o is not other for other in others)]
    if call.name in _ADDING:
        pair = pair[1:]
    if len(pair) < 2:
        return Saved()  # by a number
    kept = {p for p in pair if needs & (set(pair) - {p})}
    return Saved(tuple(sorted(kept)))


def _quotient(call: Call, needs: set[int]) -> Saved:
    numerator, divisor = call.bound()["self"], call.bound()["other"]
    if not isinstance(divisor, Operand):
        return Saved()
    if divisor.position in needs and isinstance(numerator, Operand):
        return Saved((numerator.position, divisor.position))
    return Saved((divisor.position,))


def _power(call: Call, needs: set[int]) -> Saved:
    exponent = call.bound()["exponent"]
    operands = tuple(o.position for o in call.operands)
    return Saved(operands, (0,) if isinstance(exponent, Operand) and exponent.position in needs else ())


def _layer_norm(call: Call, needs: set[int]) -> Saved:
    """Input, weight, and a mean and a scale per row (RMS norm: a scale)."""
    bound = call.bound()
    x: Operand = bound["x"] if "x" in bound else bound["input"]
    shape = bound.get("normalized_shape", x.shape[-1:])
    per_row = 1 if "rms" in call.name else 2
    return _norm(call, x, numel(x.shape) / numel(shape) * per_row)


def _group_norm(call: Call, needs: set[int]) -> Saved:
    bound = call.bound()
    x: Operand = bound["input"]
    groups = bound["num_groups"] if "num_groups" in bound else bound["group"]
    return _norm(call, x, 2.0 * x.shape[0] * groups)


def _weight_norm(call: Call, needs: set[int]) -> Saved:
    """The direction, the wanted norms, and the norms that the slices have."""
    direction, norms = call.operands
    if len(call.results) > 1:
        return Saved((0, 1), (1,))
    return Saved((0, 1), (), numel(norms.shape) * direction.dtype.itemsize)


def _batch_norm(call: Call, needs: set[int]) -> Saved:
    x: Operand = call.bound()["input"]
    return _norm(call, x, 2.0 * x.shape[1])


def _norm(call: Call, x: Operand, num_statistics: float) -> Saved:
    bound = call.bound()
    names: tuple[str, ...] = ("weight", "running_mean", "running_var")
    if "layer" in call.name:
        names = ("weight", "bias")
    kept = [x.position, *(o.position for o in map(bound.get, names) if isinstance(o, Operand))]
    if len(call.results) > 1:
        return Saved(tuple(kept), tuple(range(1, min(len(call.results), 3))))
    return Saved(tuple(kept), (), num_statistics * _STATISTIC_BYTES)


def _kernel_attention(call: Call, needs: set[int]) -> Saved:
    """All operands, the result, and the logarithm of the normaliser of each row."""
    rows = call.results[0].shape[:-1]
    return Saved(tuple(o.position for o in call.operands), (0,), numel(rows) * _STATISTIC_BYTES)


def _attention(call: Call, needs: set[int]) -> Saved:
    """What the kernel keeps, of operands as it takes them (``composite.attention``): copies where groups of heads share
    keys beside a mask, of masks that are boolean, and of queries, keys and values with sinks. A sliding window without
    a mask goes through it in pieces, whose results are kept beside the whole one."""
    bound = call.bound()
    q, k, v, mask, sinks = (bound[name] for name in ("q", "k", "v", "mask", "sinks"))
    slides = bound["kind"] == "sliding" and bound["window"] < k.shape[2]
    lengths = q.shape[2], k.shape[2]
    in_pieces = goes_in_pieces(bound["kind"], bound["window"], *lengths, masked=mask is not None)
    masked = mask is not None or slides
    times = q.shape[1] / k.shape[1] if masked else 1.0
    kept, copied = {o.position for o in call.operands}, 0.0
    if sinks is not None or times > 1:
        # With sinks each piece has keys of its own, of up to two windows.
        times *= 2 if in_pieces and sinks is not None else 1
        copied += times * sum(numel(x.shape) * x.dtype.itemsize for x in (k, v))
        kept -= {k.position, v.position}
    if sinks is not None:
        copied += numel(q.shape) * q.dtype.itemsize
        kept.discard(q.position)
    if mask is not None and mask.dtype == torch.bool:
        copied += numel(mask.shape) * q.dtype.itemsize
        kept.discard(mask.position)
    if in_pieces:
        copied += numel(call.results[0].shape) * q.dtype.itemsize
    statistics = numel(call.results[0].shape[:-1]) * _STATISTIC_BYTES
    return Saved(tuple(sorted(kept)), () if in_pieces else (0,), statistics + copied, copied_bytes=copied)


def _cross_entropy(call: Call, needs: set[int]) -> Saved:
    """Log probabilities of all classes, in at least float32, and the targets."""
    logits, *others = call.operands
    width = max(logits.dtype.itemsize, 4) if call.name.startswith("autopar") else logits.dtype.itemsize
    return Saved(tuple(o.position for o in others), (), numel(logits.shape) * width)


def _dropout(call: Call, needs: set[int]) -> Saved:
    """A mask of one byte per element."""
    bound = call.bound()
    if bound["p"] == 0 or bound.get("train", True) is False:
        return Saved()
    return Saved(results=(1,)) if len(call.results) > 1 else Saved(extra_bytes=numel(call.results[0].shape))


def _moe(call: Call, needs: set[int]) -> Saved:
    """Per token and chosen expert: the sorted row, what is between the products, and the row on its way out."""
    bound = call.bound()
    x: Operand = bound["x"]
    h, u, inner = x.shape[-1], bound["w_up"].shape[1], bound["w_down"].shape[2]
    rows = numel(bound["expert_index"].shape)
    widths = h + u + _between_products(bound["activation"], bound["gated"]) * inner + h
    row = rows * x.dtype.itemsize
    kept = tuple(bound[name].position for name in ("expert_index", "expert_weight", "w_up", "w_down"))
    return Saved(kept, (), row * widths, ("experts",), product_bytes=row * (u + h), dispatched_bytes=row * 2 * h)


@lru_cache(maxsize=64)
def _between_products(activation: str, gated: bool) -> int:
    """Tensors as wide as an expert that are kept beside the result of the first product, by a gate or an expression."""
    if activation in ACTIVATIONS:
        return 2 if gated else 1
    names = (GATE, VALUE) if gated else (GATE,)

    def between(*parts: Tensor) -> Tensor:
        return gate_function(activation)(dict(zip(names, parts, strict=True)))

    graph = make_fx(between, tracing_mode="fake")(*(torch.empty(2, 2) for _ in names)).graph
    (result,) = (node.args[0] for node in graph.nodes if node.op == "output")
    return len({(result, 0), *_kept_inside(graph)})


def _kept_inside(graph: fx.Graph) -> set[tuple[fx.Node, int]]:
    """The results of ops of a graph that the backward of one of them needs."""
    kept = set()
    for node in op_nodes(graph):
        own = saved_for_backward(node)
        operands = tensor_operands(node)
        kept |= {source(operands[position]) for position in own.operands}
        kept |= {(node, number) for number in own.results}
    return {(node, number) for node, number in kept if node.op == "call_function"}


def _bag(call: Call, needs: set[int]) -> Saved:
    """The indices, the bag of each of them, and how many each bag has or, of a maximum, which were largest."""
    bound = call.bound()
    weight, indices, scale = bound["weight"], bound["indices"], bound["per_sample_weights"]
    kept = [o.position for o in call.operands if o.position != weight.position]
    if scale is not None and scale.position in needs:
        kept.insert(0, weight.position)
    bags = call.results[0].shape[0]
    each = weight.shape[1] if bound["mode"] == "max" else 1
    extra = (numel(indices.shape) + bags * (1 + each)) * torch.int64.itemsize
    return Saved(tuple(kept), (), extra, ("b",))


def _recurrent(call: Call, needs: set[int]) -> Saved:
    """All operands, the output, and of each step and layer the gates and the states."""
    of_steps = {matrix.position for matrix in recurrent.matrices(call) if matrix.stepwise}
    x = call.operands[0]
    width = sum(sum(operand.shape) for operand in call.operands if operand.position in of_steps)
    extra = numel(x.shape[:-1]) * width * x.dtype.itemsize
    return Saved(tuple(o.position for o in call.operands), (0,), extra, (recurrent.BATCH,))


def _scan(call: Call, needs: set[int]) -> Saved:
    """All operands, and of every step what its ops keep of what other ops of the step made."""
    inside = [tensor_results(node)[number] for node, number in _kept_inside(call.target.body.graph)]
    # Of compute, as the operands have it.
    narrow = min((o.dtype.itemsize for o in call.operands if has_gradient_dtype(o)), default=_WIDE)
    sizes = (min(t.dtype.itemsize, narrow) if t.dtype == torch.float32 else t.dtype.itemsize for t in inside)
    extra = sum(t.numel() * size for t, size in zip(inside, sizes, strict=True)) * scans.work_of_body(
        call.target, scans.length_of(call)
    )
    return Saved(tuple(o.position for o in call.operands), (), extra)


def _where(call: Call, needs: set[int]) -> Saved:
    return Saved((call.bound()["condition"].position,))


def _max_pool(call: Call, needs: set[int]) -> Saved:
    """The input, and where each maximum was found."""
    if len(call.results) > 1:
        return Saved((0,), (1,))
    return Saved((0,), (), numel(call.results[0].shape) * torch.int64.itemsize)


def _all(call: Call, needs: set[int]) -> Saved:
    return Saved(tuple(operand.position for operand in call.operands), (0,))


def _lerp(call: Call, needs: set[int]) -> Saved:
    weight = call.bound()["weight"]
    if not isinstance(weight, Operand):
        return Saved()
    if weight.position in needs:
        return Saved(tuple(o.position for o in call.operands))
    return Saved((weight.position,))


_NOTHING = frozenset(
    aten(
        "add sub rsub neg positive alias clone contiguous detach lift_fresh lift_fresh_copy _to_copy to copy real imag "
        "deg2rad rad2deg round floor ceil trunc sign sgn "
        "view _unsafe_view reshape view_copy flatten ravel squeeze unsqueeze squeeze_copy unsqueeze_copy permute "
        "transpose t numpy_T mT adjoint movedim expand broadcast_to repeat tile repeat_interleave view_as_real "
        "view_as_complex diagonal unfold pixel_shuffle pixel_unshuffle "
        "cat concat stack split split_with_sizes split_copy split_with_sizes_copy chunk tensor_split unsafe_split "
        "unsafe_chunk unsafe_split_with_sizes slice slice_copy narrow narrow_copy select select_copy unbind "
        "slice_scatter select_scatter pad constant_pad_nd flip roll tril triu diff sum mean cumsum "
        "full zeros ones empty new_full new_zeros new_ones new_empty full_like zeros_like ones_like empty_like fill "
        "arange rand randn rand_like randn_like randint bernoulli one_hot "
        "fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_hfft2 "
        "fft_ihfft2 fft_fftn fft_ifftn fft_rfftn fft_irfftn fft_hfftn fft_ihfftn _fft_r2c _fft_c2c _fft_c2r "
        "fft_fftshift fft_ifftshift "
        "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d "
        "upsample_bicubic2d upsample_trilinear3d"
    )
)
_RESULT = frozenset(
    aten(
        "relu tanh sigmoid exp exp2 expm1 sqrt rsqrt reciprocal tan softmax _softmax log_softmax _log_softmax "
        "special_expit"
    )
)
_BOTH = frozenset(aten("logsumexp prod norm linalg_vector_norm cumprod logcumsumexp var_mean std std_mean"))
_PICKED = frozenset(aten("max min amax amin median nanmedian topk sort kthvalue mode cummax cummin"))
_INDICES = frozenset(
    aten(
        "embedding index _unsafe_index index_select index_put _unsafe_index_put scatter scatter_add index_add "
        "index_copy masked_fill masked_scatter"
    )
)
_PRODUCT = frozenset(
    [
        "autopar::columns_linear",
        "autopar::scaled_linear",
        *aten(
            "mul multiply linear matmul mm bmm mv dot outer ger addmm baddbmm addmv conv1d conv2d conv3d convolution "
            "_convolution conv_transpose1d conv_transpose2d conv_transpose3d _grouped_mm einsum addcmul"
        ),
    ]
)
_ADDING = frozenset(aten("addmm baddbmm addmv addcmul"))
_OPERANDS = frozenset(
    [
        *loss.RULES,
        *aten(
            "gather glu prelu var avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d "
            "adaptive_avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d cosine_similarity log_sigmoid hardswish "
            "reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d"
        ),
    ]
)
_SPECIAL: dict[str, Callable[[Call, set[int]], Saved]] = {
    **dict.fromkeys(aten("div true_divide divide"), _quotient),
    **dict.fromkeys(aten("pow float_power"), _power),
    **dict.fromkeys(aten("layer_norm native_layer_norm rms_norm _fused_rms_norm"), _layer_norm),
    "autopar::rms_norm": _layer_norm,
    **dict.fromkeys(aten("group_norm native_group_norm"), _group_norm),
    **dict.fromkeys(
        aten(
            "batch_norm native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional "
            "_native_batch_norm_legit_no_training _batch_norm_no_update"
        ),
        _batch_norm,
    ),
    **dict.fromkeys(aten("_weight_norm _weight_norm_interface"), _weight_norm),
    "autopar::attention": _attention,
    "aten::scaled_dot_product_attention": _kernel_attention,
    "autopar::cross_entropy": _cross_entropy,
    "aten::cross_entropy_loss": _cross_entropy,
    "autopar::dropout": _dropout,
    **dict.fromkeys(aten("dropout native_dropout feature_dropout"), _dropout),
    "autopar::moe": _moe,
    **dict.fromkeys(
        aten(
            "max_pool1d max_pool2d max_pool3d max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d "
            "adaptive_max_pool3d"
        ),
        _max_pool,
    ),
    **dict.fromkeys(recurrent.RULES, _recurrent),
    **dict.fromkeys(scans.RULES, _scan),
    "autopar::embedding_bag": _bag,
    "aten::where": _where,
    "aten::lerp": _lerp,
    "aten::scatter_reduce": _all,
}
