"""Searches: launching, continuing, comparing and estimating them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moevolve._arguments import (
    given_lines,
    service_of,
    url_of,
)
from moevolve.search.config.files import override_lines
from moevolve.search.operations.opening import is_server, opened_store
from moevolve.search.requests import Overrides, ResumeRequest, RetryRequest, refused_in_a_line

if TYPE_CHECKING:
    from moevolve.search.cluster.submit import Submitted
    from moevolve.search.compare.config import Cell, Comparison
    from moevolve.search.compare.rows import ComparisonRow
    from moevolve.search.config.run import RunConfig
    from moevolve.search.estimate.estimate import Estimate
    from moevolve.search.loop.final_table import FinalTable
    from moevolve.search.running.observer import Observer
    from moevolve.store.repository import Store


def load_config(path: str | Path, overrides: Overrides = ()) -> RunConfig:
    """Read a run configuration, to look at or to `launch`.

    Raises:
        UserError: the file is missing, no YAML, has an unknown key or a bad value; the message names the field.
    """
    from moevolve.search.config.files import load_run_config

    return load_run_config(Path(path), override_lines(overrides))


def launch(
    config: str | Path | RunConfig,
    *,
    store: str | Store | None = None,
    name: str | None = None,
    address: str | None = None,
    overrides: Overrides = (),
    or_resume: bool = False,
    search_id: str | None = None,
    observer: Observer | None = None,
) -> FinalTable:
    """Launch a search and follow it to its end.

    Args:
        config: what to search; of a server's configurations, its name.
        store: where to keep it, made if need be; None takes the configuration's. A server's URL launches it there.
        name: of the search; None takes the configuration's.
        address: Ray cluster to join (`auto` or `host:port`); None starts Ray on this machine.
        overrides: further settings to change.
        or_resume: continue the search of this name if there is one.
        search_id: of the search, a fresh one if None; continue the search of this name and id if there is one.
        observer: told what happens meanwhile.

    Returns:
        The winner, and the final table.

    Raises:
        UserError: something in the configuration can't be had, or the name is taken.
        StoreError: the store can't be opened, or the search to continue was cancelled.
        PoolError: no worker can be had; `resume` goes on.

    Example:
        >>> run = moevolve.launch("demo.yaml", store="sqlite:///demo.db", overrides={"genome.experts": 2})
        >>> run.winner
        'demo:78'
    """
    if isinstance(store, str) and is_server(store):
        besides = {"address": address, "or_resume (--or-resume)": or_resume, "search_id (--id)": search_id}
        return _launched_there(config, store, name, overrides, observer, [key for key in besides if besides[key]])
    from moevolve.search.config.files import as_run_config

    changes = given_lines({"store": url_of(store), "name": name, "workers.address": address})
    settings = as_run_config(config, (*override_lines(overrides), *changes))

    # Not sooner: what is wrong in a configuration is said at once, without waiting for torch and Ray.
    from moevolve.search.pools.ray_actor import FirstWorker
    from moevolve.search.running import launch as service
    from moevolve.search.running.observer import Observer

    source = "this configuration" if not isinstance(config, str | Path) else str(config)
    given = search_id is not None
    with FirstWorker() as first:
        setup = service.set_up_new(settings, search_id, first.call)
        with opened_store(settings.store if store is None else store, create=True) as opened:
            return service.launch(
                setup, opened, observer or Observer(), or_resume or given, source, only_this=given, first=first
            )


def submit(
    config: str | Path | RunConfig,
    cluster: str,
    *,
    store: str | None = None,
    name: str | None = None,
    overrides: Overrides = (),
    search_id: str | None = None,
    insecure: bool = False,
    shared_paths: bool = False,
) -> Submitted:
    """Send a search's driver to a Ray cluster and return at once. Repeat it: nothing is sent twice.

    What it needs is sent along: this package, task files, and a local folder of a model if it is small.

    Args:
        config: what to search.
        cluster: URL of the cluster's dashboard, `http://HEAD:8265`.
        store: database that the cluster reaches; None takes the configuration's.
        name: of the search; None takes the configuration's.
        overrides: further settings to change.
        search_id: of the search; None makes one that the same request always gets.
        insecure: go on although whoever reaches the cluster can run programs on it.
        shared_paths: send no files: every node has the model and the tasks where this machine has them.

    Raises:
        UserError: something in the configuration can't be had or sent, another search has the name or the id, or the
            cluster can't be had.
    """
    from moevolve.evaluators.errors import UserError
    from moevolve.search.config.files import as_run_config

    if store is not None and is_server(store):
        raise UserError(f"{store} is a server: a driver on a cluster needs the URL of the database itself")
    settings = as_run_config(config, (*override_lines(overrides), *given_lines({"store": store, "name": name})))

    from moevolve.search.cluster import submit as service

    return service.submit(settings, cluster, search_id, insecure, shared_paths)


def logs(search: str, cluster: str, *, follow: bool = False, insecure: bool = False) -> Iterator[str]:
    """What the driver of a submitted search wrote, in pieces.

    Args:
        search: name or id.
        cluster: URL of the cluster's dashboard.
        follow: go on until it ends.
        insecure: as in `submit`.

    Raises:
        UserError: the cluster can't be had, or knows no driver of that search.
    """
    from moevolve.search.cluster import submit as service

    return service.logs(cluster, search, follow, insecure)


def _launched_there(
    config: str | Path | RunConfig,
    url: str,
    name: str | None,
    overrides: Overrides,
    observer: Observer | None,
    inapplicable: Sequence[str],
) -> FinalTable:
    """`launch` on a server's machine, of one of its configurations by name; what is asked besides is refused."""
    from moevolve.evaluators.errors import UserError
    from moevolve.search.config.files import settings_of
    from moevolve.search.running.observer import Observer
    from moevolve.search.server.client import RemoteService

    if not isinstance(config, str | Path) or inapplicable:
        besides = f": without {' and '.join(inapplicable)}" if inapplicable else ""
        raise UserError(f"{url} launches its own configurations, by their names, on its own cluster{besides}")
    with RemoteService(url) as server:
        return server.launch(str(config), name, settings_of(override_lines(overrides)), observer or Observer())


