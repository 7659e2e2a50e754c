"""Parameters that several use cases share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import InstanceOf

from moevolve.search.config.files import override_lines
from moevolve.search.config.run import LONGEST_NAME, RunConfig
from moevolve.search.interface.request import Flag, about
from moevolve.store.repository import Store
from moevolve.workers.contract.card import CheckpointForm, ListForm, MtpLayers
from moevolve.workers.contract.settings import Device, Dtype

ScoredSplit = Literal["search", "dev", "test"]
# Settings by dotted path, or `KEY=VALUE` lines as on the command line.
Overrides = Mapping[str, object] | Sequence[str]

SETTINGS = Flag("--set", "KEY=VALUE", list[str])
STORE_VARIABLE = "MOEVOLVE_STORE"

SearchRef = Annotated[str, about("Name or id of the search.", max_length=LONGEST_NAME)]
IndividualRef = Annotated[
    str,
    about("The individual as SEARCH:INDEX, for example demo:137.", max_length=LONGEST_NAME + 20),
    Flag(metavar="INDIVIDUAL"),
]
IndividualOrFull = Annotated[
    str, about("The individual as SEARCH:INDEX, or `full` for the unedited model."), Flag(metavar="INDIVIDUAL|full")
]
SearchOfFull = Annotated[str | None, about("With `full`, the search whose model it is.")]
Task = Annotated[str, about("Any task, or NAME@FITNESS; also one that the search did not use.")]
TaskSplit = Annotated[ScoredSplit, about("Split of the task.")]
ModelPath = Annotated[
    str | None,
    about("The search's checkpoint (folder or hub id), if it isn't where the store says."),
    Flag(metavar="PATH"),
]
ModelDevice = Annotated[
    Device | None,
    about("Where to hold the model; default: the search's device, or the CPU if that was a GPU and none is here."),
]
ModelDtype = Annotated[Dtype | None, about("Dtype of the parameters; default: the search's.")]
Threads = Annotated[int | None, about("Threads of torch; default: the search's `engine.threads`.", ge=1)]
ExportForm = Annotated[
    Literal[CheckpointForm, ListForm] | None,
    about(
        "`source` copies the kept experts' bytes, in the checkpoint's own format; `stock` is a plain "
        "`transformers` checkpoint; `native` has its own modelling code. Default: `source` for an individual that "
        "only prunes experts of a quantised checkpoint, `stock` for others where that is exact. `list`, `vllm-ascend` "
        "and `easy-ep` are files that say which experts are kept."
    ),
]
Mtp = Annotated[
    MtpLayers | None,
    about(
        "What the `source` form does with layers for multi-token prediction: `drop` (default) writes none, "
        "`prune` keeps the same experts of them as of the last MoE layer, `keep` copies them whole."
    ),
]
Requantise = Annotated[
    bool,
    about(
        "Write quantised tensors that the individual changes (by repair or merging) anew in the "
        "checkpoint's format; all others are copied byte for byte."
    ),
]


ModelSettings = Annotated[
    Overrides, about("Change settings of the search's `model.*` or `engine.*` for this once."), SETTINGS
]
RunSettings = Annotated[
    Overrides, about("Override settings, for example task_aggregation=worst; repeatable."), SETTINGS
]
# What to search. Python also takes a configuration that was read before.
RunFile = Annotated[
    str | Path | InstanceOf[RunConfig], about("Run configuration (YAML)."), Flag(metavar="CONFIG", kind=Path)
]
NewSearchName = Annotated[str | None, about("Name of the search; default: the configuration's.")]
# Where a search goes. Python also takes an open store.
NewStore = Annotated[
    str | InstanceOf[Store] | None,
    about("SQLAlchemy URL of the store, made if need be; default: the configuration's."),
    Flag(kind=str, variables=(STORE_VARIABLE,)),
]


def given_lines(settings: Mapping[str, object]) -> tuple[str, ...]:
    """Return the settings that aren't None as `KEY=VALUE` lines, an open store by its URL."""
    given = {key: value.url if isinstance(value, Store) else value for key, value in settings.items()}
    return override_lines({key: value for key, value in given.items() if value is not None})
