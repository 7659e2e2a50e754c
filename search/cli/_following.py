"""What commands share that run a search: following it, and the form of those on a stored one."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

import moevolve
from moevolve._arguments import is_server
from moevolve.search.cli._console import STOPPED, errors, print_json, told_in_a_line
from moevolve.search.cli._options import (
    DEFAULT_STORE,
    AddressOption,
    ChangeOption,
    JsonOption,
    SearchArgument,
    StoreOption,
)
from moevolve.search.cli.output.final_table import print_standings
from moevolve.search.cli.output.progress import watch
from moevolve.store.session import without_password

if TYPE_CHECKING:
    from moevolve import Observer, RunConfig, Standings

INTERRUPTED = "interrupted; everything evaluated so far is in the store"


def follow(run: Callable[[Observer], Standings | None], as_json: bool, stopped: int = STOPPED) -> None:
    """Run a search under a progress bar, then print its final table, if it has come to one.

    From when the search is in the store and begins, Ctrl-C and a lack of workers end it with a line that says how to
    go on.

    Args:
        run: runs it.
        as_json: print the table as JSON.
        stopped: exit code if the search is stopped or cancelled from elsewhere.
    """
    begun: list[RunConfig] = []
    with ExitStack() as stack:
        shown = moevolve.Observer()

        def begin(config: RunConfig) -> None:
            nonlocal shown
            begun.append(config)
            where = shlex.quote(without_password(config.store))
            hint = f"continue with: moevolve resume {config.name} --store {where}"
            told = f"{INTERRUPTED}, {hint}"
            if is_server(config.store):
                told = f"the search goes on; end it with: moevolve stop {config.name} --server {where}"
            stack.enter_context(told_in_a_line(told, moevolve.PoolError, hint, stopped=stopped))
            shown = stack.enter_context(watch(config.name))

        found = run(
            moevolve.Observer(
                begin,
                lambda note: errors.print(f"{begun[0].name}: {note}", soft_wrap=True),
                # `shown` is another one by then.
                lambda stage: shown.on_stage(stage),  # noqa: PLW0108
                lambda progress: shown.on_progress(progress),  # noqa: PLW0108
            )
        )
    if found is None:
        return
    if as_json:
        print_json(found)
    else:
        print_standings(found, begun[0].store)


def on_stored_search(verb: Callable[..., Standings | None], said: str) -> Callable[..., None]:
    """A command that runs a stored search on, of the signature that all of them share.

    Args:
        verb: the function of the package that does it.
        said: what `--help` says of the command.
    """

    def command(
        search: SearchArgument,
        store: StoreOption = DEFAULT_STORE,
        overrides: ChangeOption = None,
        address: AddressOption = None,
        as_json: JsonOption = False,
    ) -> None:
        def run(observer: Observer) -> Standings | None:
            return verb(search, store=store, overrides=overrides or (), address=address, observer=observer)

        follow(run, as_json)

    command.__doc__ = said
    return command
