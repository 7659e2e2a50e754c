"""Rendering of the text files that go into an export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined


def render(template: str, **values: Any) -> str:
    """Render one of the `*.jinja` files beside this module; a missing value is an error.

    Args:
        template: file name.
        values: what the template refers to.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters["cell"] = _cell
    return environment.get_template(template).render(**values)


def _cell(text: str) -> str:
    """Text for one cell of a Markdown table."""
    return " ".join(str(text).replace("|", "\\|").split()) or "-"
