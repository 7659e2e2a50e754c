"""Steering searches that this server has started, before their drivers can be asked through the store.

A search is stored only once its model and tasks are known, and an interrupted one has no driver until then either.
"""

from __future__ import annotations

import threading
import time

from moevolve.search.server.dependencies import ServerState
from moevolve.store.errors import NotFoundError, StoreError
from moevolve.store.records import Control, DesiredState

_POLL_S = 0.5
"""Seconds between tries to pass a pause on: a driver that has begun evaluates until the next one."""


def steer_starting(server: ServerState, search: str, desired_state: DesiredState) -> Control | None:
    """End the process that starts a search, or have the search pause as soon as it has a driver.

    Args:
        server: The server, whose processes are looked through.
        search: Name of the search, or id of a stored one.
        desired_state: `paused`; anything else ends the process.

    Returns:
        What the process was asked for; None if this server is starting no such search.
    """
    try:
        name = server.store.search(search).name
    except NotFoundError:
        name = search
    job = server.processes.ask(name, desired_state)
    if job is None:
        return None
    if desired_state == "paused":
        threading.Thread(target=_pause_when_driven, args=(server, name), daemon=True).start()
    return Control(f"process {job.process} of the server", 0, True, desired_state, None, 0, "starting")


def _pause_when_driven(server: ServerState, name: str) -> None:
    """Pass the pause on once there is a driver, unless it is withdrawn or the process ends."""
    while server.processes.asked(name) == "paused":
        try:
            server.writer.ask(server.store.search(name).id, "paused")
        except StoreError:  # not stored yet, not driven yet, or a store that is away for a while
            time.sleep(_POLL_S)
        else:
            server.processes.ask(name, None)
