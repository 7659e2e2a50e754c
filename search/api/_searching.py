"""Searches: launching, continuing, comparing and estimating them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, InstanceOf

from moevolve._asking import service_of, takes, takes_store
from moevolve._runs import Run
from moevolve.evaluators.errors import UserError
from moevolve.search.config.files import as_run_config, load_run_config, override_lines, settings_of
from moevolve.search.config.run import RunConfig
from moevolve.search.operations.opening import is_server, opened_store
from moevolve.search.requests.parameters import Overrides
from moevolve.search.requests.planning import CompareRequest, EstimateRequest
from moevolve.search.requests.record import record
from moevolve.search.requests.running import LaunchRequest, LogsRequest, ResumeRequest, RetryRequest, SubmitRequest
from moevolve.search.requests.shrink import ShrinkRequest
from moevolve.search.running.observer import Observer
from moevolve.store.repository import Store

if TYPE_CHECKING:
    from moevolve.search.config.study import Study, StudyCell
    from moevolve.search.loop.final_table import FinalTable
    from moevolve.search.pools.submit import Submitted
    from moevolve.search.results.study import StudyRow
    from moevolve.search.running.plan.records import Estimate
    from moevolve.search.shrink.page import ShrinkPlan, ShrinkResult

# Modules that load torch or Ray are imported within the functions, after what is wrong with a configuration was said.

Watcher = Annotated[InstanceOf[Observer] | None, Field(description="Is told what happens meanwhile.")]


@record
class _Launch(LaunchRequest):
    __doc__ = LaunchRequest.__doc__
    _: KW_ONLY
    observer: Watcher = None


@record
class _Resume(ResumeRequest):
    __doc__ = ResumeRequest.__doc__
    _: KW_ONLY
    observer: Watcher = None


@record
class _Retry(RetryRequest):
    __doc__ = RetryRequest.__doc__
    _: KW_ONLY
    observer: Watcher = None


@record
class _Shrink(ShrinkRequest):
    __doc__ = ShrinkRequest.__doc__
    _: KW_ONLY
    observer: Watcher = None


@record
class _Estimate(EstimateRequest):
    __doc__ = EstimateRequest.__doc__
    _: KW_ONLY
    on_stage: Annotated[
        Callable[[str], None], Field(description="Called with a line about each stage of the pilot.")
    ] = lambda _: None


def load_config(path: str | Path, overrides: Overrides = ()) -> RunConfig:
    """Read a run configuration, to look at or to `launch`.

    Raises:
        UserError: the file is missing, isn't YAML, or has an unknown key or a bad value; the message names the field.
    """
    return load_run_config(Path(path), override_lines(overrides))


@takes(_Launch)
def launch(asked: _Launch) -> Run:
    if isinstance(asked.store, str) and is_server(asked.store):
        return _launch_on_server(asked, asked.store)
    settings = _settings(asked, {"store": asked.store, "name": asked.name, "workers.address": asked.address})

    # Not sooner: what is wrong in a configuration is said at once, without waiting for torch and Ray.
    from moevolve.search.pools.ray_actor import ModelProbe
    from moevolve.search.running import launch as running

    source = "this configuration" if isinstance(asked.config, RunConfig) else str(asked.config)
    given = asked.search_id is not None
    with ModelProbe() as probe:
        setup = running.set_up_new(settings, asked.search_id, probe.call)
        with opened_store(settings.store if asked.store is None else asked.store, create=True) as opened:
            table = running.launch(
                setup,
                opened,
                asked.observer or Observer(),
                asked.or_resume or given,
                source,
                only_this=given,
                probe=probe,
            )
            return Run.of(table, opened.url)


def _launch_on_server(asked: _Launch, url: str) -> Run:
    """Launch one of a server's configurations, by its name, on the server's machine."""
    from moevolve.search.server.client import RemoteService

    refused = {
        "address": asked.address,
        "or_resume (--or-resume)": asked.or_resume,
        "search_id (--id)": asked.search_id,
    }
    inapplicable = [name for name, value in refused.items() if value]
    if isinstance(asked.config, RunConfig) or inapplicable:
        without = f": without {' and '.join(inapplicable)}" if inapplicable else ""
        raise UserError(f"{url} launches its own configurations, by their names, on its own cluster{without}")
    with RemoteService(url) as server:
        overrides = settings_of(override_lines(asked.overrides))
        return Run.of(server.launch(str(asked.config), asked.name, overrides, asked.observer or Observer()), url)


@takes(SubmitRequest)
def submit(asked: SubmitRequest) -> Submitted:
    if isinstance(asked.store, str) and is_server(asked.store):
        raise UserError(f"{asked.store} is a server: a driver on a cluster needs the URL of the database itself")
    settings = _settings(asked, {"store": asked.store, "name": asked.name})

    from moevolve.search.pools import submit as cluster

    return cluster.submit(settings, asked.cluster, asked.search_id, asked.insecure, asked.shared_paths)


@takes(LogsRequest)
def logs(asked: LogsRequest) -> Iterator[str]:
    from moevolve.search.pools import submit as cluster

    return cluster.logs(asked.cluster, asked.search, asked.follow, asked.insecure)


@takes_store(_Resume)
def resume(store: str | Store, asked: _Resume) -> Run | None:
    with service_of(store, writes=True) as service:
        return _run(service.resume(asked, asked.observer or Observer()), service.url)


@takes_store(_Retry)
def retry(store: str | Store, asked: _Retry) -> Run | None:
    from moevolve.search.running import resume as running

    with opened_store(store) as opened:
        return _run(running.retry(opened, asked, asked.observer or Observer()), opened.url)


def _run(table: FinalTable | None, url: str) -> Run | None:
    return None if table is None else Run.of(table, url)


@takes(CompareRequest)
def load_comparison(asked: CompareRequest) -> Study:
    from moevolve.search.config import study

    changes = _given_lines({"base.store": asked.store, "base.workers.address": asked.address})
    return study.load_study(Path(asked.path), (*override_lines(asked.overrides), *changes))


def compare(
    comparison: str | Path | Study, *, observer: Callable[[int, StudyCell], Observer] | None = None
) -> list[StudyRow]:
    """Run searches and baselines side by side, in the store that the comparison names. Repeating it continues them.

    Args:
        comparison: YAML file of the comparison, or what `load_comparison` read.
        observer: Makes the observer of a search from its index in `comparison.cells` and its cell.

    Returns:
        The rows of its table: every contestant's scores over seeds, costs and tests.

    Raises:
        UserError: a search asks for something that can't be had; nothing has run then.
        StoreError: the store can't be opened.
        PoolError: no worker can be started; repeating it continues the searches.
    """
    from moevolve.search.results.study import study_rows
    from moevolve.search.running.study import run_study

    read = load_comparison(comparison) if isinstance(comparison, str | Path) else comparison
    with opened_store(read.store, create=True) as opened:
        return study_rows(run_study(read, opened, observer or (lambda place, cell: Observer())), opened)


@takes(_Estimate)
def estimate(asked: _Estimate) -> Estimate:
    from moevolve.search.operations.estimate import estimate_run

    return estimate_run(asked, asked.on_stage)


@takes(_Shrink)
def shrink(asked: _Shrink) -> ShrinkResult | ShrinkPlan:
    from moevolve.search.shrink import shrink as shrinking

    return shrinking.shrink(asked, asked.observer or Observer())


def _settings(asked: LaunchRequest | SubmitRequest, changes: dict[str, Any]) -> RunConfig:
    """Read the configuration, with the overrides and what else the request changes."""
    return as_run_config(asked.config, (*override_lines(asked.overrides), *_given_lines(changes)))


def _given_lines(settings: dict[str, Any]) -> tuple[str, ...]:
    """The settings that aren't None as `KEY=VALUE` lines, an open store by its URL."""
    given = {key: value.url if isinstance(value, Store) else value for key, value in settings.items()}
    return override_lines({key: value for key, value in given.items() if value is not None})
