"""Private names of torch that only the runtime uses, under plain names; those of ``ir.torch_private`` serve it too.

Each name is here because nothing public does what it does; its docstring says what. There is a case for each in
``tests/runtime/test_torch_private.py``, which fails under that name where torch has changed. Tried with torch 2.13.0
and 2.14.1. Pipelines, whose import takes a second, have a module of their own, ``runtime.torch_private_pipelining``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.autograd import Variable
from torch.autograd.graph import Node
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

# Tensors.

FUSED_STEPS = (torch.ops.aten._fused_sgd_, torch.ops.aten._fused_adagrad_)
"""What ``torch.optim.SGD(fused=True)`` and ``Adagrad(fused=True)`` call, with all overloads."""

scale_all = torch._foreach_mul_
"""Multiply every tensor of a list in place, in a few kernels. Public: one tensor at a time."""

copy_all = torch._foreach_copy_
"""Copy every tensor of a list into that of another, in one call. Public: one tensor at a time."""

norms_of_all = torch._foreach_norm
"""The 2-norm of every tensor of a list, in a few kernels. Public: one tensor at a time."""

unscale_all = torch._amp_foreach_non_finite_check_and_unscale_
"""Multiply tensors of a list by a factor, and set a flag to 1 if one is not finite, in one kernel. The public
``torch.amp.GradScaler`` does it for the parameters of an optimiser."""


NO_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
"""What an op on tensors without values raises where it depends on them, or where nothing says what it makes. Public:
none of their names."""


def is_view(tensor: Tensor) -> bool:
    """Whether autograd takes a tensor for a view of another, which cannot be detached in place."""
    return tensor._is_view()


def in_dtensors(op: Any, run: Callable[[Any, tuple[object, ...], dict[str, object]], Any]) -> None:
    """Have DTensor call ``run(op, args, kwargs)`` for an op that it has no rule of.

    The public ``register_sharding`` wants the placements of every argument, which are lists of tensors here.
    """
    cast(Any, DTensor)._op_dispatcher._custom_op_handlers.setdefault(op, run)


# Autograd and modules.


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Have ``call`` run at the end of the backward that is running. Public: hooks on single tensors and nodes."""
    Variable._execution_engine.queue_callback(call)  # type: ignore[no-untyped-call]


def number_of_backward() -> int:
    """Of the backward that is running, another one each time. Public: hooks do not say which backward calls them."""
    return int(torch._C._current_graph_task_id())


def node_of_backward() -> Node | None:
    """The node of the backward that is running. Public: hooks on a node, which run before it or after it."""
    node: Node | None = torch._C._current_autograd_node()
    return node


def incompatible_keys(missing: list[str], unexpected: list[str]) -> Any:
    """The result of ``nn.Module.load_state_dict``, whose type has no public name."""
    return nn.modules.module._IncompatibleKeys(missing, unexpected)


# Processes.


def default_store() -> Any:
    """Where ranks of the job leave notes for each other: the store that they met at. Public: to make another."""
    return dist.distributed_c10d._get_default_store()


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """How long collectives of a group on ``device`` wait. Public: to set it."""
    timeout: timedelta = cast(Any, group)._get_backend(device).options._timeout
    return timeout


def wait_at_most(timeout: timedelta) -> None:
    """Have collectives of groups that are made from now on wait so long, those of device meshes too. Public: for each
    group where it is made, and meshes do not take it."""
    made = cast(Any, dist.distributed_c10d)
    made.default_pg_timeout = made.default_pg_nccl_timeout = timeout


def recorded_collectives() -> list[dict[str, Any]]:
    """What the flight recorder of this process has kept, in the order of the calls; nothing if it is off, which is
    as ``TORCH_FR_BUFFER_SIZE`` says. Public: files in pickle, written by NCCL's watchdog."""
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    if dump is None:
        return []
    found: list[dict[str, Any]] = json.loads(dump(True, False)).get("entries", [])
    return found


def group_of_name(name: str) -> dist.ProcessGroup | None:
    """The group that the flight recorder calls so. Public: none."""
    try:
        found: dist.ProcessGroup = cast(Any, dist.distributed_c10d)._resolve_process_group(name)
    except (RuntimeError, KeyError, ValueError):
        return None
    return found


