"""Parameters that several routes have."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query

from moevolve.search.config.run import LONGEST_NAME

SearchPath = Annotated[str, Path(max_length=LONGEST_NAME, description="Name or id of the search.")]
RefPath = Annotated[str, Path(max_length=LONGEST_NAME + 20, description="SEARCH:INDEX, for example demo:137.")]
LimitQuery = Annotated[int, Query(ge=1, le=1000, description="At most so many.")]
SearchQuery = Annotated[str | None, Query(max_length=LONGEST_NAME, description="Only of this search.")]
AfterQuery = Annotated[int | None, Query(ge=0, lt=2**63, description="Index of the last one of the page before.")]
