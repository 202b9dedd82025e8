"""What attention costs where documents are packed into rows, each of which attends to itself alone.

    a row of 8 tokens   0 0 0 1 1 1 1 2      causal: 9/2 + 16/2 + 1/2 pairs of a query and a key, of 64/2

The documents run one after the other (``ir.ops.documents``): each has its own kernels, and its queries, keys and values
are pieces of those of the whole rows. On a GPU one kernel may take all of them (``ir.ops.varlen``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from autopar.cost_model.compute.op_time import OpTime
from autopar.cost_model.hardware.device import Device, MatmulRate
from autopar.ir.lowered.attention import is_attention
from autopar.ir.lowered.shards import arguments
from autopar.ir.ops.varlen import is_for_kernel
from autopar.ir.precision import compute_dtype
from autopar.ir.rules.attention import keys_seen
from autopar.ir.sequence import Sight

# Kernels of one document, forward and backward: the seconds of documents of one token over those of a kernel. Measured
# on a core: 9.2 and 10.7 microseconds, a kernel 3.5.
_KERNELS = (3, 3)
# Passes over results, and over gradients of queries, keys and values: a piece is copied into its row, and the row among
# all rows, each a read and a write.
_COPIES = 4


@dataclass(frozen=True, slots=True)
class Documents:
    """Of some rows. lengths: of documents in tokens, the padding of a row being one, and how many a row has of each."""

    lengths: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> Documents:
        """The mean of some rows of documents, of which there is one."""
        counts = Counter(length for row in rows for length in row)
        return cls(tuple((length, count / len(rows)) for length, count in sorted(counts.items())))

    @property
    def per_row(self) -> float:
        """Documents of a row."""
        return sum(count for _, count in self.lengths)

    @property
    def scores(self) -> float:
        """Pairs of a query and a key of one document in a row, seen or not."""
        return sum(count * length**2 for length, count in self.lengths)

    def work(self, sight: Sight, rate: MatmulRate, head: float) -> tuple[float, float]:
        """Pairs of a query and a key that a row sees, each over the efficiency at the length of its document, forward
        and backward. head: size of a head."""
        forward = backward = 0.0
        for length, count in self.lengths:
            pairs = count * pairs_seen(sight, length)
            rates = rate.attention_rates(length, head, causal=sight.is_causal, window=sight.reach[0])
            forward, backward = forward + pairs / rates[0], backward + pairs / rates[1]
        return forward, backward

    def beside(self, device: Device, rows: float, results: float, operands: float) -> OpTime:
        """Seconds of what runs once for each document of some rows beside its attention. results, operands: bytes of
        results, and of queries, keys and values."""
        return OpTime(
            *(
                device.kernel_launch_s * kernels * rows * self.per_row + device.memory_seconds(_COPIES * copied)
                for kernels, copied in zip(_KERNELS, (results, operands), strict=True)
            )
        )


def keeps_documents_apart(node: fx.Node) -> bool:
    """Whether an attention is told which positions of a row are of one document."""
    return is_attention(node) and arguments(node).get("documents") is not None


def in_one_call(node: fx.Node, device: Device, precision: str) -> bool:
    """Whether one kernel takes all documents of an attention that keeps them apart."""
    given = arguments(node)
    q, v = given["q"].meta["val"], given["v"].meta["val"]
    dtype = compute_dtype(q.dtype, precision)
    plain = given["mask"] is None and given["sinks"] is None
    fits = is_for_kernel(q.shape[3], v.shape[3], dtype, given["kind"], plain=plain, dropout=given["dropout_p"])
    return fits and not device.is_cpu


def scores_counted(sight: Sight, queries: int, keys: int) -> float:
    """Pairs of a row that the rule of an attention counts."""
    return queries * keys_seen(sight.kind, sight.window, keys)


def pairs_seen(sight: Sight, length: int) -> float:
    """Pairs of a query and a key of a document that see each other."""
    if sight.kind in ("full", "mask"):
        return float(length * length)
    window = min(length, sight.window or length) if sight.kind == "sliding" else length
    return window * (length - window / 2)
