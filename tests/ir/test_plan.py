"""The plan file: what is written is read back, and what is wrong is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from autopar.ir.errors import InvalidPlan
from autopar.ir.plan import Plan

PLAN: dict[str, Any] = {
    "model": {"name": "Net", "fingerprint": "abc"},
    "cluster": {"gpu": "cpu", "num_gpus": 4, "gpus_per_node": 4},
    "batch": {"global_size": 8, "num_microbatches": 2},
    "mesh": {"dp": 1, "tp": 2},
    "inputs": ["dp"],
    "blocks": [{"name": "layers.*", "repeats": 4, "ops": {"mlp.up/linear": {"tp": "n"}}}],
    "stages": [{"first": 0, "last": 1}, {"first": 2, "last": 3, "remat": {"full": 1}}],
}


def changed(**fields: Any) -> str:
    return yaml.safe_dump(PLAN | fields)


def test_round_trip(tmp_path: Path) -> None:
    plan = Plan.from_yaml(yaml.safe_dump(PLAN))
    plan.save(tmp_path / "plan.yaml")
    assert Plan.load(tmp_path / "plan.yaml") == plan
    assert plan.num_stages == 2
    assert plan.num_ranks == 4
    assert plan.stage_mesh.sizes == (1, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mesh: [unclosed", "is not YAML"),
        ("- a\n- b\n", "expected a mapping"),
        (changed(zero=4), "zero: Input should be less than or equal to 3"),
        (changed(zero=1, shard_axes=["cp"]), "shard_axes: 'cp' is not a mesh axis"),
        (changed(zero=1, shard_axes=[]), "shard_axes: none; leave shard_axes out"),
        (changed(shard_axes=["dp"]), "shard_axes: there is nothing to shard at zero 0"),
        (changed(prefetch=0), "prefetch: Input should be greater than 0"),
        (
            changed(blocks=[{"name": "layers.*", "repeats": 4, "zero": 2}]),
            "blocks.0.zero: 2, but the plan's own zero is 0",
        ),
        (
            changed(zero=2, blocks=[{"name": "layers.*", "repeats": 4, "reshard_after_forward": True}]),
            "blocks.0.reshard_after_forward: is about ZeRO-3",
        ),
        (
            changed(stages=[{"first": 0, "last": 3, "remat": {"keep": 1}}]),
            "stages.0.remat.keep: expected one of selective, alternate, full, or a name that blocks list under kept",
        ),
        (
            changed(blocks=[{"name": "layers.*", "repeats": 4, "kept": {"full": []}}]),
            "blocks.0.kept.full: that is a level; expected another name",
        ),
        (
            changed(blocks=[{"name": "layers.*", "repeats": 4, "kept": {"a": []}, "host": {"b": []}}]),
            "blocks.0.host.b: expected a name that the block lists under kept, which has a",
        ),
        (
            changed(blocks=[{"name": "layers.*", "repeats": 4, "kept": {"a": ["up/linear"]}, "host": {"a": ["gelu"]}}]),
            "blocks.0.host.a.0: 'gelu' is not kept; expected inputs, up/linear",
        ),
        (changed(zero=1, reshard_after_forward=False), "reshard_after_forward: false is about ZeRO-3"),
        (
            changed(stages=[{"first": 0, "last": 3, "offload": True}]),
            "stages.0.offload: what ZeRO shards is offloaded, and the plan is at zero 0",
        ),
        (
            changed(zero=1, stages=[{"first": 0, "last": 3, "on_disk": 2}]),
            "stages.0.on_disk: 2 blocks, and the stage offloads nothing",
        ),
        (
            changed(zero=1, stages=[{"first": 0, "last": 3, "offload": True, "on_disk": 5}]),
            "stages.0.on_disk: 5 blocks; the stage has 4",
        ),
        (changed(zero=1, stages=[{"first": 0, "last": 3, "offload": True, "on_disk": 0}]), "on_disk"),
        (changed(colour="red"), "colour: Extra inputs are not permitted"),
        (changed(mesh={"tp": 0}), "mesh.tp"),
        (changed(inputs=["cp"]), "'cp' is not a mesh axis"),
        (changed(stages=[{"first": 0, "last": 1}, {"first": 3, "last": 3}]), "expected a range that starts at 2"),
        (changed(stages=[{"first": 0, "last": 2}]), "they end at block 2, but there are 4 blocks"),
        (changed(batch={"global_size": 1, "num_microbatches": 2}), "1 samples are too few for 2 microbatches"),
        (
            changed(blocks=[{"name": "layers.*", "repeats": 4, "ops": {"up/linear": {"ep": "n"}}}]),
            "'up/linear' of 'layers.*' names mesh axis 'ep'",
        ),
    ],
)
def test_bad_field_is_named(text: str, message: str) -> None:
    with pytest.raises(InvalidPlan, match=r"mine\.yaml") as error:
        Plan.from_yaml(text, source="mine.yaml")
    assert message in str(error.value)


def test_no_object_is_built_from_yaml() -> None:
    with pytest.raises(InvalidPlan, match="line 1 has the tag"):
        Plan.from_yaml("model: !!python/object/apply:os.system ['true']")


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidPlan, match="cannot read plan"):
        Plan.load(tmp_path / "none.yaml")


def test_sets_that_blocks_keep_come_after_the_levels() -> None:
    kept = [{"name": "layers.*", "repeats": 4, "kept": {"less": ["mlp.up/linear"], "more": []}}]
    stages = [{"first": 0, "last": 3, "remat": {"less": 1, "full": 1, "more": 1}}]
    plan = Plan.from_yaml(changed(blocks=kept, stages=stages))
    assert [plan.remat_of(number) for number in range(4)] == ["full", "less", "more", "none"]
    assert plan.kept_sets == ("less", "more")
    assert Plan.from_yaml(plan.to_yaml()) == plan
    assert "host" not in plan.to_yaml()
    levels = plan.in_levels()
    assert [levels.remat_of(number) for number in range(4)] == ["full", "full", "full", "none"]
    assert not levels.kept_sets


def test_what_waits_in_host_memory_is_part_of_a_set() -> None:
    block = {"name": "layers.*", "repeats": 4, "kept": {"less": ["mlp.up/linear"]}, "host": {"less": ["inputs"]}}
    plan = Plan.from_yaml(changed(blocks=[block], stages=[{"first": 0, "last": 3, "remat": {"less": 1}}]))
    assert plan.uses_host
    assert Plan.from_yaml(plan.to_yaml()) == plan
    unused = Plan.from_yaml(changed(blocks=[block]))
    assert not unused.uses_host
    assert not plan.in_levels().uses_host
