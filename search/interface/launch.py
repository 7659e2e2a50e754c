"""Launching a search."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import Annotated

from pydantic import InstanceOf

from moevolve.search.config.files import as_run_config, override_lines
from moevolve.search.config.run import RunConfig
from moevolve.search.interface.opening import opened_store
from moevolve.search.interface.parameters import (
    SERVER_VARIABLE,
    SILENT,
    STORE_VARIABLE,
    NewSearchName,
    RayAddress,
    RunFile,
    RunSettings,
    Watcher,
    given_lines,
)
from moevolve.search.interface.request import Flag, Request, about, record
from moevolve.search.loop.final_table import FinalTable
from moevolve.store.repository import Store


@record
class LaunchRequest(Request):
    """Launch a search and follow it to its end. Interrupting it leaves it resumable.

    The answer is the winner and the final table.

    Raises:
        UserError: the configuration asks for something that can't be had, its cluster can't be joined, or the name is
            taken.
        StoreError: the store can't be opened, or the search to continue was cancelled.
        PoolError: no worker can be started; `resume` continues the search.
    """

    config: RunFile
    _: KW_ONLY
    overrides: RunSettings = ()
    store: Annotated[
        str | InstanceOf[Store] | None,
        about(
            "SQLAlchemy URL of the store, made if need be; default: the configuration's. Or "
            "http(s) URL of a server, which launches its own configuration of this name."
        ),
        Flag("--store --server", kind=str, variables=(SERVER_VARIABLE, STORE_VARIABLE)),
    ] = None
    name: NewSearchName = None
    address: RayAddress = None
    or_resume: Annotated[bool, about("Continue the search of this name if it exists.")] = False
    search_id: Annotated[
        str | None, about("Id of the search, which continues if it exists; default: a new one."), Flag("--id")
    ] = None

    def answer(self, *, observer: Watcher = SILENT) -> FinalTable:
        changes = given_lines({"store": self.store, "name": self.name, "workers.address": self.address})
        settings = as_run_config(self.config, (*override_lines(self.overrides), *changes))

        # Not sooner: what is wrong in a configuration is reported at once, without waiting for Ray.
        from moevolve.search.pools.ray_actor import ModelProbe
        from moevolve.search.running.launch import launch, set_up_new

        source = "this configuration" if isinstance(self.config, RunConfig) else str(self.config)
        given = self.search_id is not None
        with ModelProbe() as probe:
            probe.join(settings)  # a wrong address must not take the search's name
            setup = set_up_new(settings, self.search_id, probe.call)
            with opened_store(settings.store if self.store is None else self.store, create=True) as store:
                return launch(setup, store, observer, self.or_resume or given, source, only_this=given, probe=probe)
