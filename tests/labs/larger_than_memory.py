"""A search and its exports in processes that may take less private memory than their checkpoint has weights."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import json
import multiprocessing
import os
import resource
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from killing import forked

NAME = "large"


def search(run_file: str, folder: str, room: int | None, experts_gb: float) -> dict[str, Any]:
    """Run a search in this process.

    Args:
        run_file: Configuration of the run, whose name is `large`.
        folder: Folder for the store.
        room: Bytes of private memory that may be taken once the libraries are loaded, also by what this process does
            after the search; None for no further limit.
        experts_gb: Memory that candidates' experts may take, in units of 10^9 bytes.
    """
    import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: F401 - what is loaded now doesn't count
    from dense_lab import search as run_search
    from local_workers import local_pool
    from search_lab import population

    from moevolve.search.config.files import load_run_config
    from moevolve.search.running.calibration import calibrated_setup
    from moevolve.search.running.launch import register
    from moevolve.search.running.set_up import set_up
    from moevolve.store.repository import Store
    from moevolve.workers.contract.capacity import CAPACITY

    os.environ[CAPACITY] = str(experts_gb)
    with Store.open(f"sqlite:///{folder}/store.db") as store:
        setup = set_up(load_run_config(Path(run_file)), NAME)
        register(setup, store)
        _limit(room)
        started = time.perf_counter()
        setup = calibrated_setup(setup, store, local_pool(setup).calibrate)
        gc.collect()  # the model that was calibrated; the search loads it again
        run_search(setup, store)
        seconds = time.perf_counter() - started
        rows = store.history(NAME)
        whole = json.dumps([[str(value) for value in row] for row in population(store, NAME)])
    return {
        "population": hashlib.sha256(whole.encode()).hexdigest(),
        "individuals": len(rows),
        "failures": [row.failure for row in rows if row.failure is not None],
        "best": {row.phase: row.index for row in sorted(rows, key=lambda row: row.fitness or 0.0)},
        "seconds": seconds,
    }


def searches_in_a_fork(there: dict[str, Any], here: dict[str, Any]) -> dict[str, Any]:
    """`search_where_it_fits` in a process of its own."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = forked(_send, there, here, sender)
    sender.close()
    found: dict[str, Any] = receiver.recv()
    process.join()
    return found


def _send(there: dict[str, Any], here: dict[str, Any], sender: Connection) -> None:
    # Large blocks go back to the kernel when they are freed, so that what is held is what is booked; see malloc.h.
    for setting, value in ((-3, 1 << 18), (-1, 1 << 18), (-8, 2)):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_ARENA_MAX
        ctypes.CDLL(None).mallopt(setting, value)
    sender.send(search_where_it_fits(there, here))


def search_where_it_fits(there: dict[str, Any], here: dict[str, Any]) -> dict[str, Any]:
    """Two searches in this process, with the arguments of `search`: the first one is too large for the room it has,
    and the second one has the same room. Returns what `search` does, and why the first one was `refused`."""
    from moevolve.evaluators.errors import UserError

    try:
        search(**there)
    except UserError as error:
        refused = str(error)
    else:
        refused = ""
    gc.collect()
    return {"refused": refused, **search(**here | {"room": None})}


def export_one(folder: str, individual: int, room: int | None, experts_gb: float) -> str:
    """Export an individual of the search as a stock checkpoint; returns the SHA-256 of its weights.

    Args:
        folder, room, experts_gb: See `search`.
        individual: Its index.
    """
    import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: F401

    from moevolve.search.interface.export import ExportRequest
    from moevolve.store.repository import Store
    from moevolve.workers.contract.capacity import CAPACITY

    os.environ[CAPACITY] = str(experts_gb)
    _limit(room)
    with Store.open(f"sqlite:///{folder}/store.db") as store:
        request = ExportRequest(f"{NAME}:{individual}", Path(folder) / str(individual), form="stock")
        with (request.answer(store).directory / "model.safetensors").open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


def _limit(room: int | None) -> None:
    """Let the kernel refuse more than `room` bytes of private memory beyond what this process has."""
    if room is not None:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        held = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData:"))
        resource.setrlimit(resource.RLIMIT_DATA, (held + room, held + room))
