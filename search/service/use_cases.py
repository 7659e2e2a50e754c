"""Which function answers each request: it takes a store and the request, returns records, and prints nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, get_type_hints

from moevolve.search.requests import models, recipes, running, searches, stores
from moevolve.search.requests.record import Request


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
    searches.SearchesRequest: UseCase(f"{_QUERIES}:searches", "/searches"),
    searches.SearchRequest: UseCase(f"{_QUERIES}:search", "/searches/{search}"),
    searches.LabelRequest: UseCase(f"{_QUERIES}:label", "/searches/{search}/label", writes=True),
    searches.ControlRequest: UseCase(f"{_QUERIES}:control", "/searches/{search}/control"),
    searches.FinalTableRequest: UseCase(
        "moevolve.search.operations.final_table:final_table", "/searches/{search}/standings"
    ),
    searches.ContrastRequest: UseCase("moevolve.search.operations.results:contrast", "/contrast"),
    searches.EffectsRequest: UseCase("moevolve.search.operations.results:effects", "/searches/{search}/effects"),
    searches.BestRequest: UseCase(f"{_QUERIES}:best", "/best"),
    searches.ParetoRequest: UseCase(f"{_QUERIES}:pareto", "/pareto"),
    searches.TradeOffsRequest: UseCase(f"{_QUERIES}:tradeoffs", "/searches/{search}/tradeoffs"),
    searches.ShowRequest: UseCase(f"{_QUERIES}:show", "/individuals/{individual}"),
    searches.GenomeRequest: UseCase(f"{_QUERIES}:genome", "/individuals/{individual}/genome"),
    searches.LineageRequest: UseCase(f"{_QUERIES}:lineage", "/individuals/{individual}/lineage"),
    searches.PlotRequest: UseCase("moevolve.search.operations.plot:picture", "/searches/{search}/plot"),
    searches.ReportRequest: UseCase("moevolve.search.operations.results:page_of", "/searches/{search}/report"),
    models.EvaluateRequest: UseCase("moevolve.search.operations.answers:evaluate", writes=True),
    models.AnswersRequest: UseCase("moevolve.search.operations.answers:answers"),
    models.OutcomesRequest: UseCase(
        "moevolve.search.operations.answers:outcomes", "/individuals/{individual}/outcomes"
    ),
    models.PromptsRequest: UseCase("moevolve.search.operations.answers:prompts"),
    models.AnalyseRequest: UseCase("moevolve.search.operations.results:analyse"),
    models.ExportRequest: UseCase("moevolve.search.operations.export:export", writes=True),
    recipes.RecipeRequest: UseCase("moevolve.search.operations.recipes:recipe"),
    models.ImportEepRequest: UseCase("moevolve.search.operations.import_eep:import_eep", opens=True),
    models.ProfileRequest: UseCase("moevolve.search.operations.profile:profile", opens=True),
    running.PauseRequest: UseCase(f"{_STEER}:pause", "/searches/{search}/pause", writes=True),
    running.StopRequest: UseCase(f"{_STEER}:stop", "/searches/{search}/stop", writes=True),
    running.CancelRequest: UseCase(f"{_STEER}:cancel", "/searches/{search}/cancel", writes=True),
    running.ScaleRequest: UseCase(f"{_STEER}:scale", "/searches/{search}/scale", writes=True),
    stores.UpgradeRequest: UseCase(f"{_UPKEEP}:upgrade", opens=True),
    stores.CheckRequest: UseCase(f"{_UPKEEP}:check"),
    stores.PruneRequest: UseCase(f"{_UPKEEP}:prune", writes=True),
    stores.CopyRequest: UseCase(f"{_UPKEEP}:copy"),
}
"""Use cases by type of request."""
