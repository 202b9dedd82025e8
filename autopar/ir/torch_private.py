"""Private names of torch, under plain names. No other module below the runtime uses one.

Each name is here because nothing public does what it does; its docstring says what. ``tests/ir/test_torch_private.py``
has a case for each, which fails under that name where torch has changed. Tried with torch 2.11.0, 2.13.0 and 2.14.1.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed.distributed_c10d as c10d
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch._decomp import get_decompositions
from torch._functorch import apis, eager_transforms
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import is_fake as is_fake
from torch.autograd.function import _SingleLevelFunction
from torch.distributions import Distribution
from torch.fx import proxy
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module
from torch.nn.modules import module as modules
from torch.nn.modules._functions import BackwardHookFunction as BackwardHookFunction
from torch.utils import _pytree as pytree
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["BackwardHookFunction", "FakeTensor", "FakeTensorMode", "TorchDispatchMode", "is_fake", "pytree"]

_F = TypeVar("_F", bound=Callable[..., Any])
_aten = torch.ops.aten

# FakeTensor, FakeTensorMode, is_fake: tensors that have a shape, a dtype and a device and no values. torch.export makes
# them, and nothing public names their types.
# TorchDispatchMode: sees every op below autograd. The public torch.overrides.TorchFunctionMode sees calls above it.
# pytree: containers taken apart and put together, as torch.export does it. The public torch.utils has none of it.
# BackwardHookFunction: what calls the backward hooks of a module, by which a trace knows of them.

# Ops.

OpOverload = torch._ops.OpOverload
"""``aten.add.Tensor`` and its like, the targets of captured graphs. No public name for their type."""

HigherOrderOperator = torch._ops.HigherOrderOperator
"""Ops that are given graphs, as the regions of an exported program. No public name for their type."""

FunctionSchema = torch._C.FunctionSchema
"""Type of ``schema_of``; its parts are ``Argument``. Documented for C++ alone."""

Argument = torch._C.Argument
"""An operand or result in a schema: name, type, default, and whether it shares memory with others."""


def schema_of(op: OpOverload) -> FunctionSchema:
    """Schema of an op: arguments, results, which operands it writes or returns views of. Public: its text alone."""
    return op._schema


def overload_of(op: OpOverload) -> str:
    """``Tensor`` of ``aten.add.Tensor``. Public: as a part of the op's name."""
    return op._overloadname


TO_COPY = _aten._to_copy.default
"""What a conversion of dtype or device is in a functional graph. Ops are public by their functions, and the functions
of these and the ops below are private or missing."""

UNSAFE_VIEW = _aten._unsafe_view.default
"""The view inside of a batched matrix product."""

SAFE_SOFTMAX = _aten._safe_softmax.default
"""A softmax whose fully masked rows are zeros in place of NaN."""

SOFTMAX_BACKWARD = _aten._softmax_backward_data
LOG_SOFTMAX_BACKWARD = _aten._log_softmax_backward_data
"""Derivatives of softmax and log_softmax, all overloads."""

BATCH_NORM_WITH_STATISTICS = _aten._native_batch_norm_legit_functional.default
"""Batch norm that returns the updates of its running statistics; ``torch.batch_norm`` writes them in place."""

BATCH_NORM_OF_BATCH = _aten._native_batch_norm_legit.no_stats
"""Batch norm without running statistics, which returns mean and inverse deviation too."""

FUSED_RMS_NORM = _aten._fused_rms_norm.default
"""RMS norm and its factor per row, which a backward needs; ``torch.rms_norm`` does not return it."""

ASSERTIONS = (_aten._assert_async.default, _aten._assert_async.msg, _aten._assert_scalar.default)
"""What ``torch._assert_async`` and ``torch._check`` are in an exported graph."""

ASSERT_METADATA = _aten._assert_tensor_metadata.default
"""What torch.export puts before conversions: that dtype and device are those of the trace."""

READ_SCALAR = _aten._local_scalar_dense.default
"""What ``tensor.item()`` is below autograd."""

# Attention that returns the log-sum-exp of its scores, by which pieces are merged; the public function keeps it.
# Forward and backward by kernel: flash on CPU, flash on CUDA, memory-efficient on CUDA.
FLASH_CPU = _aten._scaled_dot_product_flash_attention_for_cpu.default
FLASH_CPU_BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
FLASH_CUDA = _aten._scaled_dot_product_flash_attention.default
FLASH_CUDA_BACKWARD = _aten._scaled_dot_product_flash_attention_backward.default
EFFICIENT_CUDA = _aten._scaled_dot_product_efficient_attention.default
EFFICIENT_CUDA_BACKWARD = _aten._scaled_dot_product_efficient_attention_backward.default