def fake_store() -> Any:
    """The store of a process group of backend ``fake``, which sends nothing; both are made for tests of torch."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def flattened(mesh: DeviceMesh) -> DeviceMesh:
    """A mesh as one dimension, the first axis the major one. All ranks call together."""
    return mesh._flatten()


def beside(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """A mesh whose dimensions are those of several meshes cut from one, in this order."""
    return DeviceMesh._concatenate(list(meshes))


# Checkpoints.


def checkpoint_classes() -> Mapping[tuple[str, str], object]:
    """(module, name) -> what the pickled metadata of a checkpoint may name. torch reads it by ``pickle`` alone."""
    from torch.distributed.checkpoint import metadata
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    names = (
        "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    )  # fmt: skip
    return {
        ("torch", "Size"): torch.Size,
        ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
        (_StorageInfo.__module__, "_StorageInfo"): _StorageInfo,
        **{(metadata.__name__, name): getattr(metadata, name) for name in names},
    }


def chunks_of(tensor: Tensor) -> Any:
    """The chunks of a tensor that this rank holds, with their offsets in it and their sizes. Public: within a write."""
    from torch.distributed.checkpoint.planner_helpers import _create_chunk_list

    return _create_chunk_list(tensor)


# FSDP, which does the following by hooks on forward and backward of whole modules, and by none else.


def _groups(module: FSDPModule) -> list[Any]:
    """FSDP's groups of the parameters that ``module`` manages; one until torch 2.12."""
    state = module._get_fsdp_state()
    groups: list[Any] | None = getattr(state, "_fsdp_param_groups", None)
    return [g for g in (state._fsdp_param_group,) if g is not None] if groups is None else groups


def finish_gathering(module: FSDPModule) -> None:
    """Wait for parameters that were gathered ahead, if any, so that they can be resharded."""
    for group in _groups(module):
        if group._all_gather_result is not None:
            group.wait_for_unshard()


def prepare_sharding(root: FSDPModule) -> None:
    """The set-up that the first forward of ``root`` does once: streams, and the modules below it."""
    cast(Any, root._get_fsdp_state())._lazy_init()


def adopt_parameters(module: FSDPModule) -> None:
    """Have FSDP read again what the parameters of ``module`` hold, which were replaced."""
    for group in _groups(module):
        for parameter in group.fsdp_params:
            parameter.reset_sharded_param()


def keep_parts_in(
    module: FSDPModule, make: Callable[[Sequence[tuple[nn.Parameter, Tensor]]], Sequence[Tensor]]
) -> None:
    """Have FSDP keep the parts of the parameters of ``module`` that this rank has in the memory of other tensors.

    make: of (parameter, its part as FSDP gathers it, flat and filled up), gives a tensor like each such part.
    """
    own = [parameter for group in _groups(module) for parameter in group.fsdp_params]
    made = make([(parameter.sharded_param, parameter._sharded_param_data) for parameter in own])
    for parameter, flat in zip(own, made, strict=True):
        dim, part = parameter.fsdp_placement.dim, parameter.sharded_param._local_tensor
        parameter._sharded_param_data = flat
        filled = flat.view(parameter.padded_sharded_param_size)
        parameter.sharded_param._local_tensor = filled.narrow(dim, 0, part.size(dim))


def is_gathered(module: FSDPModule) -> bool:
    """Whether the parameters of ``module`` are gathered, or are being."""
    return all(group._all_gather_result is not None or group.is_unsharded for group in _groups(module))


def extend_gather(piece: Tensor, before: Callable[..., Any], after: Callable[..., Any]) -> None:
    """Have FSDP gather what ``before`` makes of a parameter that holds ``piece``, and give blocks what ``after`` makes
    of that. Public: for subclasses of tensors, which have the two as methods.
    """
    extended: Any = piece
    extended.fsdp_pre_all_gather, extended.fsdp_post_all_gather = before, after


def reduce_gradients(module: FSDPModule) -> None:
    """End of the backward of ``module``: reduce-scatter gradients and reshard, as it is set to.

    Of a split backward the input-gradient pass may have left some gradients in the dtype of sums; FSDP takes one dtype.
    """
    for group in reversed(_groups(module)):
        if any(parameter.unsharded_accumulated_grad is not None for parameter in group.fsdp_params):
            for parameter in group.fsdp_params:
                if parameter.unsharded_accumulated_grad is None:
                    parameter.to_accumulated_grad_if_needed()
        group.post_backward()


def end_backward(root: FSDPModule) -> None:
    """End of a whole backward: wait for the gradients."""
    cast(Any, root._get_fsdp_state())._root_post_backward_final_callback()


def shard_placements(wanted: Collection[tuple[DeviceMesh, int]]) -> dict[tuple[DeviceMesh, int], Any]:
    """(mesh, dimension of a parameter) -> what a ``shard_placement_fn`` returns where FSDP cuts that dimension over the
    last one of the mesh.

    Public: a dimension of the tensor, not a mesh. Raises ImportError before torch 2.12, which has one mesh a module.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult

    # FSDP knows parameters of one mesh by the identity of what describes it.
    described = {
        mesh: FSDPMeshInfo(mesh, shard_mesh_dim=0)
        if mesh.ndim == 1
        else HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
        for mesh, _ in wanted
    }
    return {(mesh, dim): ShardPlacementResult(placement=Shard(dim), mesh_info=described[mesh]) for mesh, dim in wanted}


def is_watched() -> bool:
    """Whether a ``TorchDispatchMode`` sees the ops of this thread."""
    return bool(cast(Any, torch._C)._len_torch_dispatch_stack())
