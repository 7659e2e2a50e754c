"""The page about a search, as an answer and as a file."""

from __future__ import annotations

from dataclasses import KW_ONLY
from pathlib import Path
from typing import Annotated

from pydantic import InstanceOf

from moevolve.evaluators.text_files import writing_into
from moevolve.search.interface.parameters import SearchRef
from moevolve.search.interface.request import Ask, Flag, Request, about, record
from moevolve.search.interface.searches import FinalTableRequest
from moevolve.search.loop.final_table import FinalTable
from moevolve.search.report.usage import read_analysis
from moevolve.search.results.expert_usage import Analysis
from moevolve.store.reader import StoreReader


@record
class _Page(Request):
    search: SearchRef
    _: KW_ONLY
    limit: Annotated[int, about("List this many of the best individuals.", ge=1, le=1000)] = 5


@record
class ReportRequest(_Page):
    """Make a page about a search: scores, figures, lineage, cost, how to repeat it. Nothing is evaluated."""

    route = "/searches/{search}/report"

    def answer(self, store: StoreReader) -> bytes:
        return _page(store, self.search, self.limit)


@record
class AnalysedReportRequest(_Page):
    """Make a page about a search that shows an analysis, too."""

    _: KW_ONLY
    analysis: InstanceOf[Analysis]

    def answer(self, store: StoreReader) -> bytes:
        return _page(store, self.search, self.limit, self.analysis)


def _page(store: StoreReader, search: str, limit: int, analysis: Analysis | None = None) -> bytes:
    from moevolve.search.report.contents import gather
    from moevolve.search.report.page import render_page

    return render_page(gather(store, search, limit, analysis)).encode()


@record
class ReportFileRequest(_Page):
    """Write a page about a search: scores, figures, lineage, cost, how to repeat it. Nothing is evaluated.

    The answer is the final table as the page has it; its `gaps` are the missing measurements.

    Raises:
        UserError: the analysis is of another search, or the file can't be written.
        StoreError: there is no such store or search.
    """

    path: Annotated[Path, about("HTML file to write."), Flag("-o --output", "FILE")]
    _: KW_ONLY
    analysis: Annotated[
        Path | InstanceOf[Analysis] | None,
        about(
            "Folder that `analyse -o` wrote, to show too. Python also takes an analysis itself; a server takes neither."
        ),
        Flag("--analysis", "DIR", Path),
    ] = None

    def answer(self, ask: Ask) -> FinalTable:
        if self.analysis is None:
            page = ask(ReportRequest(self.search, limit=self.limit))
        else:
            found = read_analysis(self.analysis) if isinstance(self.analysis, Path) else self.analysis
            page = ask(AnalysedReportRequest(self.search, limit=self.limit, analysis=found))
        with writing_into(self.path.parent):
            self.path.write_bytes(page)
        return ask(FinalTableRequest(self.search))
