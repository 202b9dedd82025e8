"""The types of data that travel through the compiler: each arrow is a function, whose signature says what it takes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from autopar.ir.analysis.analysis import Analysis
from autopar.ir.capture.capture import capture
from autopar.ir.graph import CapturedModel
from autopar.ir.placed.placed_model import PlacedModel, place
from autopar.ir.placed.step_communication import step_communication
from autopar.ir.plan import Plan
from autopar.ir.program import StageProgram
from autopar.passes.insert_redistributions import insert_redistributions
from autopar.passes.normalise import normal_form, normalise
from autopar.passes.partition import PASSES
from autopar.passes.placed_program import PlacedProgram, run_program_passes
from autopar.passes.split_stages import split_stages
from autopar.passes.verify.placements import verify_placements
from autopar.runtime.engine import Engine
from autopar.runtime.module import ParallelModule
from autopar.search.api import predict_plan, search_captured
from autopar.search.problem.workload import Workload
from autopar.search.result import SearchResult
from scripts.architecture.svg import Picture

ROOT = Path(__file__).parents[2]
WIDTH, LEFT, BOX, TALL, GAP, FILES = 860.0, 222.0, 290.0, 46.0, 40.0, 566.0


@dataclass(frozen=True, slots=True)
class Edge:
    """A function, and the type in which its result is handed on.

    phase: of the compiler, and its colour. argument: that takes what the edge before gives. takes: the type that holds
    it, if the function is given that. beside: arguments that come from elsewhere. says: of the type. readers: functions
    that read it and leave the way, each with the argument.
    """

    phase: tuple[str, str]
    function: Callable[..., Any]
    argument: str
    gives: type
    says: str
    takes: type | None = None
    beside: tuple[str, ...] = ()
    readers: tuple[tuple[Callable[..., Any], str], ...] = ()


CAPTURE, ANALYSE, SEARCH, PLACE, PARTITION, RUN = (
    (phase, f"axis-{number}")
    for number, phase in enumerate(("capture", "analyse", "search", "place", "partition", "run"))
)
EDGES = (
    Edge(
        CAPTURE, capture, "model", CapturedModel, "graph of ATen ops on the global batch",
        beside=("example_inputs", "loss_fn"),
    ),
    Edge(CAPTURE, normalise, "captured", CapturedModel, f"the same in normal form, after {len(normal_form())} passes"),
    Edge(ANALYSE, Analysis.of, "captured", Analysis, "blocks, roles of dimensions, gradient flow"),
    Edge(
        SEARCH, search_captured, "workload", Plan, "mesh, stages, factors of every op",
        takes=Workload, beside=("cluster", "constraints"), readers=((predict_plan, "plan"), (Plan.save, "self")),
    ),
    Edge(
        PLACE, place, "plan", PlacedModel, "layouts, storage, redistributions",
        beside=("analysis",), readers=((step_communication, "placed"),),
    ),
    Edge(PARTITION, insert_redistributions, "placed", PlacedProgram, "one rank's program, shapes still global"),
    Edge(PARTITION, run_program_passes, "program", PlacedProgram, "local shapes, and collectives"),
    Edge(
        PARTITION, split_stages, "program", StageProgram, "one program for each stage, block by block",
        readers=((verify_placements, "programs"),),
    ),
    Edge(
        RUN, Engine, "programs", Engine, "parameters, process groups, a schedule",
        beside=("model", "captured", "plan"),
    ),
    Edge(RUN, ParallelModule, "engine", ParallelModule, "an nn.Module; step() trains"),
)  # fmt: skip


def names(annotation: object) -> set[str]:
    """The types that an annotation names."""
    return set(re.findall(r"\w+", str(annotation)))


def check() -> None:
    """Raise AssertionError where an arrow is drawn that the signatures do not have."""
    given: type = nn.Module
    for edge in EDGES:
        parameters = inspect.signature(edge.function).parameters
        assert not (missing := {edge.argument, *edge.beside} - set(parameters)), f"{edge.function}: no {missing}"
        held = names(parameters[edge.argument].annotation)
        if edge.takes is not None:
            assert edge.takes.__name__ in held and given.__name__ in names(edge.takes.__annotations__.values()), edge
        else:
            assert given.__name__ in held | {"Module"} & {given.__name__}, f"{edge.function} takes {held}"
        made = inspect.signature(edge.function).return_annotation
        holder = {"SearchResult": SearchResult}.get(str(made))
        made = names(holder.__annotations__.values() if holder else made)
        assert edge.gives.__name__ in made | {edge.function.__name__}, f"{edge.function} makes {made}"
        for reader, argument in edge.readers:
            of = reader.__qualname__.split(".")[0]
            assert edge.gives.__name__ in names(inspect.signature(reader).parameters[argument].annotation) | {of}, (
                reader
            )
        given = edge.gives


def draw() -> Picture:
    check()
    picture = Picture(
        title="Types of data through the compiler",
        description="From an nn.Module through "
        + ", ".join(f"{edge.function.__qualname__} to {edge.gives.__name__}" for edge in EDGES),
        width=WIDTH,
    )
    picture.text(24, 34, picture.title, "bold", size=17)
    picture.text(24, 54, "arrows are functions, with the file they are in; boxes are what travels", "soft")
    y = 78.0
    _type(picture, y, nn.Module, "an unmodified model")
    for edge in EDGES:
        middle = LEFT + BOX / 2
        picture.line((middle, y + TALL), (middle, y + TALL + GAP), arrow=True)
        base = y + TALL + GAP / 2 + 4
        name = edge.function.__qualname__
        picture.text(middle + 14, base, name, "code bold", size=12.5)
        picture.text(FILES, base, _file(edge.function), "code soft", size=11)
        if edge.beside:
            kinds = [_kind(edge.function, argument) for argument in edge.beside]
            label = picture.text(LEFT - 12, base, ", ".join(kinds), "code", size=11, anchor="end")
            picture.line((label.right + 6, base - 4), (middle - 3, base - 4), kind="dashed", arrow=True)
        y += TALL + GAP
        _type(picture, y, edge.gives, edge.says)
        phase, tone = edge.phase
        picture.box(LEFT, y, 5, TALL, tone=tone)
        picture.text(LEFT - 12, y + TALL / 2 + 4, phase, "soft", anchor="end")
        if edge.function is run_program_passes:
            for number, step in enumerate(PASSES):
                picture.text(FILES, y + 2 + 12 * number, step.name, "code soft", size=11)
        for number, (reader, _) in enumerate(edge.readers):
            _reader(picture, y + number * 26 - 13 * (len(edge.readers) - 1), y, reader)
    picture.height = y + TALL + 24
    return picture


def _type(picture: Picture, y: float, kind: type, says: str) -> None:
    picture.box(LEFT, y, BOX, TALL)
    name = "nn.Module" if kind is nn.Module else kind.__name__
    picture.text(LEFT + BOX / 2, y + 19, name, "code bold", size=14, anchor="middle")
    picture.text(LEFT + BOX / 2, y + 36, says, "soft", size=11, anchor="middle")


def _reader(picture: Picture, y: float, top: float, reader: Callable[..., Any]) -> None:
    made = inspect.signature(reader).return_annotation
    made = {"None": "a file" if reader is Plan.save else "a proof, or an error"}.get(str(made), made)
    base = y + TALL / 2 + 4
    picture.line(
        (LEFT + BOX, top + TALL / 2),
        (LEFT + BOX + 16, base - 4),
        (LEFT + BOX + 28, base - 4),
        kind="dashed",
        arrow=True,
    )
    picture.text(LEFT + BOX + 34, base, f"{reader.__qualname__} → {made}", "code", size=11)


def _kind(function: Callable[..., Any], argument: str) -> str:
    """The type of an argument, or its name where the type says little."""
    kind = str(inspect.signature(function).parameters[argument].annotation).removesuffix(" | None")
    return kind if re.fullmatch(r"[\w.]+", kind) and kind != "Any" else argument


def _file(function: Callable[..., Any]) -> str:
    path = Path(inspect.getsourcefile(inspect.unwrap(function)) or "").resolve().relative_to(ROOT)
    return str(path)
