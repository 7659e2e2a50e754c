"""`launch`, `resume` and `retry`."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moevolve.evaluators.errors import UserError
from moevolve.search.cli._console import DEFAULT_STORE, JsonOption, StoreOption, errors, print_json, told_in_a_line
from moevolve.search.config.files import apply_override, load_run_config, parse_run_config, parse_stored_config
from moevolve.search.config.run import RunConfig

if TYPE_CHECKING:
    from moevolve.search.loop.setup import SearchSetup
    from moevolve.store.repository import Store

INTERRUPTED = "interrupted; everything evaluated so far is in the store"

SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a setting, e.g. genome.experts=4.")
]
ChangeOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Only `workers.*` and `final.*` may change.")
]
AddressOption = Annotated[
    str | None, typer.Option("--address", help="Ray cluster to join (`auto` or host:port); default: start one here.")
]


def register(app: typer.Typer) -> None:
    app.command()(launch)
    app.command()(resume)
    app.command()(retry)


def as_override(key: str, value: str) -> str:
    """What `--set` takes for a setting that is text, whatever else YAML would read in it."""
    return f"{key}={json.dumps(value)}"


def launch(
    config: Annotated[Path, typer.Argument(help="Run configuration (YAML).")],
    overrides: SetOption = None,
    store: Annotated[
        str | None, typer.Option("--store", envvar="MOEVOLVE_STORE", help="SQLAlchemy URL; default: the config's.")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of the search; default: the config's.")] = None,
    address: AddressOption = None,
    or_resume: Annotated[
        bool, typer.Option("--or-resume", help="Continue the search of this name if it exists.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Launch a search and follow it to its end. Ctrl-C leaves it resumable."""
    changes = {"store": store, "name": name, "workers.address": address}
    extra = tuple(as_override(key, value) for key, value in changes.items() if value is not None)
    settings = load_run_config(config, (*(overrides or ()), *extra))

    from moevolve.search.service import launch as service
    from moevolve.store.repository import Store

    setup = service.set_up_new(settings)
    with Store.open(settings.store) as opened:
        exists = any(summary.search.name == settings.name for summary in opened.searches())
        if or_resume and exists:
            _follow(_relaunched(settings, opened, config), opened, as_json)
        else:
            service.register(setup, opened)
            _follow(setup, opened, as_json)


def _relaunched(settings: RunConfig, store: Store, path: Path) -> SearchSetup:
    """The setup of the stored search of this name, if that is what the settings describe."""
    from moevolve.search.service import launch as service

    record = store.search(settings.name)
    if parse_stored_config(record.config).config_hash != settings.config_hash:
        raise UserError(
            f"--or-resume: search {record.name} is in the store with other settings than {path} has now; give this one "
            f"another name with --name, or continue that one with `moevolve resume {record.name}`"
        )
    return service.set_up_stored(store, record.id, lambda _: settings)


def resume(
    search: Annotated[str, typer.Argument(help="Name or id of the search.")],
    store: StoreOption = DEFAULT_STORE,
    overrides: ChangeOption = None,
    address: AddressOption = None,
    as_json: JsonOption = False,
) -> None:
    """Continue a search from the store: the population comes out as if it had never stopped."""
    from moevolve.store.repository import Store

    with Store.open(store, create=False) as opened:
        _follow(_stored_setup(opened, search, store, overrides, address), opened, as_json)


def retry(
    search: Annotated[str, typer.Argument(help="Name or id of the search.")],
    store: StoreOption = DEFAULT_STORE,
    overrides: ChangeOption = None,
    address: AddressOption = None,
    as_json: JsonOption = False,
) -> None:
    """Evaluate individuals again that failed by fault of workers or of time, and all that was made in their sight."""
    from moevolve.search.service import launch as service
    from moevolve.store.repository import Store

    with Store.open(store, create=False) as opened:
        setup = _stored_setup(opened, search, store, overrides, address)
        failures, later = service.take_back_failures(setup, opened)
        if not failures:
            errors.print(f"{setup.config.name}: nothing to retry: no individual failed by fault of a worker or of time")
            return
        errors.print(f"{setup.config.name}: failures to retry: {failures}, later individuals to make again: {later}")
        _follow(setup, opened, as_json)


def _stored_setup(store: Store, search: str, url: str, overrides: list[str] | None, address: str | None) -> SearchSetup:
    """The setup of a stored search, with settings changed that may be."""
    from moevolve.search.service import launch as service

    def adjust(stored: RunConfig) -> RunConfig:
        data: dict[str, Any] = stored.model_dump(mode="json") | {"store": url}
        for override in (*(overrides or ()), *([as_override("workers.address", address)] if address else [])):
            apply_override(data, override)
        return parse_run_config(data, f"search {search}")

    return service.set_up_stored(store, search, adjust)


def _follow(setup: SearchSetup, store: Store, as_json: bool) -> None:
    """Run a recorded search under a progress bar, then print its final table."""
    from moevolve.search.cli.final_table import print_standings
    from moevolve.search.cli.progress import watch
    from moevolve.search.pools.base import PoolError
    from moevolve.search.service import launch as service
    from moevolve.store.session import without_password

    name = setup.config.name
    hint = f"continue with: moevolve resume {name} --store {shlex.quote(without_password(setup.config.store))}"
    with told_in_a_line(f"{INTERRUPTED}, {hint}", PoolError, hint), watch(name) as observer:
        found = service.execute(setup, store, observer)
    if as_json:
        print_json(found)
    else:
        print_standings(found, setup.config.store)
