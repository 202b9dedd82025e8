"""What the source of a published run says of the software that it ran: its year, its stack, what its recipes switch on.

    Source("torchtitan docs/performance.md", "async TP")     .year 24, .stack(..) torchtitan-2024-async-tp

Nothing depends on a row beyond the words of its source and its notes, and what is asked of it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from autopar.cost_model.devices.parts import efa
from autopar.cost_model.hardware.catalogue_entry import Published
from autopar.cost_model.hardware.device import Link
from autopar.cost_model.stacks.known import MEGATRON_CORE_2025, find_stack
from autopar.cost_model.stacks.stack import Stack

# The year of a source, as in "2022", "SC21", "_202412_", a release "24.11" or "arXiv 2205.05198"; of tables that print
# none, that of the software they were made with.
YEAR = re.compile(r"\b(?:20|SC)(\d\d)\b|_20(\d\d)[-\d]|\bv?(\d\d)\.(?:0[1-9]|1[0-2])\b|arXiv (\d\d)\d\d\.")
YEARS = {
    # Its scripts for A100 and H100 (scripts/train/benchmarking) name torch 1.13.1 and 2.0.1, and attention in Triton.
    "mosaicml/llm-foundry": 23,
    # Its first version (arXiv 2401.10241) is of 2023, in a copy of Megatron-LM.
    "Zero Bubble": 23,
    "OPT paper": 22,
    "LLaMA paper": 23,
    "Llama 3 herd": 24,
    # Its commits of these tables are of 2024.
    "torchtitan docs/performance.md": 24,
}
# Words of a source -> the network between its nodes, where it is not the usual one of its GPUs: eight NICs of 400 Gb/s.
NETWORKS = {"nanotron": efa(Published(50, "AWS p5: 32 EFA of 100 Gb/s a node"))}
# The first fused attention was published in May 2022, and training code had it the year after.
LAST_UNFUSED = 22
# The recomputation of a block was a whole forward in Megatron-LM, and in torch until 2.1 of October 2023
# (github.com/pytorch/pytorch, pull request 96866).
LAST_WHOLE = 23
# By row, asynchronous tensor parallelism of early 2025 found no product to put a collective beside
# (github.com/pytorch/pytorch, pull request 149247 and issue 149990).
ASYNCHRONOUS = "async TP"
# Words of a source or its notes -> the software stack that they name, the first that fits. A source that names none ran
# Megatron, of its year: the first of these that is no earlier.
STACKS = {
    ASYNCHRONOUS: "torchtitan-2024-async-tp",
    "eager": "torchtitan-2024-eager",
    "torchtitan": "torchtitan-2024",
    "Zero Bubble": "zero-bubble-2023",
    "nanotron": "nanotron",
    "llm-foundry": "llm-foundry-2023",
    "MaxText": "maxtext-2024",
    "PaxML": "maxtext-2024",
    "MT-NLG": "megatron-lm-2021",  # published in 2022, announced with its runs in October 2021
}
# Recipes that turn cuDNN's attention off (NVTE_FUSED_ATTN=0): the default of NeMo's launcher
# (launcher_scripts/conf/config.yaml of NVIDIA/NeMo-Framework-Launcher), and configure.sh of grok1, nemo_megatron and,
# for 340b, nemotron in NVIDIA/dgxc-benchmarking.
FLASH = ("NeMo-Framework-Launcher", "grok1/", "nemo_megatron/", "nemotron/README_340b")
# Recipes of 2024 with cross entropy in one kernel (cross_entropy_loss_fusion in launcher_scripts/conf/training/llama of
# NVIDIA/NeMo-Framework-Launcher for Llama 3.1, and in nemotron4-*-synth.yaml of NVIDIA/dgxc-benchmarking).
FUSED_LOSS = ("dgxc-benchmarking @v24.11.1 llama3.1/", "dgxc-benchmarking @v24.11.1 nemotron/")
# Recipes of GPT-3 with dropout of 0.1 after attention and MLP (hidden_dropout in launcher_scripts/conf/training/gpt3 of
# NVIDIA/NeMo-Framework-Launcher and in nemo_megatron/gpt3_175b_hydra.yaml of NVIDIA/dgxc-benchmarking).
DROPS = ("NeMo", "nemo_megatron/")
MEGATRON = {21: "megatron-lm-2021", 23: "megatron-lm-2022", 24: "megatron-core-2024", 99: "megatron-core-2025"}
# Megatron-Bridge's recipes for these models dispatch tokens by DeepEP (scripts/performance of its repository, by an
# excerpt that may be of a later release).
DISPATCHED_ONCE = ("deepseek-v3",)
# Those recipes give an expert whole to one rank: expert ranks are tensor ranks too (expert_tensor_parallel_size=1), and
# tokens travel to them by an all-to-all (moe_token_dispatcher_type).
WHOLE_EXPERTS = ("Megatron-Bridge",)
# Recipes of NeMo have sequence parallelism on where there are several tensor ranks (sequence_parallel in
# launcher_scripts/conf/training of NVIDIA/NeMo-Framework-Launcher).
SHARES_SEQUENCES = "NeMo"
# Sources that recompute nothing where they do not say so: recompute_layer is off in nanotron's configurations, and Zero
# Bubble's peaks are those of whole activations.
KEEPS_ALL = ("nanotron", "Zero Bubble")
# Sources whose utilisation counts attention to all keys: nanotron's ``get_flops`` (src/nanotron/models/utils_flops.py).
FULL_ATTENTION = ("nanotron",)
# Sources whose "selective" keeps every second product (selective_ac_option is "op" in torchtitan's configurations).
BY_PRODUCT = ("torchtitan",)
# Attention spelt out in products, later than elsewhere: by the memory that Zero Bubble's runs print.
UNFUSED = ("Zero Bubble",)


@dataclass(frozen=True, slots=True)
class Source:
    """Where a run is published. words: of what and where; notes: on the run itself."""

    words: str
    notes: str

    @property
    def year(self) -> int:
        """The last two digits of the latest one that it names; if none, of its software's; else of today's."""
        known = [year for name, year in YEARS.items() if name in self.words]
        return max([int("".join(found)) for found in YEAR.findall(self.words)] or known, default=99)

    @property
    def fused_attention(self) -> bool:
        """Whether its attention is one kernel."""
        return self.year > LAST_UNFUSED and not self._is_of(UNFUSED)

    @property
    def ends_early(self) -> bool:
        """Whether recomputation stops at the last tensor that backward needs."""
        return self.year > LAST_WHOLE

    @property
    def keeps_all(self) -> bool:
        """Whether it recomputes nothing where it does not say so."""
        return self._is_of(KEEPS_ALL)

    @property
    def counts_all_keys(self) -> bool:
        """Whether its utilisation counts attention to all keys."""
        return self._is_of(FULL_ATTENTION)

    @property
    def selects_products(self) -> bool:
        """Whether selective recomputation is of every second product, and not of attention scores."""
        return self._is_of(BY_PRODUCT)

    @property
    def whole_experts(self) -> bool:
        """Whether its experts are not divided among tensor ranks."""
        return self._is_of(WHOLE_EXPERTS)

    @property
    def shares_sequences(self) -> bool:
        """Whether sequence parallelism is on where nothing is printed of it."""
        return SHARES_SEQUENCES in self.words

    def dropout(self, model: str) -> float:
        """Share of what attention and MLP return that is dropped."""
        return 0.1 if model.startswith("gpt3") and self._is_of(DROPS) else 0.0

    @property
    def network(self) -> Link | None:
        """Between its nodes, where that is not the usual one of its devices."""
        found = next((link for words, link in NETWORKS.items() if words in self.words), None)
        return None if found is None else found.link()

    def stack(self, model: str, *, by_row: bool, hides_dispatch: bool) -> Stack:
        """The software stack. by_row: whether products are in 8-bit floats by row. hides_dispatch: whether tokens
        travel to experts beside the compute of another microbatch."""
        said = f"{self.words} {self.notes}"
        if by_row:
            said = said.replace(ASYNCHRONOUS, "")
        megatron = next(stack for year, stack in MEGATRON.items() if self.year <= year)
        if megatron == "megatron-core-2024" and self._is_of(FLASH):
            megatron = "megatron-core-2024-flash"
        if hides_dispatch:
            once = model.startswith(DISPATCHED_ONCE)
            megatron = "megatron-core-2025-deepep" if once else "megatron-core-2025-overlap"
        found = find_stack(next((stack for word, stack in STACKS.items() if word in said), megatron))
        return replace(found, extra_bytes=MEGATRON_CORE_2025.extra_bytes) if self._is_of(FUSED_LOSS) else found

    def _is_of(self, names: tuple[str, ...]) -> bool:
        return any(name in self.words for name in names)
