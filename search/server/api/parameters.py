"""Parameters that several routes have."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query

SearchPath = Annotated[str, Path(max_length=200, description="Name or id of the search.")]
RefPath = Annotated[str, Path(max_length=220, description="SEARCH:INDEX, for example demo:137.")]
LimitQuery = Annotated[int, Query(ge=1, le=1000, description="At most so many.")]
TaskQuery = Annotated[str | None, Query(max_length=200, description="Only for this task.")]
SearchQuery = Annotated[str | None, Query(max_length=200, description="Only of this search.")]
AfterQuery = Annotated[int | None, Query(ge=0, lt=2**63, description="Index of the last one of the page before.")]
