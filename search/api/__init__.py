"""moevolve makes mixture-of-experts language models smaller and faster for your tasks, using inference only.

Every command is a function of the same name here (`plan` is `estimate`), and returns what the command prints:

    import moevolve

    run = moevolve.launch("configs/runs/demo.yaml", store="sqlite:///demo.db")
    run.winner, run.best.scores

    with moevolve.open_store("sqlite:///demo.db") as store:
        top = moevolve.best(store, task="demo-calendar", experts=4)
    moevolve.export("demo:78", "./smaller", store="sqlite:///demo.db")

What they have in common:

* A **configuration** is the path of a YAML file, or what `load_config` made of it. `overrides` change its settings:
  `{"genome.experts": 4}`, or `["genome.experts=4"]` as on the command line.
* A **store** is a URL (`sqlite:///demo.db`, `postgresql://user@host/name`), or an open one, which is left open. What
  only reads takes one of `open_reader`, too.
* An **individual** is called `SEARCH:INDEX`; where it says so, `full` is the unedited model.
* **Stores as a whole** are looked after by `moevolve.db`, as by `moevolve db ...`.
* **Records** are frozen values; `as_data` makes what JSON knows of any of them.
* **Errors** that you can mend are a `UserError` or a `StoreError` of one line; `PoolError`, `ExportError` and
  `ProfileError` are of workers, of checkpoints that fail their verification, and of profiled models. Interrupting a
  function that searches leaves the search resumable.

Importing it is quick: torch, Ray and transformers are loaded by the functions that need them.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ != "moevolve":
    raise ImportError("search/api is the package `moevolve` itself: import that")
if Path(__file__).parent.name == "api":
    # An editable install: its import hook knows folders with an `__init__.py`, and `kernels` must not have one.
    __path__.append(str(Path(__file__).parents[2]))

from moevolve import db
from moevolve._arguments import open_reader, open_store
from moevolve._individuals import (
    analyse,
    answers,
    as_data,
    best,
    evaluate,
    export,
    export_coefficients,
    import_eep,
    lineage,
    plot,
    profile,
    prompts,
    report,
    searches,
    show,
    tasks,
    write_analysis,
)
from moevolve._searching import (
    compare,
    compare_measured,
    estimate,
    launch,
    load_comparison,
    load_config,
    logs,
    resume,
    retry,
    submit,
)
from moevolve._serving import serve
from moevolve._steering import cancel, pause, scale, stop

if TYPE_CHECKING:
    from moevolve.evaluators.errors import UserError as UserError
    from moevolve.evaluators.tasks.config import TaskConfig as TaskConfig
    from moevolve.search.compare.config import Comparison as Comparison
    from moevolve.search.compare.rows import ComparisonRow as ComparisonRow
    from moevolve.search.config.run import RunConfig as RunConfig
    from moevolve.search.estimate.estimate import Estimate as Estimate
    from moevolve.search.loop.standings import Contestant as Contestant
    from moevolve.search.loop.standings import Score as Score
    from moevolve.search.loop.standings import Standings as Standings
    from moevolve.search.pools.base import PoolError as PoolError
    from moevolve.search.running.observer import Observer as Observer
    from moevolve.search.service.analyse import Analysis as Analysis
    from moevolve.search.service.answers import Answers as Answers
    from moevolve.search.service.evaluate import Evaluation as Evaluation
    from moevolve.search.service.import_eep import Imported as Imported
    from moevolve.search.service.prompts import AskedRow as AskedRow
    from moevolve.search.service.submit import Submitted as Submitted
    from moevolve.store.errors import StoreError as StoreError
    from moevolve.store.reader import StoreReader as StoreReader
    from moevolve.store.records import BestRow as BestRow
    from moevolve.store.records import Control as Control
    from moevolve.store.records import IndividualDetail as IndividualDetail
    from moevolve.store.records import LineageGraph as LineageGraph
    from moevolve.store.records import Progress as Progress
    from moevolve.store.records import SearchSummary as SearchSummary
    from moevolve.store.repository import Store as Store
    from moevolve.workers.export.card import ExportError as ExportError
    from moevolve.workers.export.card import ExportReport as ExportReport
    from moevolve.workers.profiling.report import ProfileReport as ProfileReport
    from moevolve.workers.profiling.run import ProfileError as ProfileError

_HOMES = {
    "Analysis": "search.service.analyse",
    "Answers": "search.service.answers",
    "AskedRow": "search.service.prompts",
    "BestRow": "store.records",
    "Comparison": "search.compare.config",
    "ComparisonRow": "search.compare.rows",
    "Contestant": "search.loop.standings",
    "Control": "store.records",
    "Evaluation": "search.service.evaluate",
    "ExportError": "workers.export.card",
    "ExportReport": "workers.export.card",
    "Imported": "search.service.import_eep",
    "IndividualDetail": "store.records",
    "LineageGraph": "store.records",
    "Observer": "search.running.observer",
    "Estimate": "search.estimate.estimate",
    "PoolError": "search.pools.base",
    "ProfileError": "workers.profiling.run",
    "ProfileReport": "workers.profiling.report",
    "Progress": "store.records",
    "RunConfig": "search.config.run",
    "Score": "search.loop.standings",
    "SearchSummary": "store.records",
    "Standings": "search.loop.standings",
    "Store": "store.repository",
    "StoreError": "store.errors",
    "StoreReader": "store.reader",
    "Submitted": "search.service.submit",
    "TaskConfig": "evaluators.tasks.config",
    "UserError": "evaluators.errors",
}
"""Where records and errors are, which are loaded when they are asked for."""

__all__ = [
    "Analysis",
    "Answers",
    "AskedRow",
    "BestRow",
    "Comparison",
    "ComparisonRow",
    "Contestant",
    "Control",
    "Estimate",
    "Evaluation",
    "ExportError",
    "ExportReport",
    "Imported",
    "IndividualDetail",
    "LineageGraph",
    "Observer",
    "PoolError",
    "ProfileError",
    "ProfileReport",
    "Progress",
    "RunConfig",
    "Score",
    "SearchSummary",
    "Standings",
    "Store",
    "StoreError",
    "StoreReader",
    "Submitted",
    "TaskConfig",
    "UserError",
    "analyse",
    "answers",
    "as_data",
    "best",
    "cancel",
    "compare",
    "compare_measured",
    "db",
    "estimate",
    "evaluate",
    "export",
    "export_coefficients",
    "import_eep",
    "launch",
    "lineage",
    "load_comparison",
    "load_config",
    "logs",
    "open_reader",
    "open_store",
    "pause",
    "plot",
    "profile",
    "prompts",
    "report",
    "resume",
    "retry",
    "scale",
    "searches",
    "serve",
    "show",
    "stop",
    "submit",
    "tasks",
    "write_analysis",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'moevolve' has no attribute {name!r}")
    return getattr(import_module(f"moevolve.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
