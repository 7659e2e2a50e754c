"""What a search takes, before it is launched."""

from __future__ import annotations

from dataclasses import KW_ONLY, replace
from typing import TYPE_CHECKING, Annotated

from moevolve.evaluators.errors import UserError
from moevolve.search.config.files import as_override, as_run_config, find_model, override_lines
from moevolve.search.interface.parameters import RunFile, RunSettings
from moevolve.search.interface.request import Flag, Request, about, record
from moevolve.search.running.observer import SILENT, Observer
from moevolve.search.running.weights import resolved_model_path

if TYPE_CHECKING:  # they load torch
    from moevolve.search.running.plan.records import Estimate
    from moevolve.search.running.plan.workload import Prompts


@record
class EstimateRequest(Request):
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
        int | None, about("With prompt_tokens, length of every answer; default: the task's limit.", ge=1)
    ] = None
    examples: Annotated[
        int | None, about("With prompt_tokens, rows of every split; default: those of the task's file.", ge=1)
    ] = None
    pilot: Annotated[
        int | None,
        about("Evaluate this many individuals on this machine, to measure how long the search takes.", ge=1),
        Flag(metavar="N"),
    ] = None

    def answer(self, *, observer: Observer = SILENT) -> Estimate:
        changes = list(override_lines(self.overrides))
        if self.model is not None:
            changes.append(as_override("model.path", resolved_model_path(find_model(self.model))))
        config = as_run_config(self.config, changes)

        from moevolve.search.running.plan.estimate import estimate

        found = estimate(config, self._prompts())
        if self.pilot is None:
            return found
        from moevolve.search.running.launch import set_up_new
        from moevolve.search.running.plan.pilot import measure

        return replace(found, pilot=measure(set_up_new(config), self.pilot, on_stage=observer.on_stage))

    def _prompts(self) -> Prompts | None:
        from moevolve.search.running.plan.workload import Prompts

        if self.prompt_tokens is not None:
            return Prompts(self.prompt_tokens, self.new_tokens, self.examples)
        for name, value in (("--new-tokens", self.new_tokens), ("--examples", self.examples)):
            if value is not None:
                raise UserError(f"{name} goes with --prompt-tokens: without it lengths are those of the tasks' data")
        return None
