"""A model of the lab, verb by verb, in a process of its own: what `bench_real.py` runs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from real_size.children import in_child
from real_size.published import SPECS, Spec
from real_size.verbs import Row

HOST_LIMIT = 12 << 30


def rows_of(
    name: str, model: Path, task: Path, originals: str, verbs: tuple[str, ...], capacity: int, told: Path
) -> list[Row]:
    """Do verbs one after the other in a process of its own.

    Args:
        name: of the lab's model.
        model: its folder.
        task: from `write_task`.
        originals: where original experts stay.
        verbs: which.
        capacity: bytes of the device.
        told: a file to which the process writes rows as they come, so that what ends it leaves those before.
    """
    arguments: dict[str, Any] = {"name": name, "model": str(model), "task": str(task), "originals": originals}
    arguments |= {"verbs": verbs, "capacity": capacity, "told": str(told)}
    mapped = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    outcome = in_child("real_size.matrix:tell", arguments, data_limit=HOST_LIMIT + mapped)
    found = [Row(**json.loads(line)) for line in told.read_text().splitlines()] if told.exists() else []
    why = f"not reached: {outcome.failure or 'the process ended'}"
    return found + [Row(name, originals, verb, 0, 0, failure=why) for verb in verbs[len(found) :]]


def tell(name: str, model: str, task: str, originals: str, verbs: list[str], capacity: int, told: str) -> None:
    """In the child: see `rows_of`."""
    import torch

    from real_size.meter import MeteredDevice
    from real_size.verbs import Session

    torch.set_num_threads(1)
    with MeteredDevice(capacity).installed() as device, Path(told).open("w") as file:
        session = Session(SPECS[name], Path(model), Path(task), originals, device)
        for row in session.rows(tuple(verbs)):
            file.write(json.dumps(asdict(row)) + "\n")
            file.flush()


def scaled_card(spec: Spec, frame: int) -> int:
    """A card's bytes in proportion to the layers that are left; what lies outside of layers is there whole.

    Args:
        spec: which model.
        frame: bytes outside of its layers.
    """
    share = spec.layers / spec.published["num_hidden_layers"]
    return frame + int((spec.card - frame) * share)
