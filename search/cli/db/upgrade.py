"""`db upgrade`."""

from __future__ import annotations

import moevolve.db
from moevolve.search.cli._console import output, print_json
from moevolve.search.cli._options import DEFAULT_STORE, JsonOption, StoreOption


def upgrade(store: StoreOption = DEFAULT_STORE, as_json: JsonOption = False) -> None:
    """Bring a store to the schema that this version writes; refused while a search of it is being run."""
    done = moevolve.db.upgrade(store)
    if as_json:
        print_json(done)
    elif done.before == done.after:
        output.print(f"nothing to do: the store has schema {done.after}")
    else:
        output.print(f"upgraded from schema {done.before} to {done.after}")
