"""What a published run says of itself: the shape of its model, its cluster, its plan and its figure.

A row that leaves open what a prediction needs raises ``Missing``. What of a plan can be searched for is not needed: how
model parallelism is split into tensors and stages, virtual stages, the size of a microbatch (``Row.unprinted``).
Nothing depends on the name of a row; on that of its model sizes that are not printed, and what its recipes switch on
(``published_sources.py``).
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from autopar.cost_model.catalogue import find_gpu
from autopar.cost_model.stacks.stack import Stack
from autopar.ir.plan import Precision, Recipe
from autopar.ir.rematerialisation import Level
from autopar.search.problem.constraints import Constraints
from benchmarks.published_sources import Source

GIB = 2**30
PRECISIONS: dict[str, Precision] = {"fp16": "fp16", "bf16": "bf16", "16bit": "bf16", "fp32": "fp32"}
# Words of a precision in narrow floats -> recipe of its products, the first that fits; all else is in bfloat16. Tables
# of Megatron-Bridge and NeMo say "cs" for current scaling, "mx" for microscaling, "sc" for subchannels: tiles.
RECIPES: dict[str, Recipe] = {
    "nvfp4": "nvfp4",
    "mx": "mxfp8",
    "block": "fp8-block",
    "-sc": "fp8-block",
    "row": "fp8-row",
    "fp8": "fp8-tensor",
}
# How a row says that the state of data-parallel ranks is divided -> ZeRO stage; and over how many of them.
ZERO = {"": 0, "none": 0, "ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3, "fsdp": 3, "hsdp": 3}
SHARD_GROUP = re.compile(r"[Ss]hard group (\d+)")
# Of a vocabulary that is not printed (GPT-2's, padded), where it is under 1 % of the parameters.
USUAL_VOCABULARY = 51_200
# Parameters that a shape has may differ from those printed by this share: positions, biases, rounding.
ALIKE = 0.12
# By this, with a vocabulary that is not printed.
ADDS_UP = 0.04
# By more than this where the model is of a rarer shape, with tied embeddings or two matrices beside rotary positions.
USUAL = 0.05

# plain: two matrices in the MLP, learned positions, tied embeddings. ungated: two, rotary positions. gated: three, and
# rotary positions; tied: the same with tied embeddings. experts: gated ones.
Shape = Literal["plain", "ungated", "gated", "tied", "experts"]
# Models with sizes that a row does not print: of heads, of experts and dense layers, of low ranks.
NAMED = ("deepseek-v3", "gpt-oss", "qwen3")
# How the notes of a row say that it is of the run of another.
SAME_RUN = re.compile(r"same run as ([\w.-]+)")
# What a printed peak may be of.
DEFINITIONS = ("allocated", "reserved", "nvidia-smi")
# Those of Zero Bubble's schedules that a plan can have.
SPLIT = {"ZB-1p": "zb-h1", "ZB-2p": "zb-2p", "ZB-V": "zb-v"}
# Schedules of plans that have any number of virtual stages.
VIRTUAL = ("interleaved", "zb-h1", "zb-2p")


class Missing(Exception):
    """A row does not state what a prediction needs."""


@dataclass(frozen=True)
class Row:
    """One published run."""

    cells: dict[str, str]

    def __getattr__(self, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.cells.get(name) or ""

    def number(self, name: str, default: int | None = None) -> int:
        text = self.cells.get(name)
        if not text:
            if default is None:
                raise Missing(name)
            return default
        try:
            return int(text)
        except ValueError:
            raise Missing(f"{name} as a number ({text})") from None

    @property
    def origin(self) -> Source:
        return Source(self.source, self.notes)

    # The figure.

    @property
    def family(self) -> str:
        return self.id.split("-")[0]

    @property
    def is_memory(self) -> bool:
        return self.reported_metric == "peak_memory_gb"

    @property
    def definition(self) -> str:
        """What a printed peak is of: one of ``DEFINITIONS``, or "not stated"."""
        found = [name for name in DEFINITIONS if name in self.notes]
        return found[0] if len(found) == 1 else "not stated"

    @property
    def says_recomputation(self) -> bool:
        """Whether it is known what it recomputed."""
        return bool(self.recompute) or self.origin.keeps_all

    @property
    def tokens(self) -> int:
        return self.number("global_batch") * self.number("seq_len")

    def reported(self) -> float:
        """Seconds a step, or bytes for rows of memory."""
        metric = self.reported_metric
        try:
            value = float(self.reported_value)
        except ValueError:
            raise Missing(f"its figure as a number ({self.reported_value or 'none'})") from None
        if metric == "step_seconds":
            return value
        if metric == "peak_memory_gb":
            return value * GIB
        if metric == "tokens_per_s_per_gpu":
            return self.tokens / (value * self.number("n_gpus"))
        if metric == "tflops_per_gpu":
            return self.flops() / (value * 1e12 * self.number("n_gpus"))
        if metric == "mfu":
            peak = find_gpu(self.gpu).rates["bf16"].peak_tflops.value
            return self.flops() / (value / 100 * peak * 1e12 * self.number("n_gpus"))
        raise Missing(f"a figure that says seconds ({metric})")

    def flops(self) -> float:
        """Floating point operations of a step, as the source counts them."""
        layers, hidden, seq = (self.number(name) for name in ("layers", "hidden", "seq_len"))
        if "HARDWARE" in self.notes:  # Narayanan et al. 2021, equation 3: with recomputation
            shape = 1 + seq / (6 * hidden) + self.vocabulary / (16 * layers * hidden)
            return 96.0 * self.tokens * layers * hidden**2 * shape
        active = self.params or float(self.count(self.shape))
        if self.experts:
            inner = 3 * hidden * self.number("ffn_hidden") * layers
            active = active - (self.number("experts") - self.number("top_k")) * inner
        seen = 2 if self.origin.counts_all_keys else 1
        return self.tokens * (6 * active + 6 * seen * layers * hidden * seq)

    # The model.

    @property
    def params(self) -> float | None:
        return float(self.params_b) * 1e9 if self.params_b else None

    @property
    def kv_heads(self) -> int:
        return self.number("kv_heads", self.number("heads"))

    @property
    def vocabulary(self) -> int:
        """If it is not printed, the usual one where that hardly counts, or the parameters add up with it."""
        if self.vocab or self.params is None:
            return self.number("vocab")
        share = USUAL_VOCABULARY * self.number("hidden") / self.params
        layers = (
            self.number("layers") * (4 * self.number("hidden") + 2 * self.number("ffn_hidden")) * self.number("hidden")
        )
        if share < 0.01 or abs(layers / self.params + share - 1) < ADDS_UP:
            return USUAL_VOCABULARY
        return self.number("vocab")

    def count(self, shape: Shape) -> int:
        """Parameters of a model of the stated sizes, without biases and norms."""
        hidden, heads = self.number("hidden"), self.number("heads")
        attention = 2 * hidden**2 + 2 * hidden**2 * self.kv_heads // heads
        matrices = 2 if shape in ("plain", "ungated") else 3
        mlp = matrices * hidden * self.number("ffn_hidden") * self.number("experts", 1)
        ends = (1 if shape in ("plain", "tied") else 2) * self.vocabulary
        ends += self.number("seq_len") if shape == "plain" else 0
        return self.number("layers") * (attention + mlp) + ends * hidden

    @property
    def shape(self) -> Shape:
        """The kind of model that has as many parameters as the row says."""
        if self.number("hidden") % self.number("heads"):
            raise Missing(f"heads that divide its hidden size ({self.heads}, {self.hidden})")
        usual: tuple[Shape, ...] = ("experts",) if self.experts else ("gated",)
        if not self.experts and self.kv_heads == self.number("heads"):
            usual = ("plain", "gated")
        if self.params is None or self.model.startswith(NAMED):
            return usual[0]
        able: tuple[Shape, ...] = usual if self.experts else (*usual, "tied", "ungated")
        near = {shape: abs(self.count(shape) / self.params - 1) for shape in able}
        best = min(usual, key=near.__getitem__)
        if near[best] > USUAL:
            best = min(able, key=near.__getitem__)
        if near[best] > ALIKE:
            raise Missing(f"sizes that add up to its parameters ({self.count(best) / 1e9:.4g}b of {self.params_b}b)")
        return best

    @property
    def hides_dispatch(self) -> bool:
        """Whether it is a recipe whose dispatch runs beside another microbatch: without dropped tokens, between nodes
        of eight, in virtual stages (moe_a2a_overlap in scripts/performance of Megatron-Bridge). Racks do without."""
        whole = self.whole_experts and "tokendrop" not in self.notes
        return whole and self.number("vpp", 1) > 1 and self.devices_of_node == 8

    @property
    def devices_of_node(self) -> int:
        return int(find_gpu(self.gpu).gpus_per_node.value)

    @property
    def dropout(self) -> float:
        return self.origin.dropout(self.model)

    @property
    def stack(self) -> Stack:
        by_row = self.recipe == "fp8-row"
        return self.origin.stack(self.model, by_row=by_row, hides_dispatch=self.hides_dispatch)

    # The plan.

    @property
    def model_parallel(self) -> int:
        """Ranks over which one copy of the model is divided by tensors and stages."""
        return self.number("n_gpus") // (self.number("dp") * self.number("cp", 1))

    @property
    def unprinted(self) -> tuple[str, ...]:
        """What of the plan is left open."""
        found = []
        if self.model_parallel > 1:
            found += [name for name in ("tp", "pp") if not getattr(self, name)]
            pipelined = self.number("pp", 2) > 1
            found += ["vpp"] if pipelined and "interleaved" in self.schedule and not self.vpp else []
        if not self.micro_batch and (found or self.number("pp", 1) == 1):
            found.append("micro_batch")
        return tuple(found)

    @property
    def whole_experts(self) -> bool:
        """Whether expert ranks are taken of tensor ranks as of data ranks, and tokens dispatched to them."""
        return bool(self.experts) and self.origin.whole_experts

    @property
    def expert_ranks(self) -> int:
        """Data ranks that share the experts, those of their tensor ranks aside."""
        experts, tensors = self.number("ep", 1), self.number("tp", 1)
        if not self.whole_experts or experts == 1:
            return experts
        if experts % tensors:
            raise Missing(f"an expert degree that its tensor ranks divide (ep {experts}, tp {tensors})")
        return experts // tensors

    def constraints(self) -> Constraints:
        """The plan; what is not printed is open."""
        if "split into micro-batches" in self.notes and self.number("pp", 1) > 1:
            raise Missing("how many microbatches its local batch is split into")
        if self.is_memory and not self.says_recomputation:
            raise Missing("what it recomputes")
        open_ = self.unprinted
        tp, pp, virtual = (None if name in open_ else self.number(name, 1) for name in ("tp", "pp", "vpp"))
        data, experts = self.number("dp"), self.expert_ranks
        if data % experts:
            raise Missing(f"an expert degree that divides its data ranks (ep {experts}, dp {data})")
        count = None
        if "micro_batch" not in open_:
            count = self.number("global_batch") // (data * self.number("micro_batch", 1))
        schedule: Any = None
        if pp is not None and pp > 1:
            schedule = "interleaved" if virtual != 1 else "1f1b"
            if self.schedule.startswith("ZB"):
                if self.schedule not in SPLIT:
                    raise Missing(f"a schedule that plans have ({self.schedule})")
                schedule = SPLIT[self.schedule]
        return Constraints(
            tp=tp,
            pp=pp,
            cp=self.number("cp", 1),
            ep=experts,
            dp=data // experts,
            sequence_parallel=self.sequence_parallel if tp != 1 else None,
            num_microbatches=count,
            precision=self.dtype,
            recipes=(self.recipe,),
            remat=self.remat(),
            schedule=schedule,
            shard=self.shard,
            virtual_stages=virtual if schedule in VIRTUAL else None,
            **self.zero(),
        )

    @property
    def sequence_parallel(self) -> bool:
        """Whether it is printed, or, where nothing is, the recipes of the row's source have it on."""
        return self.sp == "1" or (not self.sp and self.origin.shares_sequences)

    @property
    def dtype(self) -> Precision:
        if self.recipe is not None:
            return "bf16"
        name = self.precision.split()[0] if self.precision else ""
        if not name and self.is_half:
            name = "16bit"
        if name not in PRECISIONS:
            known = (*PRECISIONS, *dict.fromkeys(RECIPES.values()))
            raise Missing(f"a precision of {', '.join(known)} ({name or 'none'})")
        return PRECISIONS[name]

    @property
    def recipe(self) -> Recipe | None:
        """Of narrow floats: of 8-bit ones by tensor unless it says otherwise."""
        if "fp8" not in self.precision and "fp4" not in self.precision:
            return None
        return next((recipe for word, recipe in RECIPES.items() if word in self.precision), None)

    @property
    def is_half(self) -> bool:
        """Whether its figure is above all that float32 can do on its devices; of memory, which does not say, it is."""
        if self.is_memory:
            return True
        rate = self.flops() / (self.reported() * self.number("n_gpus"))
        return rate > find_gpu(self.gpu).rates["fp32"].peak_tflops.value * 1e12

    @property
    def shard(self) -> int | None:
        """Ranks that FSDP shards over, where that is printed."""
        found = SHARD_GROUP.search(self.notes)
        return int(found[1]) if found and self.number("pp", 1) == 1 else None

    def zero(self) -> dict[str, Any]:
        """In a pipeline FSDP gathers each stage once a step, adds up its gradients whole and scatters them once
        (torch.distributed.pipelining, and torchtitan does not reshard there): that is ZeRO-1 here."""
        kind = self.zero_stage_or_fsdp
        if kind.startswith("fsdp") and self.number("pp", 1) > 1:
            return {"zero": 1}
        if "no reshard" in kind:
            return {"zero": 3, "reshard_after_forward": False}
        if kind not in ZERO:
            raise Missing(f"how it divides the state of data-parallel ranks ({kind})")
        return {"zero": ZERO[kind]}

    def remat(self) -> Level:
        """Megatron's "selective" recomputes attention scores alone. Fused attention never keeps them; beside attention
        spelt out, ours mostly recomputes that. Torchtitan's keeps every second product."""
        levels: dict[str, Level] = {"full": "full", "selective (op)": "alternate"}
        if self.origin.selects_products:
            levels["selective"] = "alternate"
        elif not self.origin.fused_attention:
            levels["selective"] = "selective"
        return levels.get(self.recompute, "none")

    @property
    def sparing(self) -> dict[str, Any]:
        """Constraints that take least memory, of those that the row leaves open."""
        found: dict[str, Any] = {} if self.says_recomputation else {"remat": "full"}
        if not self.sp and self.number("tp", 1) > 1:
            found["sequence_parallel"] = True
        if not self.zero_stage_or_fsdp and self.number("dp") > 1:
            found["zero"] = 1
        return found


def read_rows(path: Path) -> list[Row]:
    """The rows of a ``runs.csv``; one that is of the run of another has the notes of that too."""
    every = list(csv.DictReader(path.open()))
    notes = {cells["id"]: cells["notes"] for cells in every}
    return [
        Row(
            {
                **cells,
                "notes": "; ".join([cells["notes"], *(notes.get(n, "") for n in SAME_RUN.findall(cells["notes"]))]),
            }
        )
        for cells in every
    ]