def resume(
    store: str | Store,
    search: str,
    *,
    overrides: Overrides = (),
    address: str | None = None,
    observer: Observer | None = None,
) -> FinalTable | None:
    """Continue a search; see `moevolve.search.requests.ResumeRequest`. The observer is told what happens meanwhile."""
    from moevolve.search.running.observer import Observer

    with refused_in_a_line():
        request = ResumeRequest(search, overrides=overrides, address=address)
    with service_of(store, writes=True) as service:
        return service.resume(request, observer or Observer())


def retry(
    store: str | Store,
    search: str,
    *,
    overrides: Overrides = (),
    address: str | None = None,
    observer: Observer | None = None,
) -> FinalTable | None:
    """Retry what failed; see `moevolve.search.requests.RetryRequest`. The observer is told what happens meanwhile."""
    from moevolve.search.running import resume as service
    from moevolve.search.running.observer import Observer

    with refused_in_a_line():
        request = RetryRequest(search, overrides=overrides, address=address)
    with opened_store(store) as opened:
        return service.retry(opened, request, observer or Observer())


def load_comparison(
    path: str | Path, *, store: str | None = None, address: str | None = None, overrides: Overrides = ()
) -> Comparison:
    """Read a comparison, to look at or to `compare`; `overrides` are of it (`base.workers.count`).

    Raises:
        UserError: the file is missing, no YAML, has an unknown key or a bad value; the message names the field.
    """
    from moevolve.search.compare import config

    changes = given_lines({"base.store": store, "base.workers.address": address})
    return config.load_comparison(Path(path), (*override_lines(overrides), *changes))


def compare(
    comparison: str | Path | Comparison, *, observer: Callable[[int, Cell], Observer] | None = None
) -> list[ComparisonRow]:
    """Run searches and baselines side by side, in the store that the comparison names. Repeat it to go on.

    Args:
        comparison: its YAML file, or what `load_comparison` made of that.
        observer: by a search's place in `comparison.cells` and its cell, who is told what happens meanwhile.

    Returns:
        The rows of its table: every contestant's scores over seeds, costs and tests.

    Raises:
        UserError: a search can't be had, before anything runs.
        StoreError: the store can't be opened.
        PoolError: no worker can be had; repeat it to go on.
    """
    from moevolve.search.compare.rows import comparison_rows
    from moevolve.search.compare.run import run_comparison
    from moevolve.search.running.observer import Observer

    read = load_comparison(comparison) if isinstance(comparison, str | Path) else comparison
    with opened_store(read.store, create=True) as opened:
        return comparison_rows(run_comparison(read, opened, observer or (lambda place, cell: Observer())), opened)


def estimate(
    config: str | Path | RunConfig,
    *,
    model: str | None = None,
    keep: float | None = None,
    gpus: str | None = None,
    prompt_tokens: int | None = None,
    new_tokens: int | None = None,
    examples: int | None = None,
    utilisation: float | None = None,
    pilot: int | None = None,
    overrides: Overrides = (),
    on_stage: Callable[[str], None] = lambda _: None,
) -> Estimate:
    """Say what a search takes before it is launched: memory, evaluations, FLOPs, and about how many hours.

    Args:
        config: the search.
        model: folder of a config, or name of one that comes with moevolve, in the place of the run's.
        keep: share of the experts that is retained, in (0, 1], in the place of `genome.experts`.
        gpus: names of devices, separated by commas; None takes three common ones, or none for a run on the CPU.
        prompt_tokens: of every prompt, in the place of the tasks' data.
        new_tokens: of every answer, with `prompt_tokens`; None takes the task's `max_new_tokens`.
        examples: of every split, with `prompt_tokens`; None takes what the tasks' files say.
        utilisation: share of a GPU's peak FLOP/s that is assumed, in (0, 1]; None takes 0.4.
        pilot: how many individuals to evaluate for real, to tell how long the search takes on this machine; None reads
            nothing but the model's config.
        overrides: settings to change.
        on_stage: told what the pilot is doing.

    Raises:
        UserError: something in the configuration or the request can't be had.
        PoolError: no worker can be had for the pilot.
    """
    from moevolve.search.operations.estimate import estimate_run

    return estimate_run(
        config,
        override_lines(overrides),
        model=model,
        keep=keep,
        gpus=gpus,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        examples=examples,
        utilisation=utilisation,
        pilot=pilot,
        on_stage=on_stage,
    )
