"""Which function answers each request: it takes a store and the request, returns records, and prints nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, get_type_hints

from moevolve.search.requests.models import (
    AnalyseRequest,
    AnswersRequest,
    EvaluateRequest,
    ExportRequest,
    ImportEepRequest,
    OutcomesRequest,
    ProfileRequest,
    PromptsRequest,
)
from moevolve.search.requests.recipes import RecipeRequest
from moevolve.search.requests.record import Request
from moevolve.search.requests.running import CancelRequest, PauseRequest, ScaleRequest, StopRequest
from moevolve.search.requests.searches import (
    BestRequest,
    ContrastRequest,
    ControlRequest,
    EffectsRequest,
    FinalTableRequest,
    GenomeRequest,
    LabelRequest,
    LineageRequest,
    ParetoRequest,
    PlotRequest,
    ReportRequest,
    SearchesRequest,
    SearchRequest,
    ShowRequest,
)
from moevolve.search.requests.stores import CheckRequest, CopyRequest, PruneRequest, UpgradeRequest


@dataclass(frozen=True, slots=True)
class UseCase:
    """How a request is answered.

    Attributes:
        home: Module and name of the answering function, as `module:name`. It is imported when it is needed.
        path: HTTP path under /api, with the request's positional fields in braces; None where the answer needs
            something that a server doesn't offer to its clients, such as the model.
        writes: True if the function needs a store that it can write to. Such a route is a POST.
        opens: True if the function opens the store itself, from a URL or an open store.
    """

    home: str
    path: str | None = None
    writes: bool = False
    opens: bool = False

    @property
    def function(self) -> Callable[[Any, Any], Any]:
        """The answering function."""
        module, _, name = self.home.partition(":")
        found: Callable[[Any, Any], Any] = getattr(import_module(module), name)
        return found

    @property
    def answer(self) -> Any:
        """Type of the answer. HTTP sends bytes as they are, anything else as JSON."""
        return get_type_hints(self.function)["return"]


_QUERIES = "moevolve.search.operations.queries"
_STEER = "moevolve.search.running.steer"
_UPKEEP = "moevolve.search.operations.upkeep"

USE_CASES: dict[type[Request[Any]], UseCase] = {
    SearchesRequest: UseCase(f"{_QUERIES}:searches", "/searches"),
    SearchRequest: UseCase(f"{_QUERIES}:search", "/searches/{search}"),
    LabelRequest: UseCase(f"{_QUERIES}:label", "/searches/{search}/label", writes=True),
    ControlRequest: UseCase(f"{_QUERIES}:control", "/searches/{search}/control"),
    FinalTableRequest: UseCase("moevolve.search.operations.final_table:final_table", "/searches/{search}/standings"),
    ContrastRequest: UseCase("moevolve.search.analysis.contrast:contrast", "/contrast"),
    EffectsRequest: UseCase("moevolve.search.analysis.effects:effects", "/searches/{search}/effects"),
    BestRequest: UseCase(f"{_QUERIES}:best", "/best"),
    ParetoRequest: UseCase(f"{_QUERIES}:pareto", "/pareto"),
    ShowRequest: UseCase(f"{_QUERIES}:show", "/individuals/{individual}"),
    GenomeRequest: UseCase("moevolve.search.operations.queries:genome", "/individuals/{individual}/genome"),
    LineageRequest: UseCase(f"{_QUERIES}:lineage", "/individuals/{individual}/lineage"),
    PlotRequest: UseCase("moevolve.search.operations.plot:picture", "/searches/{search}/plot"),
    ReportRequest: UseCase("moevolve.search.report.page:page_of", "/searches/{search}/report"),
    EvaluateRequest: UseCase("moevolve.search.operations.answers:evaluate", writes=True),
    AnswersRequest: UseCase("moevolve.search.operations.answers:answers"),
    OutcomesRequest: UseCase("moevolve.search.operations.answers:outcomes", "/individuals/{individual}/outcomes"),
    PromptsRequest: UseCase("moevolve.search.operations.answers:prompts"),
    AnalyseRequest: UseCase("moevolve.search.analysis.analyse:analyse"),
    ExportRequest: UseCase("moevolve.search.operations.export:export", writes=True),
    RecipeRequest: UseCase("moevolve.search.operations.recipes:recipe"),
    ImportEepRequest: UseCase("moevolve.search.operations.import_eep:import_eep", opens=True),
    ProfileRequest: UseCase("moevolve.search.operations.profile:profile", opens=True),
    PauseRequest: UseCase(f"{_STEER}:pause", "/searches/{search}/pause", writes=True),
    StopRequest: UseCase(f"{_STEER}:stop", "/searches/{search}/stop", writes=True),
    CancelRequest: UseCase(f"{_STEER}:cancel", "/searches/{search}/cancel", writes=True),
    ScaleRequest: UseCase(f"{_STEER}:scale", "/searches/{search}/scale", writes=True),
    UpgradeRequest: UseCase(f"{_UPKEEP}:upgrade", opens=True),
    CheckRequest: UseCase(f"{_UPKEEP}:check"),
    PruneRequest: UseCase(f"{_UPKEEP}:prune", writes=True),
    CopyRequest: UseCase(f"{_UPKEEP}:copy"),
}
"""Use cases by type of request."""


def use_case_of(request: Request[Any]) -> UseCase:
    """Look up how a request is answered."""
    return USE_CASES[type(request)]
