"""What separates two plans: figures, settings, stages, ops."""

from __future__ import annotations

import io

from rich.console import Console

from autopar.ir.plan import Plan
from autopar.report.comparison import comparison, in_words, print_comparison
from tests.report.sample import LAYER, sample_plan


def other_plan() -> Plan:
    """The sample on other axes: the same but for one op, ZeRO, a stage and 0.6 s of communication."""
    plan = sample_plan()
    ops = {
        op: {{"dp": "rows", "tp": "cols"}[axis]: factor for axis, factor in axes.items()} for op, axes in LAYER.items()
    }
    ops["attention_norm/rms_norm"] = {"rows": "b"}
    prediction = plan.prediction
    assert prediction is not None
    spent = {**prediction.breakdown_s, "tp": 1.5}
    layer = plan.blocks[1].model_copy(update={"ops": ops})
    embedding = plan.blocks[0].model_copy(update={"ops": {"embedding/embedding": {"rows": "b", "cols": "v"}}})
    return plan.model_copy(
        update={
            "mesh": {"rows": 2, "cols": 8},
            "inputs": ["rows"],
            "zero": 2,
            "blocks": [embedding, layer, plan.blocks[2]],
            "stages": [plan.stages[0].model_copy(update={"remat": {}}), *plan.stages[1:]],
            "prediction": prediction.model_copy(update={"step_time_s": 10.44, "breakdown_s": spent}),
        }
    )


def test_names_of_axes_do_not_separate_plans_but_what_is_divided_does() -> None:
    found = comparison(sample_plan(), other_plan())
    assert [(own["block"], own["op"]) for own in found["ops"]] == [("layers.*", "attention_norm/rms_norm")]
    assert found["ops"][0]["placements"] == [{"b": 2, "s": 8}, {"b": 2}]
    assert found["settings"]["zero"] == ["1", "2"]
    assert found["same_model"] and found["same_cluster"]
    assert in_words(found, ("a", "b")) == "b takes 600 ms (6.1%) longer: tp +600 ms"
    assert in_words(comparison(other_plan(), sample_plan()), ("b", "a")).startswith("a takes 600 ms (5.7%) less: tp −")


def test_what_is_equal_is_not_printed() -> None:
    out = io.StringIO()
    print_comparison(
        comparison(sample_plan(), other_plan()), ("a.yaml", "b.yaml"), console=Console(file=out, width=140)
    )
    shown = out.getvalue()
    assert "b ÷ 2, s ÷ 8" in shown and "stage 0" in shown and "full 2" in shown
    assert "stage 1" not in shown and "precision" not in shown and "attention.query" not in shown
    out.truncate(0)
    print_comparison(comparison(sample_plan(), sample_plan()), ("a", "b"), console=Console(file=out, width=140))
    assert "b takes as long as a" in out.getvalue() and "every op is placed alike" in out.getvalue()


def test_a_plan_without_a_prediction_and_one_of_another_model() -> None:
    plan = sample_plan(predicted=False)
    renamed = plan.model_copy(
        update={
            "model": plan.model.model_copy(update={"name": "other", "fingerprint": "another"}),
            "blocks": [
                *plan.blocks[:2],
                plan.blocks[2].model_copy(update={"name": "tail", "ops": {"norm": {"dp": "b"}}}),
            ],
        }
    )
    found = comparison(sample_plan(), renamed)
    assert not found["same_model"]
    assert found["ops"] == [{"block": "tail", "op": "norm", "placements": [None, {"b": 2}]}]
    assert found["breakdown_s"] == {} and found["figures"]["step_time_s"] == [9.84, None]
    assert in_words(found, ("a", "b")).startswith("no prediction in b")