ATTENTION_OF_TWO_WIDTHS = _aten._scaled_dot_product_cudnn_attention.default
"""Attention by cuDNN, whose values may be of another width than keys. On fake tensors it has their shapes anywhere."""

FUNCTIONAL_COLLECTIVES = torch.ops._c10d_functional
"""Collectives that return what they receive, as ops of a graph. torch.distributed writes into given memory."""


def decompositions(ops: Sequence[Any]) -> dict[Any, Callable[..., Any]]:
    """Ops -> what they come down to, for ``make_fx``. The public table of torch.export cannot be asked for a few."""
    found: dict[Any, Callable[..., Any]] = get_decompositions(ops)
    return found


# Modes.

FAKE_TENSOR_LOG = "torch._subclasses.fake_tensor"
"""The logger to which a fake tensor tells why an op on it failed. It has no public switch."""


def no_modes() -> AbstractContextManager[Any]:
    """Within, no ``TorchDispatchMode`` sees ops, so that a trace that goes on does not hold them."""
    return cast("AbstractContextManager[Any]", _disable_current_modes())


def no_torch_functions() -> AbstractContextManager[Any]:
    """Within, ``__torch_function__`` of modes and subclasses is not called. Public for one subclass alone."""
    return cast("AbstractContextManager[Any]", torch._C.DisableTorchFunction())


@contextmanager
def no_functions_of_traces() -> Iterator[None]:
    """Within, of the active ``TorchFunctionMode`` those of torch's tracers are not; modes of users are.

    The public interface enters and leaves a mode of one's own, the last one first.
    """
    count = torch._C._len_torch_function_stack()
    before = [torch._C._pop_torch_function_stack() for _ in range(count)][::-1]
    kept = [mode for mode in before if not type(mode).__module__.startswith(("torch.fx.", "torch._export"))]
    for mode in kept:
        torch._C._push_on_torch_function_stack(mode)
    try:
        yield
    finally:
        for _ in kept:
            torch._C._pop_torch_function_stack()
        for mode in before:
            torch._C._push_on_torch_function_stack(mode)


@contextmanager
def as_in_export() -> Iterator[None]:
    """Within, ``torch.compiler.is_exporting()`` and ``is_compiling()`` are true. Public: to ask, not to say.

    Libraries ask, as transformers does to choose a kernel.
    """
    flags = ("_is_compiling_flag", "_is_exporting_flag")
    before = [getattr(torch.compiler, flag) for flag in flags]
    for flag in flags:
        setattr(torch.compiler, flag, True)
    try:
        yield
    finally:
        for flag, value in zip(flags, before, strict=True):
            setattr(torch.compiler, flag, value)


def constant_in_graphs(function: _F) -> _F:
    """Have ``torch.compile`` call ``function`` once and keep the result.

    ``torch.compiler.assume_constant_result`` does so, and imports the whole compiler for it (1.5 s).
    """
    cast(Any, function)._dynamo_marked_constant = True
    return function


# Graphs.

LazyGraphModule = _LazyGraphModule
"""A ``fx.GraphModule`` whose code is written when it is first called; the public one writes it at once."""


def lazy_graph_modules() -> AbstractContextManager[None]:
    """Within, torch.export makes ``LazyGraphModule``: it writes code for its graph a dozen times and runs it once."""
    return _use_lazy_graph_module(True)


def keep_lines_of(function: Callable[..., Any]) -> None:
    """Have traces keep source lines in ``function``, as they do for functions that are called forward.

    torch 2.11 has no way to: a message then names the line of forward that called the function.
    """
    if hasattr(proxy, "_register_stack_trace_anchor"):
        proxy._register_stack_trace_anchor(function)


CONTROL_FLOW_FILES = ("_higher_order_ops/while_loop.py", "_higher_order_ops/cond.py")
"""Files in a traceback by which a failed export is known to come from while_loop or cond; the errors are anything's."""


# What a trace puts its own functions in the place of.


class EntryPoint(NamedTuple):
    """An attribute of torch through which all ways to something lead, to be replaced while a model is traced.

    Public names are copies, which others may have imported before.
    """

    owner: Any
    name: str

    @property
    def original(self) -> Any:
        """Present value of the attribute."""
        return getattr(self.owner, self.name)


