"""The keywords by which the public functions take constraints, for type checkers: a wrong name is an error of theirs.

    autopar.parallelize(model, 8, example_inputs=batch, tp=2, zero=3)

They are the fields of ``Constraints``, under shorter names too, and some of them are also taken in other forms.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from torch import Tensor
from typing_extensions import TypedDict

from autopar.cost_model.compute.documents import Documents
from autopar.ir.annotations import ParameterAnnotation
from autopar.ir.mesh import MeshAxis
from autopar.ir.plan import Recipe
from autopar.ir.rematerialisation import Level
from autopar.ir.schedule import Schedule
from autopar.ir.sequence import SequenceLayout
from autopar.search.problem.forbidden_placements import Forbidden

# Shorter names for fields, as on the command line.
SHORT = {"sp": "sequence_parallel", "microbatch": "microbatch_size"}


class ConstraintOptions(TypedDict, total=False):
    """See ``Constraints`` for the meaning of each. None, or leaving one out, leaves the question to the search.

    remat: a level, or the share that blocks keep at most, as in ``0.4`` or ``"40%"``. activation_memory: bytes, or text
    as in ``"20GiB"``. precision: fp32, bf16, fp16, or a recipe of narrow floats (``ir.precision``). recipe_pins:
    patterns of names of weights -> that of their products (``ir.recipe_pins``).
    sp, microbatch: sequence_parallel and microbatch_size. annotations: results of
    ``autopar.constrain``, one or several. expert_load: the result of ``ParallelModule.expert_load``, or for each layer
    the tokens of its experts.
    """

    pp: int | None
    dp: int | None
    tp: int | None
    cp: int | None
    ep: int | None
    experts_within: tuple[str, ...]
    sequence_parallel: bool | Literal["on", "off"] | None
    sp: bool | Literal["on", "off"] | None
    zero: int | None
    shard: int | None
    sequence_layout: SequenceLayout | None
    reshard_after_forward: bool | None
    prefetch: int | None
    offload: bool | Literal["disk"] | None
    schedule: Schedule | None
    schedules: tuple[Schedule, ...]
    virtual_stages: int | None
    num_microbatches: int | None
    microbatch_size: int | None
    microbatch: int | None
    precision: str
    recipes: tuple[Recipe | None, ...]
    recipe_pins: Mapping[str, str]
    remat: Level | float | str | None
    activation_memory: float | str | None
    fit_probability: float | None
    expert_capacity: float | None
    expert_load: Sequence[Sequence[float]] | Mapping[str, Sequence[float]] | Mapping[str, Tensor]
    documents: Documents | None
    axes: tuple[MeshAxis, ...] | None
    annotations: ParameterAnnotation | Iterable[ParameterAnnotation]
    forbidden: tuple[Forbidden, ...]
