"""The user's constraints: degrees, axes, microbatches, precision, rematerialisation.

A pinned degree becomes a mesh axis of its own, on which every op may only do what the name of the axis says:

    dp      its batch factor, or nothing
    tp      any factor but the batch; sequence factors only if sequence parallelism is not off
    cp      sequence factors, and any factor but the batch inside attention (heads: Ulysses); experts with dispatch
    ep      experts; the batch for ops without experts
    other   every factor that belongs to no pinned degree

A degree pinned to 1 has no axis, but forbids its use on free axes too. Hybrid sharding divides the dp axis into
``dp_replicate``, over which ZeRO never shards, and ``dp_shard``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations
from math import prod
from typing import get_args

from autopar.cost_model.compute.documents import Documents
from autopar.cost_model.compute.expert_imbalance import Loads
from autopar.cost_model.memory.fit_probability import DEFAULT_MARGIN, share_to_fill
from autopar.ir.annotations import ParameterAnnotation
from autopar.ir.errors import InfeasiblePlan
from autopar.ir.mesh import Mesh, MeshAxis
from autopar.ir.offload import Offload
from autopar.ir.plan import Precision, Recipe
from autopar.ir.recipe_pins import RecipePin
from autopar.ir.rematerialisation import LEVELS, Level
from autopar.ir.schedule import Pipelining, Schedule, splits_backward, virtual_stages_of
from autopar.ir.sequence import SequenceLayout
from autopar.search.problem.forbidden_placements import Forbidden

ROLES = ("dp", "cp", "ep", "tp")

# What a search considers. naive takes longest and least memory, so it is the last resort.
# Its order is found for a plan that has one of the others (``search/outer/found_order.py``).
FOUND: Schedule = "found"
SEARCHED: tuple[Schedule, ...] = ("1f1b", "zb-h1", "interleaved", "zb-v", "dualpipe-v", "zb-2p", "naive")


class NoOption(InfeasiblePlan):
    """An op has no choice left in one configuration; with other degrees or microbatches it may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """None leaves a question to the search.

    pp, dp, tp, cp, ep: degrees. ep may take of the ranks of the others (``spread_experts``). experts_within: "tp",
    "cp", or both: the experts are spread over those axes too. sequence_parallel: whether sequence factors may be used
    on tensor axes. schedule, virtual_stages: of the pipeline. zero: stage 0 to 3. shard: data ranks that ZeRO shards
    over, the others replicate. reshard_after_forward, prefetch: of stage 3, see ``Plan``. offload: what ZeRO shards in
    host memory, on every stage. sequence_layout: of sequences that ranks share; zigzag where causal attention can be
    so, if left open. num_microbatches, or microbatch_size: samples of a microbatch on one data-parallel rank.
    precision: of compute. recipes: of 8-bit floats to choose from for the matrix products that the rule finds; None: in
    ``precision`` as the other ops. remat: level of every block, or the share that it keeps at most of what autograd
    would save. activation_memory: bytes that a rank may save for backward. fit_probability: the least that a plan has
    to fit with. expert_capacity: see ``Plan``. expert_load: rows that the experts of each layer got, as
    ``ParallelModule.expert_load`` counts them; routing is taken to be even if left out. axes: the stage mesh in order,
    as a named DeviceMesh gives it (without ``pp``). annotations: placements of parameters that are fixed
    (``autopar.constrain``). forbidden: placements of ops that are ruled out, on the axes that are given or pinned.
    documents: packed into a row, as the attention of the model keeps them apart, in the mean; one if left out.
    schedules: that are tried where none is pinned.
    """

    pp: int | None = None
    dp: int | None = None
    tp: int | None = None
    cp: int | None = None
    ep: int | None = None
    experts_within: tuple[str, ...] = ()
    sequence_parallel: bool | None = None
    zero: int | None = None
    shard: int | None = None
    sequence_layout: SequenceLayout | None = None
    reshard_after_forward: bool | None = None
    prefetch: int | None = None
    offload: Offload | None = None
    schedule: Schedule | None = None
    virtual_stages: int | None = None
    num_microbatches: int | None = None
    microbatch_size: int | None = None
    precision: Precision = "fp32"
    recipes: tuple[Recipe | None, ...] = (None,)
    recipe_pins: tuple[RecipePin, ...] = ()
    remat: Level | float | None = None
    activation_memory: float | None = None
    fit_probability: float | None = None
    expert_capacity: float | None = None
    expert_load: Loads = field(default=(), compare=False)  # one for the whole search, and long
    documents: Documents | None = field(default=None, compare=False)  # likewise
    axes: tuple[MeshAxis, ...] | None = None
    annotations: tuple[ParameterAnnotation, ...] = ()
    forbidden: tuple[Forbidden, ...] = ()
    schedules: tuple[Schedule, ...] = SEARCHED

    @classmethod
    def of_mesh(cls, sizes: dict[str, int], **others: object) -> Constraints:
        """Constraints from the named axes of a DeviceMesh, outermost first; ``pp`` is the pipeline."""
        axes = tuple(MeshAxis(name, size) for name, size in sizes.items() if name != "pp")
        return cls(pp=sizes.get("pp", 1), axes=axes, **others)  # type: ignore[arg-type]  # the dataclass checks names

    def degree(self, role: str) -> int | None:
        """Pinned degree of ``role``, by its own field or by the axes of that name."""
        if self.axes is not None:
            return prod(axis.size for axis in self.axes if role_of_axis(axis.name) == role)
        value: int | None = getattr(self, role)
        return value

    def pins(self, role: str) -> bool:
        """Whether free axes may not play ``role``."""
        if self.axes is not None:
            return any(role_of_axis(axis.name) == role for axis in self.axes)
        return getattr(self, role) is not None

    def pinned_axes(self) -> tuple[MeshAxis, ...]:
        """Axes of the pinned degrees above 1, outermost first (without those of ``axes``)."""
        found = [(role, getattr(self, role)) for role in ROLES]
        return tuple(MeshAxis(role, size) for role, size in found if size is not None and size > 1)

    @property
    def memory_share(self) -> float:
        """Share of a device's usable bytes that a predicted peak may take."""
        return share_to_fill(DEFAULT_MARGIN if self.fit_probability is None else self.fit_probability)

    @property
    def levels(self) -> tuple[Level, ...]:
        """The levels of rematerialisation that are searched; a share is met at last."""
        return (self.remat,) if isinstance(self.remat, str) else LEVELS

    def check(self, num_gpus: int, batch_size: int) -> None:
        """Raise InfeasiblePlan where the constraints contradict each other, the ranks or the batch."""
        for pin in self.recipe_pins:
            if pin.precision not in (None, self.precision):
                raise InfeasiblePlan(
                    f"recipe of {pin.pattern!r} is {pin.precision}, and the other ops are in {self.precision}.\n"
                    f"  try: '{pin.pattern}: {self.precision}', or a recipe"
                )
        for name in ("pp", *ROLES, "shard", "prefetch", "num_microbatches", "microbatch_size", "virtual_stages"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise InfeasiblePlan(f"{name} is {size}; expected a positive number, or none to leave it to the search")
        if self.zero is not None and not 0 <= self.zero <= 3:
            raise InfeasiblePlan(f"zero is {self.zero}; expected 0, 1, 2 or 3")
        for role in self.experts_within:
            if role not in ("tp", "cp") or (self.degree(role) or 1) == 1:
                raise InfeasiblePlan(
                    f"experts_within names {role!r}; expected 'tp' or 'cp', of more than one rank.\n"
                    "  try: pin its degree, as in tp=2"
                )
        self._check_shard(num_gpus)
        if self.sequence_layout not in (None, *get_args(SequenceLayout)):
            raise InfeasiblePlan(
                f"sequence_layout is {self.sequence_layout!r}; expected {' or '.join(get_args(SequenceLayout))}"
            )
        self._check_schedule()
        if self.fit_probability is not None and not 0 < self.fit_probability < 1:
            raise InfeasiblePlan(f"fit_probability is {self.fit_probability}; expected a number between 0 and 1")
        if self.activation_memory is not None and self.activation_memory <= 0:
            raise InfeasiblePlan(f"activation_memory is {self.activation_memory}; expected bytes above 0")
        if isinstance(self.remat, float) and not 0 <= self.remat <= 1:
            raise InfeasiblePlan(f"remat is {self.remat}; expected a level, or a share between 0 and 1")
        if any(count < 0 for workload in self.expert_load for count in workload):
            raise InfeasiblePlan("expert_load has negative counts; expected tokens of each expert")
        if self.expert_capacity is not None and self.expert_capacity <= 0:
            raise InfeasiblePlan(f"expert_capacity is {self.expert_capacity}; expected a number above 0")
        if self.num_microbatches is not None and self.microbatch_size is not None:
            dp = self.degree("dp")
            if dp is not None and self.num_microbatches * self.microbatch_size * dp != batch_size:
                raise InfeasiblePlan(
                    f"{self.num_microbatches} microbatches of {self.microbatch_size} samples on {dp} data-parallel "
                    f"ranks make {self.num_microbatches * self.microbatch_size * dp} samples; the global batch has "
                    f"{batch_size}.\n  try: give only one of num_microbatches and microbatch_size"
                )
        if self.axes is not None:
            ranks = (self.pp or 1) * prod(axis.size for axis in self.axes)
            if ranks != num_gpus:
                names = ", ".join(f"{axis.name}={axis.size}" for axis in self.axes)
                raise InfeasiblePlan(f"the mesh (pp={self.pp or 1}, {names}) has {ranks} ranks; there are {num_gpus}")
        else:
            self._check_degrees(num_gpus)
        dp = self.degree("dp") or 1
        pieces = dp * (self.num_microbatches or 1) * (self.microbatch_size or 1)
        if batch_size % pieces:
            parts = [f"dp={dp}"] if dp > 1 else []
            if self.num_microbatches:
                parts.append(f"num_microbatches={self.num_microbatches}")
            if self.microbatch_size:
                parts.append(f"microbatch_size={self.microbatch_size}")
            raise InfeasiblePlan(
                f"the global batch of {batch_size} does not divide by {' * '.join(parts)} = {pieces}.\n"
                f"  try: a batch of {-(-batch_size // pieces) * pieces}, or smaller degrees"
            )

    def _check_schedule(self) -> None:
        """Contradictions that hold for every plan; with what is open taken as it suits the schedule best."""
        if not self.schedules or set(self.schedules) - set(SEARCHED):
            raise InfeasiblePlan(
                f"schedules: {', '.join(map(repr, self.schedules)) or 'none'}; the search tries some of "
                f"{', '.join(SEARCHED)}.\n  try: names of these, or schedule=... for one of the others"
            )
        if self.schedule is not None and self.schedule != FOUND:
            least, _ = virtual_stages_of(self.schedule)
            ranks, virtual = self.pp or 2, self.virtual_stages or least
            count = self.num_microbatches or 2 * ranks
            obstacle = Pipelining(self.schedule, ranks, count, virtual).obstacle()
            if obstacle is not None:
                raise InfeasiblePlan(f"schedule: {obstacle}")
        elif self.virtual_stages is not None and self.virtual_stages > 1 and self.pp == 1:
            raise InfeasiblePlan(
                f"virtual_stages is {self.virtual_stages}, but there is no pipeline.\n"
                "  try: --pp 2, or no virtual stages"
            )

    def shapes(
        self,
        num_ranks: int,
        num_microbatches: int,
        block_counts: tuple[int, ...],
    ) -> tuple[Pipelining, ...]:
        """Schedules to consider for a pipeline of ``num_ranks``, the plainest first.

        block_counts: instances of each distinct block, of which a stage has one at least. GPipe is not among them
        unless it is pinned, as 1F1B takes the same time in less memory. Of a single microbatch, schedules with the same
        passes as one before them are left out.
        """
        names: tuple[Schedule, ...] = self.schedules if num_ranks > 1 else ("1f1b",)
        if self.schedule == FOUND:
            names = tuple(name for name in names if splits_backward(name)) or names
        elif self.schedule is not None:
            names = (self.schedule,)
        sizes = even_virtual_stages(block_counts, num_ranks) if self.virtual_stages is None else (self.virtual_stages,)
        found: list[Pipelining] = []
        for name in names:
            for size in sizes:
                shape = Pipelining(name, num_ranks, num_microbatches, size)
                possible = shape.num_stages <= sum(block_counts) and shape.obstacle() is None
                if not possible:
                    continue
                if num_microbatches > 1 or all(shape.orders() != other.orders() for other in found):
                    found.append(shape)
        return tuple(found)

    def _check_degrees(self, num_gpus: int) -> None:
        pinned = {name: getattr(self, name) for name in ("pp", *ROLES) if getattr(self, name) is not None}
        ranks = prod(pinned.values())
        text = " * ".join(f"{name}={size}" for name, size in pinned.items())
        text += f" = {ranks}" if len(pinned) > 1 else ""
        if num_gpus % ranks:
            raise InfeasiblePlan(
                f"{text} does not divide the {num_gpus} ranks.\n  try: degrees whose product divides {num_gpus}"
            )
        if len(pinned) == 1 + len(ROLES) and ranks != num_gpus:
            raise InfeasiblePlan(f"{text}, but there are {num_gpus} ranks.\n  try: leave one degree to the search")

    def zero_stages(self) -> tuple[int, ...]:
        """ZeRO stages above 0 to consider."""
        if self.reshard_after_forward is False:
            return (3,)
        return (1, 2, 3) if self.zero is None else (self.zero,) if self.zero else ()

    def may_be_whole(self) -> bool:
        """Whether nothing that is pinned needs ZeRO."""
        return self.shard in (None, 1) and self.reshard_after_forward is not False and not self.offload

    def _check_shard(self, num_gpus: int) -> None:
        if self.offload and self.zero == 0:
            raise InfeasiblePlan("offload moves what ZeRO shards, and zero is 0.\n  try: --zero 1, 2 or 3")
        if self.reshard_after_forward is False and self.zero not in (None, 3):
            raise InfeasiblePlan(f"reshard_after_forward is about ZeRO-3, and zero is {self.zero}.\n  try: --zero 3")
        if self.shard is None:
            return
        if self.zero == 0:
            raise InfeasiblePlan(f"shard is {self.shard}, but there is nothing to shard at zero 0.\n  try: --zero 1")
        ranks = num_gpus // (self.pp or 1)
        if ranks % self.shard:
            raise InfeasiblePlan(f"shard is {self.shard}, which does not divide the {ranks} ranks of a stage")

    def may(self, axis: str, role: str) -> bool:
        """Whether an op may play ``role`` ("dp", "cp", "ep", "tp") on an axis of this name."""
        kind = role_of_axis(axis)
        if kind == "dp":
            return role == "dp"
        if kind == "tp":
            return role in ("tp", "ep") or (role == "cp" and self.sequence_parallel is not False)
        if kind == "cp":
            return role == "cp"
        if kind == "ep":
            return role in ("ep", "dp")
        if role == "cp":
            allowed = not self.pins("cp") or not self.pins("tp")
            return allowed and self.sequence_parallel is not False
        return not self.pins(role)

    def may_spread_over(self, role: str) -> bool:
        """Whether experts may be on axes of ``role`` too: where asked for, or where no degree says on how many ranks
        they are."""
        return role in self.experts_within or self.ep is None

    def meshes(self, size: int, gpus_per_node: int | None = None, max_free: int = 2) -> tuple[Mesh, ...]:
        """Stage meshes of ``size`` ranks to consider: pinned axes, and up to ``max_free`` free ones between them.

        Free axes are called ``free0``, ``free1``; they come after dp and before the pinned inner axes. gpus_per_node:
        if given, a pinned dp is also divided into the part inside a node and the part across.
        """
        if self.axes is not None:
            mesh = Mesh(tuple(axis for axis in self.axes if axis.size > 1))
            return (mesh,) if mesh.size == size else ()
        pinned = self.pinned_axes()
        rest, remainder = divmod(size, prod(axis.size for axis in pinned))
        if remainder or (rest > 1 and all(self.pins(role) for role in ROLES)):
            return ()
        inner = tuple(axis for axis in pinned if axis.name != "dp")
        free = max(1, max_free - len(pinned))
        found = []
        for outer in self._data_axes(gpus_per_node):
            for sizes in factorisations(rest, free):
                axes = tuple(MeshAxis(f"free{number}", n) for number, n in enumerate(sizes))
                found.append(Mesh((*outer, *axes, *inner)))
        return tuple(found)

    def _data_axes(self, gpus_per_node: int | None) -> list[tuple[MeshAxis, ...]]:
        """A pinned dp as one axis, and divided for hybrid sharding."""
        dp = self.dp or 1
        if dp == 1:
            return [()]
        whole = (MeshAxis("dp", dp),)
        inside = self.shard
        if inside is None and gpus_per_node is not None:
            inside = gpus_per_node // prod(axis.size for axis in self.pinned_axes() if axis.name != "dp")
        if self.zero == 0 or inside is None or not 1 < inside < dp or dp % inside:
            return [whole]
        divided = (MeshAxis("dp_replicate", dp // inside), MeshAxis("dp_shard", inside))
        return [divided] if self.shard is not None else [whole, divided]

    def shard_axes(self, mesh: Mesh) -> Iterator[tuple[int, ...]]:
        """Sets of mesh axes that ZeRO may shard over, those of the most axes first."""
        able = [
            axis
            for axis, name in enumerate(mesh.names)
            if role_of_axis(name) != "tp"
            and not name.startswith("dp_replicate")
            and (self.may(name, "dp") or self.may(name, "cp"))
        ]
        for count in range(len(able), 0, -1):
            for axes in combinations(able, count):
                if self.shard in (None, prod(mesh.axes[axis].size for axis in axes)):
                    yield axes


def role_of_axis(name: str) -> str:
    """Role that an axis name promises: ``dp``, ``dp2`` and ``dp_shard`` play dp; "" for a free name."""
    for role in ROLES:
        rest = name.removeprefix(role)
        if rest != name and (not rest or not rest[0].isalpha()):
            return role
    return ""


@lru_cache(maxsize=1024)
def even_virtual_stages(block_counts: tuple[int, ...], num_ranks: int) -> tuple[int, ...]:
    """Numbers of virtual stages a rank to consider, ascending: 1, and those that divide all blocks, or the repeats of
    one, most evenly.

    For n blocks on P ranks, at most b in a stage, that is v = ⌈n / (P b)⌉: with more virtual stages a rank has more of
    stages that are no shorter. O(n / P).
    """
    most = max(1, sum(block_counts) // num_ranks)
    found = {
        -(-number // (num_ranks * blocks))
        for number in {sum(block_counts), *block_counts}
        for blocks in range(1, -(-number // num_ranks) + 1)
    }
    return tuple(sorted({1} | {size for size in found if size <= most}))


def divisors(number: int) -> tuple[int, ...]:
    """All divisors, ascending."""
    return tuple(d for d in range(1, number + 1) if number % d == 0)


def factorisations(number: int, parts: int) -> tuple[tuple[int, ...], ...]:
    """``number`` as an ordered product of at most ``parts`` factors above 1; ``((),)`` for 1."""
    if number == 1:
        return ((),)
    found: list[tuple[int, ...]] = [(number,)]
    if parts > 1:
        for first in divisors(number)[1:-1]:
            found.extend((first, *rest) for rest in factorisations(number // first, parts - 1))
    return tuple(found)
