"""Experts over more ranks than are left for an axis of their own: over tensor and context ranks too.

``ep`` says over how many ranks the experts are spread. Usually those are an axis of their own, beside dp, cp and tp,
that divides the batch of the dense ops as dp does. Where the ranks do not suffice for that axis, the experts are spread
over tensor ranks, then context ranks, and what of ``ep`` is left is an axis, beside dp if there are ranks for both,
else taken of dp:

    ranks   given                    mesh
    16      tp=2 ep=8                ep=8 tp=2     experts over ep, and as it suits on tp
    8       tp=2 ep=8                ep=4 tp=2     experts over ep and tp
    8       dp=4 tp=2 ep=8           ep=4 tp=2     likewise: dp counts the ranks of ep
    8       cp=2 ep=8                cp=2 ep=4     experts over cp and ep
    8       tp=2 cp=2 ep=8           cp=2 ep=2 tp=2     experts over all
    8       dp=8 ep=8                ep=8          dp counts the ranks of ep

This is how Megatron-LM takes its expert ranks of all others with ``--expert-tensor-parallel-size 1``
(arXiv:2504.14960). Each expert is whole on its rank, and tokens are dispatched to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from autopar.ir.errors import InfeasiblePlan
from autopar.search.problem.constraints import Constraints

_WITHIN: tuple[tuple[str, ...], ...] = (("tp",), ("tp", "cp"), ("cp",))


def spread_experts(given: Constraints, num_gpus: int) -> Constraints:
    """``given`` with ``ep`` as the size of the experts' own axis, and ``experts_within`` the other axes they are on.

    Raises InfeasiblePlan where the experts can be spread over so many ranks in no way.
    """
    if given.axes is not None or given.ep is None or given.ep == 1 or _fits(given, num_gpus):
        return given
    found = next((one for one in _ways(given) if _fits(one, num_gpus)), None)
    if found is None and _fits(replace(given, ep=None), num_gpus):
        others = {name: getattr(given, name) for name in ("pp", "dp", "cp", "tp") if getattr(given, name) is not None}
        text = ", ".join(f"{name}={size}" for name, size in others.items()) or "nothing else"
        able = sorted({size for size in range(2, given.ep) if _able(replace(given, ep=size), num_gpus)})
        raise InfeasiblePlan(
            f"ep={given.ep}: no experts can be spread over {given.ep} of {num_gpus} ranks with {text}.\n"
            "  expected: a divisor of the ranks of a stage, that takes tensor and context ranks whole or not at all\n"
            f"  try: {'--ep ' + ' or '.join(map(str, able[-3:])) if able else '--ep 1'}"
        )
    return found or given


def _able(given: Constraints, num_gpus: int) -> bool:
    return _fits(given, num_gpus) or any(_fits(one, num_gpus) for one in _ways(given))


def _ways(given: Constraints) -> Iterator[Constraints]:
    """The experts over other axes too, those with most data ranks first."""
    assert given.ep is not None
    within = [axes for axes in _WITHIN if all((getattr(given, axis) or 1) > 1 for axis in axes)]
    for axes in within:
        own, rest = divmod(given.ep, prod(getattr(given, axis) for axis in axes))
        if not rest:
            yield replace(given, ep=own, experts_within=axes)
    for axes in ((), *within):
        own, rest = divmod(given.ep, prod(getattr(given, axis) for axis in axes))
        if not rest and given.dp is not None and given.dp % own == 0:
            yield replace(given, ep=own, dp=given.dp // own, experts_within=axes)


def _fits(given: Constraints, num_gpus: int) -> bool:
    """Whether the pinned degrees divide the ranks."""
    degrees = [getattr(given, name) for name in ("pp", "dp", "tp", "cp", "ep")]
    ranks = prod(degree for degree in degrees if degree is not None)
    return num_gpus % ranks == 0 and (None in degrees or ranks == num_gpus)
