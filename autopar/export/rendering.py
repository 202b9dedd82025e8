"""Templates of exported files, in ``templates/``."""

from __future__ import annotations

import shlex

import jinja2


def render(template: str, **values: object) -> str:
    """A template with its values. Filters: ``shell`` quotes a word for a shell, ``python`` writes a literal."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("autopar.export", "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # the files are scripts; what comes from a plan goes through a filter
    )
    environment.filters["shell"] = lambda value: shlex.quote(str(value))
    environment.filters["python"] = repr
    return environment.get_template(template).render(**values)
