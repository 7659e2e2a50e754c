"""What answers each request: a function of this package that takes a store and the request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, get_type_hints

from moevolve.search import requests as ask


@dataclass(frozen=True, slots=True)
class UseCase:
    """What answers a request.

    Attributes:
        home: module and name of the function, as `module:name`; the module is imported when it is needed.
        path: of the HTTP route under /api, with the request's positional fields in braces; None where the answer needs
            what a server doesn't offer to its clients, such as the model.
        writes: whether the function needs a store that can be written to. Such a route is a POST.
        opens: whether the function opens the store itself, and is given its URL, or an open store.
    """

    home: str
    path: str | None = None
    writes: bool = False
    opens: bool = False

    @property
    def function(self) -> Callable[[Any, Any], Any]:
        """The function."""
        module, _, name = self.home.partition(":")
        found: Callable[[Any, Any], Any] = getattr(import_module(module), name)
        return found

    @property
    def answer(self) -> Any:
        """The type of the answer, which is sent as JSON, or as it is if it is bytes."""
        return get_type_hints(self.function)["return"]


_QUERIES = "moevolve.search.operations.queries"
_STEER = "moevolve.search.running.steer"

USE_CASES: dict[type[ask.Request[Any]], UseCase] = {
    ask.SearchesRequest: UseCase(f"{_QUERIES}:searches", "/searches"),
    ask.SearchRequest: UseCase(f"{_QUERIES}:search", "/searches/{search}"),
    ask.ControlRequest: UseCase(f"{_QUERIES}:control", "/searches/{search}/control"),
    ask.StandingsRequest: UseCase("moevolve.search.operations.final_table:final_table", "/searches/{search}/standings"),
    ask.BestRequest: UseCase(f"{_QUERIES}:best", "/best"),
    ask.ShowRequest: UseCase(f"{_QUERIES}:show", "/individuals/{individual}"),
    ask.LineageRequest: UseCase(f"{_QUERIES}:lineage", "/individuals/{individual}/lineage"),
    ask.PlotRequest: UseCase("moevolve.search.operations.plot:picture", "/searches/{search}/plot"),
    ask.ReportRequest: UseCase("moevolve.search.report.page:page_of", "/searches/{search}/report"),
    ask.EvaluateRequest: UseCase("moevolve.search.operations.evaluate:evaluate", writes=True),
    ask.AnswersRequest: UseCase("moevolve.search.operations.answers:answers"),
    ask.PromptsRequest: UseCase("moevolve.search.operations.prompts:prompts"),
    ask.AnalyseRequest: UseCase("moevolve.search.operations.analyse:analyse"),
    ask.ExportRequest: UseCase("moevolve.search.operations.export:export", writes=True),
    ask.ImportEepRequest: UseCase("moevolve.search.operations.import_eep:import_eep", opens=True),
    ask.ProfileRequest: UseCase("moevolve.search.operations.profile:profile", opens=True),
    ask.PauseRequest: UseCase(f"{_STEER}:pause", "/searches/{search}/pause", writes=True),
    ask.StopRequest: UseCase(f"{_STEER}:stop", "/searches/{search}/stop", writes=True),
    ask.CancelRequest: UseCase(f"{_STEER}:cancel", "/searches/{search}/cancel", writes=True),
    ask.ScaleRequest: UseCase(f"{_STEER}:scale", "/searches/{search}/scale", writes=True),
}
"""By type of request."""


def use_case_of(request: ask.Request[Any]) -> UseCase:
    """What answers a request."""
    return USE_CASES[type(request)]
