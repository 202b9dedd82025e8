"""``plan.html``: one self-contained page about one plan.

The page is HTML, CSS and JavaScript in ``assets/``; it reads one JSON object. Everything is inlined, Plotly
included, so the file can be mailed and opened without a network.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import jinja2
from markupsafe import Markup

from autopar.ir.plan import Plan
from autopar.report import units
from autopar.report.data import report_data

if TYPE_CHECKING:
    from autopar.planning import Planned


def plan_report(plan: Plan | Planned, path: str | Path) -> None:
    """Writes the report of a plan, or of what the search found, which also knows how it was found."""
    page = render(plan) if isinstance(plan, Plan) else render(plan.plan, plan)
    Path(path).write_text(page, encoding="utf-8")


def render(plan: Plan, planned: Planned | None = None) -> str:
    """The page as text; about 5 MB, nearly all of it Plotly."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("autopar.report", "assets"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}
    for name in ("seconds", "gib", "percent", "plural", "significant"):
        environment.filters[name] = getattr(units, name)
    assets = resources.files("autopar.report") / "assets"
    plotly = resources.files("plotly") / "package_data" / "plotly.min.js"
    return environment.get_template("plan.html").render(
        data=report_data(plan, planned),
        css=Markup((assets / "plan.css").read_text(encoding="utf-8")),
        script=Markup((assets / "plan.js").read_text(encoding="utf-8")),
        plotly=Markup(plotly.read_text(encoding="utf-8")),
    )