VMAP = EntryPoint(apis, "vmap_impl")
GRAD = EntryPoint(eager_transforms, "grad_impl")
GRAD_AND_VALUE = EntryPoint(eager_transforms, "grad_and_value_impl")
JVP = EntryPoint(eager_transforms, "_jvp_with_argnums")
VJP = EntryPoint(eager_transforms, "_vjp_with_argnums")
"""``torch.vmap`` and the transforms of ``torch.func``."""

CALL_FUNCTION = EntryPoint(torch.autograd.function, "custom_function_call")
"""``torch.autograd.Function.apply`` inside of a transform."""

SCAN = EntryPoint(importlib.import_module("torch._higher_order_ops.scan"), "_maybe_compile_and_run_fn")
"""``scan``, given its step, states and sequences flat. The modules have the names of functions in their package."""

_associative = importlib.import_module("torch._higher_order_ops.associative_scan")
ASSOCIATIVE_SCAN = EntryPoint(_associative, "_maybe_compile_and_run_fn")
GENERIC_ASSOCIATIVE_SCAN = EntryPoint(_associative, "generic_associative_scan")
"""``associative_scan`` by a combination of single elements, and by one of all elements at once."""

APPLY_FUNCTION = EntryPoint(_SingleLevelFunction, "apply")
"""``torch.autograd.Function.apply`` outside of transforms, unless ``apply_is_native``."""

_generator = "_checkpoint_without_reentrant_generator"
# From torch 2.14 on, that name is a wrapper for others.
CHECKPOINT = EntryPoint(checkpoint, f"{_generator}_impl" if hasattr(checkpoint, f"{_generator}_impl") else _generator)
"""``torch.utils.checkpoint.checkpoint(.., use_reentrant=False)``: a generator that yields before the forward."""

NODE_OF_TENSOR = EntryPoint(torch.autograd.graph, "_get_grad_fn_or_grad_acc")
"""What asks for a tensor's node of autograd: hooks on several tensors, ``get_gradient_edge``."""

CONVERT_MODULE = EntryPoint(nn.Module, "_apply")
"""``module.to``, ``.half()`` and the like."""


