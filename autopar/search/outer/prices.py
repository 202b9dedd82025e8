"""What configurations of a workload cost on a cluster, shared by all searches for it: also those for other batches."""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar.cost_model.communication.collectives import Fabric
from autopar.cost_model.compute.documents import Documents
from autopar.cost_model.compute.expert_imbalance import Loads
from autopar.cost_model.hardware.cluster import Cluster
from autopar.ir.mesh import Mesh
from autopar.search.outer.ideal_division import IdealDivision
from autopar.search.pricing.price_cache import MeshPrices, OpPrices
from autopar.search.problem.allowed_choices import Choices
from autopar.search.problem.workload import Workload


@dataclass(slots=True)
class Prices:
    """Prices by the part of the captured batch that a microbatch is, each computed once.

    balanced: the sequence is in zigzag layout where ranks share causal attention. loads: tokens per expert, by layer.
    documents: packed into a row.
    """

    workload: Workload
    cluster: Cluster
    balanced: bool = False
    loads: Loads = ()
    documents: Documents | None = None
    ops: OpPrices = field(init=False)
    ideal: IdealDivision = field(init=False)
    choices: Choices = field(init=False)
    _meshes: dict[tuple[int, ...], MeshPrices] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ops = OpPrices(self.workload, self.cluster, self.balanced, self.loads, self.documents)
        self.ideal = IdealDivision.of(self.ops)
        self.choices = Choices(self.workload)

    def on(self, mesh: Mesh) -> MeshPrices:
        """Prices of communication on a mesh."""
        found = self._meshes.get(mesh.sizes)
        if found is None:
            found = self._meshes[mesh.sizes] = MeshPrices(Fabric(self.cluster, mesh), self.ops.codes.moves(len(mesh)))
        return found
