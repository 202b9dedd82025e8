"""The space of the outer search: pipeline degrees, stage meshes, microbatches, ZeRO; and the baselines in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, product
from math import gcd, prod
from typing import Any

from autopar.ir.mesh import Mesh, MeshAxis
from autopar.ir.offload import Offload
from autopar.search.outer.configuration import Configuration
from autopar.search.outer.configuration_solver import Solver
from autopar.search.problem.allowed_choices import divides_experts_axes
from autopar.search.problem.constraints import ROLES, Constraints, divisors, role_of_axis

# Roles between which ranks move, from a baseline of a model with experts to the next.
_MOVES = (
    ("dp", "ep"), ("ep", "dp"), ("ep", "tp"), ("tp", "ep"), ("dp", "tp"), ("tp", "dp"), ("dp", "cp"), ("cp", "dp"),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Configurations that ``constraints`` leave open. offload: where tensors that ZeRO shards are."""

    solver: Solver
    constraints: Constraints
    offload: Offload = Offload.NONE

    def nodes(self) -> Iterator[tuple[int, Mesh]]:
        """Pipeline degrees and stage meshes. Inside a node, free axes in another order are the same mesh."""
        num_gpus, num_blocks = self.solver.cluster.num_gpus, self.solver.workload.num_blocks
        for num_stages in divisors(num_gpus) if self.constraints.pp is None else (self.constraints.pp,):
            if num_stages <= num_blocks and num_gpus % num_stages == 0:
                for mesh in self.constraints.meshes(num_gpus // num_stages):
                    if not self._permuted(mesh):
                        yield num_stages, self._with_data(mesh)

    def _with_data(self, mesh: Mesh) -> Mesh:
        """A mesh with an axis of one rank for ZeRO, which is what offloads, where there is none to shard over."""
        if not self.offload or any(self.constraints.shard_axes(mesh)):
            return mesh
        return Mesh((MeshAxis("dp", 1), *mesh.axes))

    def _permuted(self, mesh: Mesh) -> bool:
        """Whether a mesh inside a node has free axes in another order than the one that is tried."""
        free = [axis.size for axis in mesh.axes if not role_of_axis(axis.name)]
        inside = self.solver.cluster.gpus_per_node % mesh.size == 0
        return self.constraints.axes is None and inside and free != sorted(free)

    def microbatches(self, mesh: Mesh, constraints: Constraints) -> tuple[int, ...]:
        """Numbers of microbatches to consider, ascending."""
        batch = self.solver.batch_size
        dividing = ("dp", "ep") if divides_experts_axes(batch, mesh, constraints) else ("dp",)
        pinned = 1
        for axis in mesh.axes:
            if role_of_axis(axis.name) in dividing:
                pinned *= axis.size
        if self.solver.workload.analysis.obstacle is not None:
            options: tuple[int, ...] = (1,)
        elif constraints.num_microbatches is not None:
            options = (constraints.num_microbatches,)
        else:
            options = divisors(batch)
        kept = [m for m in options if batch % (m * pinned) == 0]
        if constraints.microbatch_size is not None:
            size = constraints.microbatch_size
            kept = [m for m in kept if batch % (m * size) == 0 and mesh.size % (batch // (m * size)) == 0]
        return tuple(kept)

    def roots(self, num_stages: int, mesh: Mesh, num: int, constraints: Constraints) -> Iterator[Configuration]:
        """The configuration without ZeRO, under the plainest schedule; none if there is no schedule for it."""
        root = Configuration(
            num_stages=num_stages,
            mesh=mesh,
            num_microbatches=num,
            zero=0,
            data_axes=(),
            constraints=constraints,
        )
        for shape in self.solver.shapes(root)[:1]:
            yield replace(root, schedule=shape.schedule, virtual_stages=shape.virtual_stages)

    def near(self, configuration: Configuration) -> Iterator[Configuration]:
        """The same configuration with the next fewer and the next more microbatches."""
        options = self.microbatches(configuration.mesh, configuration.constraints)
        place = options.index(configuration.num_microbatches)
        for num in (*options[max(0, place - 1) : place], *options[place + 1 : place + 2]):
            for root in self.roots(configuration.num_stages, configuration.mesh, num, configuration.constraints):
                yield replace(root, zero=configuration.zero, data_axes=configuration.data_axes, offload=self.offload)

    def variants(self, root: Configuration) -> Iterator[Configuration]:
        """``root`` with each ZeRO stage and set of data axes, the cheapest in time first."""
        mesh, constraints = root.mesh, root.constraints
        for batch_axes in self.batch_axes(root):
            base = replace(root, batch_axes=batch_axes)
            sharded = False
            for axes in constraints.shard_axes(mesh):
                sharded = True
                for zero_stage in constraints.zero_stages():
                    if not (zero_stage == 2 and root.num_microbatches == 1 and constraints.zero is None):
                        yield replace(base, zero=zero_stage, data_axes=axes, offload=self.offload)
            if self.may_be_whole() and (constraints.zero in (None, 0) or not sharded):
                yield base

    def may_be_whole(self) -> bool:
        """Whether the space has configurations without ZeRO."""
        return self.constraints.may_be_whole() and not self.offload

    def batch_axes(self, root: Configuration) -> list[tuple[int, ...] | None]:
        """Sets of axes that divide the inputs, if the microbatch size is pinned; else [None]: left open."""
        size = root.constraints.microbatch_size
        if size is None:
            return [None]
        degree = self.solver.batch_size // (root.num_microbatches * size)
        found: list[tuple[int, ...] | None] = []
        for number in range(len(root.mesh) + 1):
            for axes in combinations(range(len(root.mesh)), number):
                product = 1
                for axis in axes:
                    product *= root.mesh.axes[axis].size
                respects_roles = all(axis in axes for axis, n in enumerate(root.mesh.names) if role_of_axis(n) == "dp")
                able = all(root.constraints.may(root.mesh.names[axis], "dp") for axis in axes)
                if product == degree and respects_roles and able:
                    found.append(axes)
        return found

    def baselines(self) -> Iterator[Configuration]:
        """DDP, FSDP, and tensor or expert parallelism with pipelines and data parallelism outside; context parallelism
        where a batch has fewer rows than that asks for.

        All are in the space; with their axes' roles given they are solved fast, and their step times exclude most of
        it.
        """
        given = self.constraints
        if given.axes is not None or given.microbatch_size is not None:
            return
        num_gpus, node = self.solver.cluster.num_gpus, self.solver.cluster.gpus_per_node
        for num_stages in divisors(num_gpus) if given.pp is None else (given.pp,):
            if num_stages > self.solver.workload.num_blocks:
                continue
            size = num_gpus // num_stages
            for tensor in divisors(min(size, node)) if given.tp is None else (given.tp,):
                for experts, within in self._expert_degrees(size, tensor):
                    inner = tensor * experts
                    if size % inner or (given.dp or size // inner) * inner != size or (given.cp or 1) > 1:
                        continue
                    data = size // inner
                    short = given.dp is None and given.cp is None and experts == 1
                    rows_for = gcd(data, self.solver.batch_size) if short else data
                    if "cp" in within and not self._may_hold(data // rows_for):
                        continue
                    constraints = replace(
                        given,
                        pp=num_stages,
                        dp=rows_for,
                        tp=tensor,
                        cp=data // rows_for,
                        ep=experts,
                        experts_within=within,
                    )
                    for mesh in constraints.meshes(size, node if given.dp is None and experts == 1 else None):
                        # The dense part divides the batch over the ranks of the experts too.
                        rows = self.solver.batch_size // (rows_for * experts)
                        options = self.microbatches(mesh, constraints)
                        dividing = tuple(num for num in options if rows and rows % num == 0)
                        for num in self._few(dividing or options, num_stages):
                            yield from self.roots(num_stages, mesh, num, constraints)

    def with_roles(self) -> Iterator[Configuration]:
        """Every pipeline degree, stage mesh whose axes have one role each, and number of microbatches."""
        given = self.constraints
        if given.axes is not None or given.microbatch_size is not None:
            return
        num_gpus, has_experts = self.solver.cluster.num_gpus, bool(self.solver.workload.expert_factors)
        for num_stages in divisors(num_gpus) if given.pp is None else (given.pp,):
            if num_stages > self.solver.workload.num_blocks:
                continue
            size = num_gpus // num_stages
            for dp, tp, cp, ep in product(divisors(size), repeat=4):
                degrees: dict[str, Any] = {"dp": dp, "tp": tp, "cp": cp, "ep": ep}
                pinned = all(getattr(given, role) in (None, degree) for role, degree in degrees.items())
                if dp * tp * cp * ep != size or not pinned or (ep > 1 and not has_experts):
                    continue
                for within in self._within(degrees) if has_experts else ((),):
                    constraints = replace(given, pp=num_stages, experts_within=within, **degrees)
                    for mesh in constraints.meshes(size):
                        for num in self.microbatches(mesh, constraints):
                            yield from self.roots(num_stages, mesh, num, constraints)

    def _within(self, degrees: dict[str, int]) -> tuple[tuple[str, ...], ...]:
        """The axes beside their own that experts may be asked to be spread over."""
        if self.constraints.ep is not None:
            return (self.constraints.experts_within,)
        ways: tuple[tuple[str, ...], ...] = ((), ("tp",), ("cp",), ("tp", "cp"))
        return tuple(
            axes
            for axes in ways
            if all(degrees[axis] > 1 for axis in axes)
            and (not axes or self._may_hold(degrees["ep"] * prod(degrees[axis] for axis in axes)))
        )

    def _expert_degrees(self, size: int, tensor: int) -> list[tuple[int, tuple[str, ...]]]:
        """Degrees of expert parallelism on ``size`` ranks: none, the most inside a node, the most of all, and none but
        on context ranks. Beside tensor parallelism there are more in ``regrouped``."""
        given, workload = self.constraints, self.solver.workload
        if given.ep is not None:
            return [(given.ep, given.experts_within)]
        if not workload.experts:
            return [(1, ())]
        possible = [e for e in divisors(min(workload.experts)) if size % e == 0 and tensor == 1]
        inside = [e for e in possible if e <= self.solver.cluster.gpus_per_node]
        own = sorted({few[-1] for few in (inside, possible) if few} - {1})
        return [(1, ()), (1, ("cp",)), *((degree, ()) for degree in own)]

    def regrouped(self, baseline: Configuration) -> Iterator[Configuration]:
        """A baseline of a model with experts with half of the ranks of one role, or twice as many, in another; experts
        beside tensor and context parallelism are spread over those ranks too. Without ZeRO."""
        given, own = self.constraints, baseline.constraints
        if given.ep is not None or not self.solver.workload.experts:
            return
        for taken, grown in _MOVES:
            degrees: dict[str, Any] = {role: getattr(own, role) or 1 for role in ROLES}
            free = getattr(given, taken) is None and getattr(given, grown) is None
            if not free or degrees[taken] % 2:
                continue
            degrees[taken] //= 2
            degrees[grown] *= 2
            within = tuple(role for role in ("tp", "cp") if degrees[role] > 1 and (role == "cp" or degrees["ep"] > 1))
            if degrees["tp"] > self.solver.cluster.gpus_per_node or not self._may_hold(
                degrees["ep"] * prod(degrees[role] for role in within)
            ):
                continue
            constraints = replace(own, experts_within=within, **degrees)
            for mesh in constraints.meshes(baseline.mesh.size):
                if baseline.num_microbatches in self.microbatches(mesh, constraints):
                    yield from self.roots(baseline.num_stages, mesh, baseline.num_microbatches, constraints)

    def _may_hold(self, ranks: int) -> bool:
        """Whether the experts of every layer divide over ``ranks``, of which there are several."""
        return ranks > 1 and all(count % ranks == 0 for count in self.solver.workload.experts)

    def with_zero(self, root: Configuration) -> list[Configuration]:
        """A baseline at every ZeRO stage, the one with the least memory last."""
        data = next(root.constraints.shard_axes(root.mesh), ())
        if not data or not root.constraints.zero_stages():
            return [replace(root, zero=root.constraints.zero or 0)] if self.may_be_whole() else []
        zero_stages = root.constraints.zero_stages()
        return [replace(root, zero=zero_stage, data_axes=data, offload=self.offload) for zero_stage in zero_stages]

    def _few(self, options: tuple[int, ...], num_stages: int) -> tuple[int, ...]:
        """Numbers of microbatches worth trying first: around eight for each stage, and four times that."""
        if num_stages == 1:
            return options[:4]
        wanted = (8 * num_stages, 32 * num_stages)
        return (
            tuple(dict.fromkeys(min(options, key=lambda m: (abs(m - goal), m)) for goal in wanted)) if options else ()
        )

    def plain(self, root: Configuration) -> list[Configuration]:
        """A baseline whose ranks are all data parallel, at the ZeRO stage with the least memory (FSDP) and, on one
        axis, without any (DDP)."""
        if root.num_stages > 1 or any(role_of_axis(name) != "dp" for name in root.mesh.names):
            return []
        possible = len(root.mesh) == 1 and self.constraints.zero in (None, 0) and self.may_be_whole()
        return [*self.with_zero(root)[-1:], *([replace(root, zero=0)] if possible else [])]
