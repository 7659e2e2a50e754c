"""Requests made before a search: what it would take, and which searches a comparison runs."""

from __future__ import annotations

from dataclasses import KW_ONLY
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from moevolve.search.requests.parameters import SETTINGS, NewStore, Overrides, RayAddress, RunSettings
from moevolve.search.requests.record import Flag, Request, about, record
from moevolve.search.requests.running import RunFile

if TYPE_CHECKING:  # the answers
    from moevolve.search.running.plan.records import Estimate


@record
class EstimateRequest(Request["Estimate"]):
    """Estimate what a search takes before it is launched: memory, evaluations, and with a pilot about how many hours.

    Nothing but the model's config.json is loaded, unless a pilot is asked for.

    Raises:
        UserError: the configuration or the request asks for something that can't be had.
        PoolError: no worker can be started for the pilot.
    """

    config: RunFile
    _: KW_ONLY
    overrides: RunSettings = ()
    model: Annotated[
        str | None,
        about("Folder of a config, or name of one that comes with moevolve, to replace the run's model."),
        Flag(metavar="DIR|NAME"),
    ] = None
    prompt_tokens: Annotated[int | None, about("Length of every prompt, instead of the tasks' data.", ge=1)] = None
    new_tokens: Annotated[
        int | None, about("With prompt_tokens, length of every answer; the task's limit if left out.", ge=1)
    ] = None
    examples: Annotated[
        int | None, about("With prompt_tokens, rows of every split; those of the task's file if left out.", ge=1)
    ] = None
    pilot: Annotated[
        int | None,
        about("Evaluate this many individuals on this machine, to measure how long the search takes.", ge=1),
        Flag(metavar="N"),
    ] = None


@record
class CompareRequest(Request[Any]):  # its answer, `Comparison`, is of a package above this one
    """Read a comparison, to look at it or to `compare`.

    Raises:
        UserError: the file is missing, isn't YAML, or has an unknown key or a bad value; the message names the field.
    """

    path: Annotated[str | Path, about("Comparison (YAML)."), Flag(metavar="CONFIG", kind=Path)]
    _: KW_ONLY
    overrides: Annotated[Overrides, about("Override settings, for example base.workers.count=4."), SETTINGS] = ()
    store: NewStore = None
    address: RayAddress = None
