"""``plan.html``: one self-contained page about one plan.

The page is HTML, CSS and JavaScript in ``assets/``; it reads two JSON objects, one of what the plan is and a compressed
one of what happens in a step. Everything is inlined, Plotly included, so the file can be mailed and opened without a
network.
"""

from __future__ import annotations

import base64
import gzip
import json
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from autopar import units
from autopar.ir.plan import Plan
from autopar.report.data import report_data, step_data
from autopar.report.study import Study

# In the order in which they run: each adds to what those before it defined.
_SCRIPTS = ("common", "training", "cluster", "sequence", "time", "timeline", "memory", "candidates", "start")


def plan_report(plan: Plan | Study, path: str | Path) -> None:
    """Writes the report of a plan. A study of it, which knows its model, shows much more."""
    page = render(plan) if isinstance(plan, Plan) else render(plan.plan, plan)
    Path(path).write_text(page, encoding="utf-8")


def render(plan: Plan, study: Study | None = None) -> str:
    """The page as text; about 5 MB, nearly all of it Plotly."""
    plotly = resources.files("plotly") / "package_data" / "plotly.min.js"
    return _page(
        data=report_data(plan, study),
        step=_packed(step_data(plan, study)),
        plotly=Markup(plotly.read_text(encoding="utf-8")),
        scripts=[Markup(_asset(f"{name}.js")) for name in _SCRIPTS],
    )


def render_plain(plan: Plan) -> str:
    """The page without charts, some ten kilobytes: for a notebook, in a frame of its own."""
    page = _page(data=report_data(plan), step="", plotly="", scripts=[])
    return f'<iframe srcdoc="{escape(page)}" style="width: 100%; height: 40rem; border: 0" title="plan"></iframe>'


def _page(**contents: Any) -> str:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("autopar.report", "assets"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}
    for name in ("seconds", "gib", "percent", "plural", "significant", "count", "bytes_a_second"):
        environment.filters[name] = getattr(units, name)
    return environment.get_template("plan.html").render(css=Markup(_asset("plan.css")), **contents)


def _asset(name: str) -> str:
    return (resources.files("autopar.report") / "assets" / name).read_text(encoding="utf-8")


def _packed(step: dict[str, Any]) -> str:
    """JSON, compressed, in base64. The same bytes for the same step."""
    text = json.dumps(step, separators=(",", ":")).encode()
    return base64.b64encode(gzip.compress(text, mtime=0)).decode()
