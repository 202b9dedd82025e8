"""The model of the pictures with costs: Llama 3 70B at its true size, in normal form."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from autopar.ir.capture.capture import capture
from autopar.ir.graph import CapturedModel
from autopar.load_model import load_model_file
from autopar.passes.normalise import normalise

ROOT = Path(__file__).parents[2]
BATCH, LENGTH = 512, 4096


@cache
def llama() -> CapturedModel:
    """On a global batch of 512 sequences of 4,096 tokens."""
    source = load_model_file(str(ROOT / "examples" / "llama3_70b.py"))
    return normalise(capture(source.meta_model(), source.meta_inputs(BATCH, LENGTH), name="Llama 3 70B"))
