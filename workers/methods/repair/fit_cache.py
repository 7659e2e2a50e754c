"""Fitted layers in files: for other splits, for candidates with the same first layers, and for other processes."""

from __future__ import annotations

import json
import shutil
from collections import OrderedDict
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

from safetensors import SafetensorError, safe_open
from torch import Tensor

from moevolve.workers.checkpoints.shards import ShardFile
from moevolve.workers.methods.repair.ridge import FitOutcome

# Folder of files of one process: /tmp is in memory on many systems.
_FOLDER = "/var/tmp" if Path("/var/tmp").is_dir() else gettempdir()


@dataclass(frozen=True, slots=True, eq=False)
class FittedLayer:
    """A fitted layer output, with all that is needed to apply the fit again.

    Attributes:
        selection: Neurons in place, int64 [n', neurons]; None for the edit's own.
        weights: Fitted weights by columns of the features, in the model's dtype: views of the layer's, or mapped.
        inputs: Gate and up projections, as `NetworksOutput.inputs` has them; empty if they weren't fitted.
        state: Residual stream after the layer, [tokens, hidden]; None if a later part of the layer is fitted, too.
        outcome: Result of the fit; None if it changed nothing.
    """

    selection: Tensor | None
    weights: tuple[tuple[slice, Tensor], ...]
    state: Tensor | None
    outcome: FitOutcome | None
    inputs: tuple[Tensor, ...] = ()


class FitCache:
    """Fitted layers by key, in files.

    Files of one process have no names, so that none is left whatever ends it. They may take a quarter of the disk's
    free space; beyond that, those that were used least recently go.

    Args:
        folder: Folder of files that other processes of this machine find as well; None for files of this process. Who
            makes the folder removes it. Keys don't tell models and settings of the engine apart.
        states: Keep states, which a candidate with the same first layers begins with.
    """

    def __init__(self, folder: Path | None = None, states: bool = True) -> None:
        # A folder of another machine isn't made here, where nobody would remove it.
        self._folder = folder if folder is not None and folder.is_dir() else None
        self._states, self._nbytes = states, 0
        self._most = shutil.disk_usage(self._folder or _FOLDER).free // 4
        self._layers: OrderedDict[str, tuple[FittedLayer, int]] = OrderedDict()

    def get(self, key: str) -> FittedLayer | None:
        """Return the fit of a layer output, its tensors mapped from the file; None if there is none."""
        if key in self._layers:
            self._layers.move_to_end(key)
            return self._layers[key][0]
        if self._folder is not None:
            with suppress(OSError, SafetensorError):  # there is none, or a machine has failed while it was written
                self._add(key, self._folder / f"{key}.safetensors")
                return self._layers[key][0]
        return None

    def put(self, key: str, fitted: FittedLayer) -> None:
        """Keep the fit of a layer output, unless the disk is full."""
        # Mapped files stay readable without a name.
        with suppress(OSError, SafetensorError), TemporaryDirectory(dir=self._folder or _FOLDER) as folder:
            file = Path(folder) / f"{key}.safetensors"
            _write(file, fitted, self._states)
            if file.stat().st_size > self._most:
                return
            if self._folder is None:
                self._add(key, file)
            else:
                self._add(key, file.rename(self._folder / file.name))

    def _add(self, key: str, file: Path) -> None:
        _, before = self._layers.pop(key, (None, 0))
        size = file.stat().st_size
        self._layers[key] = _read(file), size
        self._nbytes += size - before
        while self._nbytes > self._most:
            dropped, (_, size) = self._layers.popitem(last=False)
            self._nbytes -= size
            if self._folder is not None:
                (self._folder / f"{dropped}.safetensors").unlink(missing_ok=True)


def _write(file: Path, fitted: FittedLayer, states: bool) -> None:
    tensors = {"selection": fitted.selection, "state": fitted.state if states else None}
    tensors |= {f"weights {columns.start} {columns.stop}": weights for columns, weights in fitted.weights}
    tensors |= {f"inputs {place}": each for place, each in enumerate(fitted.inputs)}
    outcome = json.dumps(None if fitted.outcome is None else asdict(fitted.outcome))
    held = {name: each for name, each in tensors.items() if each is not None}
    shard = ShardFile(file, list(held), {"outcome": outcome})
    for name, each in held.items():
        shard.write(name, each.detach().cpu().contiguous())  # one by one: together they are as large as the layer
    shard.finish()


def _read(file: Path) -> FittedLayer:
    with safe_open(file, "pt") as stored:
        tensors: dict[str, Tensor] = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        outcome = json.loads(stored.metadata()["outcome"])
    columns = sorted(tuple(map(int, name.split()[1:])) for name in tensors if name.startswith("weights "))
    return FittedLayer(
        tensors.get("selection"),
        tuple((slice(start, stop), tensors[f"weights {start} {stop}"]) for start, stop in columns),
        tensors.get("state"),
        None if outcome is None else FitOutcome(**outcome),
        tuple(tensors[f"inputs {place}"] for place in range(sum(name.startswith("inputs ") for name in tensors))),
    )
