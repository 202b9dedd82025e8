"""A page of what was measured on a machine, against the cost model fitted to it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from plotly import graph_objects
from plotly.colors import qualitative
from plotly.subplots import make_subplots

from autopar.profiling.compare import Series


def profile_report(series: Sequence[Series], path: Path) -> None:
    """Points are measured, lines are fitted; one panel for what is counted in FLOPs, one for bytes."""
    units = list(dict.fromkeys(one.unit for one in series))
    figure = make_subplots(rows=1, cols=len(units), subplot_titles=[_TITLES[unit] for unit in units])
    for number, one in enumerate(series):
        colour = qualitative.Dark24[number % len(qualitative.Dark24)]
        points = sorted(one.points, key=lambda point: point.size)
        sizes, place = [point.size for point in points], {"row": 1, "col": units.index(one.unit) + 1}
        common = {"x": sizes, "legendgroup": one.name, "name": one.name}
        measured = {"y": [point.measured_s for point in points], "mode": "markers", "marker": {"color": colour}}
        fitted = {"y": [point.predicted_s for point in points], "mode": "lines", "line": {"color": colour}}
        figure.add_trace(graph_objects.Scatter(**common, **measured), **place)
        figure.add_trace(graph_objects.Scatter(**common, **fitted, showlegend=False), **place)
    for number, unit in enumerate(units, 1):
        figure.update_xaxes(title=unit, row=1, col=number)
    logarithmic = {"type": "log", "dtick": 1, "exponentformat": "power"}
    figure.update_xaxes(**logarithmic)
    figure.update_yaxes(title="seconds", **logarithmic)
    figure.update_layout(title="Measured (points) and fitted (lines)", template="plotly_white")
    figure.write_html(path, include_plotlyjs=True)


_TITLES = {"FLOPs": "compute", "bytes": "memory and communication"}