def flex_attention_entries() -> tuple[EntryPoint, EntryPoint, EntryPoint]:
    """The op of ``flex_attention``, its check of the device, and the switch that leaves out its compilation.

    Imported when asked for, with the compiler (1.5 s).
    """
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    return (
        EntryPoint(flex, "flex_attention_hop"),
        EntryPoint(flex, "_validate_device"),
        EntryPoint(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"),
    )


def never_compiled(function: _F) -> _F:
    """``torch.compiler.disable(function)``, which imports the compiler at once; this does at the first call."""
    return cast("_F", _disable_dynamo(function))


def leaves_scores(score_mod: Callable[..., Any]) -> bool:
    """Whether a ``score_mod`` that flex_attention's op is given stands for none."""
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    return score_mod is flex._identity


def indexing_by_tensors() -> AbstractContextManager[Any]:
    """Within, ``x[i]`` with a tensor ``i`` is an op under vmap, as flex_attention has it, and no read of a value."""
    wrapped = importlib.import_module("torch._dynamo._trace_wrapped_higher_order_op")
    return cast("AbstractContextManager[Any]", wrapped.TransformGetItemToIndex())


def apply_is_native() -> bool:
    """Whether ``torch.autograd.Function.apply`` goes through no Python, as from torch 2.14 on."""
    return not isinstance(vars(torch.autograd.Function)["apply"], classmethod)


def made_context_of(context: Any, function: type[torch.autograd.Function]) -> bool:
    """Whether ``context`` is what torch hands to the forward of ``function``; its type has no public name."""
    return isinstance(context, function._backward_cls)  # type: ignore[attr-defined]


def is_of_dispatcher(function: type[torch.autograd.Function]) -> bool:
    """Whether an autograd function is torch's own, which the dispatcher runs inside ops, below a trace."""
    return function.__module__.startswith("torch._")


# Tensors.


def storage_of(tensor: Tensor) -> int:
    """Stands for the memory of a tensor as long as that lives. The public ``data_ptr()`` is 0 without values."""
    return int(tensor.untyped_storage()._cdata)


def writes_to(tensor: Tensor) -> int:
    """How often the memory of a tensor has been written to. Autograd checks it; nothing public tells it."""
    return tensor._version


def local_tensor(tensor: DTensor) -> Tensor:
    """This rank's part itself. The public ``to_local()`` is a view of it with a place in autograd's graph."""
    return tensor._local_tensor


def placement_of(tensor: DTensor) -> Any:
    """For ``placed``: mesh, placements, global shape and strides. It does not keep the tensor alive."""
    return tensor._spec


def placed(local: Tensor, placement: Any) -> DTensor:
    """``local`` as this rank's part of a DTensor placed as another, without a gradient.

    The public ``DTensor.from_local`` takes parts to be of one size, or asks all ranks.
    """
    from torch.distributed.tensor import DTensor

    made: DTensor = cast(Any, DTensor)(local, placement, requires_grad=False)
    return made


# Autograd while it runs.


def in_backward() -> bool:
    """Whether this thread is in a backward pass."""
    return torch._C._current_graph_task_id() != -1


def will_run(node: Any) -> bool:
    """Whether the backward that is running reaches a node of autograd; ``needs_input_grad`` tells of a whole one."""
    return bool(torch._C._will_engine_execute_node(node))


# Modules. The public ``named_parameters`` and the like leave out None and what has appeared before.

PARAMETERS, BUFFERS, MODULES = "_parameters", "_buffers", "_modules"
"""Attributes of a module that hold its own parameters, buffers and modules by name."""

FORWARD_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
"""Attributes of a module that hold the hooks on its forward."""


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The parameters that a module holds itself, by name."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """The buffers that a module holds itself, by name."""
    return module._buffers


def own_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """The modules that a module holds itself, by name."""
    return module._modules


def with_own(
    module: nn.Module, parameters: Mapping[str, nn.Parameter | None], buffers: Mapping[str, Tensor | None]
) -> nn.Module:
    """A shallow copy that holds other parameters and buffers. Public: to change them in the module itself."""
    made = copy(module)
    made._parameters, made._buffers = dict(parameters), dict(buffers)
    return made


def gradient_hooks(parameter: Tensor) -> Iterator[Callable[..., Any]]:
    """The hooks on the gradient of a parameter, before and after it is added up. Public: to register them."""
    for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks):
        yield from (hooks or {}).values()


def hooks_after_gradient(parameter: Tensor) -> Iterator[Callable[..., Any]]:
    """The hooks that run when the gradient of a parameter has been added up. Public: to register them."""
    yield from (parameter._post_accumulate_grad_hooks or {}).values()


def backward_hooks(module: nn.Module) -> Iterator[Callable[..., Any]]:
    """The hooks on the backward of a module. Public: to register them."""
    yield from (*module._backward_hooks.values(), *module._backward_pre_hooks.values())


def hooks_on_all_modules() -> Iterator[tuple[str, Callable[..., Any]]]:
    """(kind, hook) of ``torch.nn.modules.module.register_module_forward_hook`` and its like."""
    for kind, value in vars(modules).items():
        if kind.startswith("_global_") and kind.endswith("_hooks") and isinstance(value, dict):
            yield from ((kind.strip("_"), hook) for hook in value.values())


@contextmanager
def same_hooks_on_all_modules() -> Iterator[None]:
    """Hooks on all modules that are set within it end with it: a ``torch.export`` that fails leaves its own in 2.11."""
    kinds = [value for kind, value in vars(modules).items() if kind.startswith("_global_") and isinstance(value, dict)]
    before = [dict(value) for value in kinds]
    try:
        yield
    finally:
        for value, known in zip(kinds, before, strict=True):
            for key in value.keys() - known.keys():
                del value[key]


def distributions_check_values() -> bool:
    """The value that ``Distribution.set_default_validate_args`` has set last."""
    return bool(Distribution._validate_args)


no_torch_function = torch._C._disabled_torch_function_impl
"""A ``__torch_function__`` that passes every call on to the level below. Public: a mode that does, for a while."""


def wrapper(cls: type[Tensor], like: Tensor, dtype: torch.dtype, device: torch.device) -> Any:
    """A ``cls`` of the shape and strides of ``like``, without memory. Public: subclasses with memory."""
    return cast(Any, Tensor)._make_wrapper_subclass(cls, like.shape, strides=like.stride(), dtype=dtype, device=device)


# Process groups.


def process_group(name: str) -> c10d.ProcessGroup:
    """The group of that name, which ops in graphs have in place of the group."""
    return cast(Any, c10d)._resolve_process_group(name)  # type: ignore[no-any-return]


def size_of_group(name: str) -> int:
    """Number of ranks in the group of that name, which ``torch.compile`` knows as a constant."""
    return int(c10d._get_group_size_by_name(cast(Any, name)))
