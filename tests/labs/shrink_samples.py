"""Records of shrinks at every stage, as the shrinks would have left them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from moevolve.search.results.kept import Kept
from moevolve.search.running.observer import Observer
from moevolve.search.shrink.findings import Speed, TaskCheck, TaskLook, Written
from moevolve.search.shrink.loops import Loops
from moevolve.search.shrink.record import Checks, Journal, ShrinkRecord, SizeTrial
from moevolve.store.repository import Store

CHECK = TaskCheck("chats", 16, 0, 1, structured=16, broken=1, agreement=0.8, perplexity=1.6, recovery=0.9)
LOOPS = Loops(16, 512, full=0, shrunk=1, low=-0.1, high=0.2, p=0.5)


def shrink_record(folder: Path, name: str = "small", **changes: Any) -> ShrinkRecord:
    """The record of a shrink into a folder of this name, which has begun."""
    begun = ShrinkRecord(
        name=name,
        asked={"model": "/models/tiny", "data": ["/data/named.jsonl"], "experts": "50%", "output": str(folder / name)},
        request={"--experts": "50%", "--data /data/named.jsonl": "f00d"},
        amount="--experts 50%",
        model="/models/tiny",
        folder=folder / name,
        run_file=folder / f"{name}.shrink" / "run.yaml",
    )
    return replace(begun, **changes)


def stages_of(folder: Path) -> dict[str, ShrinkRecord]:
    """Map names of stages to the records of one shrink at them, in the order of the stages."""
    reading = shrink_record(folder, stage="data")
    sizes = replace(
        reading,
        stage="sizes",
        seconds={"data": 1.0, "settings": 9.0, "look": 4.0},
        look=(TaskLook("chats", 30, 0.95, 0.2),),
        unit="of 8 experts",
        sizes=(SizeTrial(4, "small-4-one-shots", False, Kept(0.6, 0.5, 0.7), False),),
    )
    searching = replace(sizes, stage="search", search="small-6", choices=("6 of 8 experts keep enough",))
    checked = replace(searching, stage="export", checks=Checks("small-6:0", 60.0, (CHECK,), LOOPS))
    written = Written(folder / "small", "stock", 1000, ("transformers",))
    finished = replace(
        checked, stage="speed", status="finished", written=written, speed=Speed("cpu", 10.0, 20.0, 1.9, 2.1, None, None)
    )
    fault = replace(CHECK, faults=("lost 9 of 16 answers",))
    refused = replace(checked, status="refused", checks=Checks("small-6:0", 60.0, (fault,), LOOPS))
    return {
        "reading": reading,
        "sizes": sizes,
        "searching": searching,
        "checked": checked,
        "finished": finished,
        "refused": replace(refused, failure="chats: the candidate lost 9 of 16 answers"),
        "interrupted": replace(searching, status="interrupted"),
        "failed": replace(reading, status="failed", failure="named.jsonl:3: not JSON"),
    }


def put(store: Store, record: ShrinkRecord) -> None:
    """Store a record."""
    Journal(store, Observer(), record).note()
