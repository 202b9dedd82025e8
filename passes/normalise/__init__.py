"""Normalisation: from what a model's trace says to what the model means.

One rewrite per file. Each recognises a region by what it computes and puts one op in its place, an ATen op
or a composite of ``autopar.ir.ops.composite``, with its own factor rule.
"""

from __future__ import annotations

from collections.abc import Callable

from autopar.ir.graph import CapturedModel
from autopar.passes.contract import Pass
from autopar.passes.normalise.annotations import ReadAnnotations
from autopar.passes.normalise.attention import RecogniseAttention
from autopar.passes.normalise.bags import RecogniseBags
from autopar.passes.normalise.clean_up import CleanUp
from autopar.passes.normalise.creations import DetachCreations
from autopar.passes.normalise.cross_entropy import RecogniseCrossEntropy
from autopar.passes.normalise.eager_attention import FuseEagerAttention
from autopar.passes.normalise.fused import SplitFusedLinear
from autopar.passes.normalise.identity_index import IdentityIndexToView
from autopar.passes.normalise.linear import RecogniseLinear
from autopar.passes.normalise.loss_means import SplitLossMeans
from autopar.passes.normalise.means import SplitMeans
from autopar.passes.normalise.moe import RecogniseMoe
from autopar.passes.normalise.picks import PicksToGather
from autopar.passes.normalise.rms_norm import RecogniseRmsNorm
from autopar.passes.normalise.scatters import ScattersToCat
from autopar.passes.normalise.terms import NumbersToTerms
from autopar.passes.normalise.unflatten import Unflatten
from autopar.passes.normalise.unmerge import UnmergeProducts
from autopar.passes.pipeline import PassReport, run_passes


def normal_form() -> tuple[Pass[CapturedModel], ...]:
    """The rewrites, in an order that their contracts permit. The last joins the views that those before it left."""
    return (
        ReadAnnotations(),
        ScattersToCat(),
        DetachCreations(),
        IdentityIndexToView(),
        PicksToGather(),
        RecogniseBags(),
        RecogniseLinear(),
        Unflatten(),
        UnmergeProducts(),
        CleanUp(),
        SplitFusedLinear(),
        RecogniseRmsNorm(),
        FuseEagerAttention(),
        RecogniseAttention(),
        RecogniseCrossEntropy(),
        SplitLossMeans(),
        RecogniseMoe(),
        SplitMeans(),
        NumbersToTerms(),
        CleanUp(),
    )


def normalise(
    captured: CapturedModel,
    *,
    check: bool = True,
    report: Callable[[PassReport], None] | None = None,
    after: Callable[[str, CapturedModel], None] = lambda name, captured: None,
) -> CapturedModel:
    """A captured model in normal form. check: verify it. report, after: as in ``run_passes``."""
    return run_passes(captured, normal_form(), check=check, report=report, after=after)
