"""Size, memory and speed of stored individuals, their full model, and checkpoint folders."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import KW_ONLY
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field

from moevolve.evaluators.errors import UserError
from moevolve.search.config.run import TaskSection
from moevolve.search.interface.opening import opened_reader
from moevolve.search.interface.parameters import ModelDtype, ModelPath, SearchOfFull, TaskSplit
from moevolve.search.interface.request import Flag, Request, about, record
from moevolve.search.loop.scores import FULL
from moevolve.search.running.candidates import Candidate, find_candidate, is_stored, prepared_split
from moevolve.search.running.observer import SILENT, Observer
from moevolve.store.reader import StoreReader
from moevolve.workers.checkpoints.files import gguf_file
from moevolve.workers.contract.card import ExportError
from moevolve.workers.contract.settings import Device, EngineConfig, ModelConfig
from moevolve.workers.profiling.report import (
    NEW_TOKENS,
    ProfiledModel,
    ProfileReport,
    ProfileSettings,
    TaskPrompts,
    usual_prompt_tokens,
)


def _parsed_sizes(given: object) -> object:
    """Parse batch sizes that the command line gives as `1,8,32`."""
    if not isinstance(given, str):
        return given
    parts = [part.strip() for part in given.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UserError(f"--batch-sizes: {given!r} are not whole numbers from 1 on, such as 1,8,32")
    return sorted({int(part) for part in parts})


@record
class ProfileRequest(Request):
    """Measure size, memory and speed of models as plain `transformers` runs them, and compare with the full model.

    Individuals are exported to a temporary folder (TMPDIR) first. Nothing is stored.

    Raises:
        UserError: a folder has no checkpoint, individuals are of different models, or a model can't be profiled so.
        StoreError: the store, search or individual doesn't exist.
        ProfileError: a model's process died, or an export failed its verification.
    """

    opens = True
    models: Annotated[
        Sequence[str],
        about("Individuals (SEARCH:INDEX), `full`, and folders of checkpoints.", min_length=1),
        Flag(metavar="INDIVIDUAL|full|DIR..."),
    ]
    _: KW_ONLY
    batch_sizes: Annotated[
        Sequence[Annotated[int, Field(ge=1)]],
        BeforeValidator(_parsed_sizes),
        about("Numbers of sequences per batch; default: 1,8,32.", min_length=1),
        Flag(metavar="N,N...", kind=str),
    ] = (1, 8, 32)
    prompt_tokens: Annotated[
        int | None, about("Length of arbitrary prompts; default: half of the model's positions, at most 512.", ge=1)
    ] = None
    new_tokens: Annotated[
        int | None, about("Decoding steps after the prompt; default: the task's limit, or 32 without a task.", ge=1)
    ] = None
    task: Annotated[str | None, about("Run this task's prompts instead of arbitrary tokens.")] = None
    split: TaskSplit = "test"
    timed_runs: Annotated[int, about("Timed runs per batch size; the median is reported.", ge=1)] = 5
    device: Annotated[Device, about("Where to run the models.")] = "auto"
    threads: Annotated[int | None, about("CPU threads of torch; default: torch's own.", ge=1)] = None
    search: SearchOfFull = None
    model: ModelPath = None
    trust_remote_code: Annotated[bool, about("Let modelling code in a checkpoint's folder run.")] = False
    dtype: ModelDtype = None

    def answer(self, store: str | StoreReader | None, *, observer: Observer = SILENT) -> ProfileReport:
        # Folders alone need no store, and are compared with the first of them.
        stored = [name for name in self.models if is_stored(name)]
        if stored and store is None:
            raise UserError(f"{stored[0]}: say in which store it is")
        with nullcontext() if store is None or not stored else opened_reader(store) as opened:
            return _profile(opened, self, observer.on_stage)


def _profile(store: StoreReader | None, request: ProfileRequest, on_stage: Callable[[str], None]) -> ProfileReport:
    from moevolve.workers.profiling.checkpoints import check_folder, export_models, position_limit
    from moevolve.workers.profiling.report import ProfileError
    from moevolve.workers.profiling.run import profile_models

    names = tuple(dict.fromkeys(request.models))
    trusted = request.trust_remote_code
    models = {
        name: ProfiledModel(name, str(check_folder(name, trusted)), trust_remote_code=trusted)
        for name in names
        if not is_stored(name)
    }
    configs = [ModelConfig(model.path, trust_remote_code=trusted) for model in models.values()]
    candidates: dict[str, Candidate] = {}
    if store is not None:
        individuals = [name for name in names if is_stored(name) and name != FULL]
        candidates = {name: find_candidate(store, name, model=request.model) for name in individuals}
        candidates = candidates or {FULL: find_candidate(store, FULL, request.search, request.model)}
    full = _full_model(candidates, request) if candidates else None
    if full is not None:
        configs.append(full)
    prompts, new_tokens = _prompts(request, candidates, configs)
    settings = _settings(request, full, min(position_limit(config) for config in configs), prompts, new_tokens)
    with tempfile.TemporaryDirectory(prefix="moevolve-profile-") as scratch:
        if full is not None:
            on_stage("exporting")
            models[FULL] = ProfiledModel.full(FULL, full)
            edits = [(name, each.edit) for name, each in candidates.items() if name != FULL]
            try:
                models |= {model.label: model for model in export_models(full, edits, Path(scratch))} if edits else {}
            except ExportError as error:
                raise ProfileError(f"{error.reason}; nothing is kept of it, which `moevolve export` does") from error
        order = [*([FULL] if full is not None else []), *(name for name in names if name != FULL)]
        processes = Path(scratch, "processes")
        processes.mkdir()
        return profile_models([models[name] for name in order], settings, processes, on_stage)


def _full_model(candidates: dict[str, Candidate], request: ProfileRequest) -> ModelConfig:
    """Return the one model that all candidates edit, on the device to profile it on."""
    models = {(each.facts.fingerprint, each.config.model.dtype): name for name, each in candidates.items()}
    if len(models) > 1:
        one, other, *_ = models.values()
        raise UserError(f"{one} and {other} are of different models or dtypes; profile one model's at a time")

    from moevolve.workers.checkpoints.loading import placed

    model = next(iter(candidates.values())).config.model
    if gguf_file(model) is not None:
        raise UserError(
            f"{model.path} is a GGUF file, and profiles require one that transformers runs; export individuals with "
            "--form stock, and profile their folders"
        )
    return placed(model, request.device, request.dtype)


def _prompts(
    request: ProfileRequest, candidates: dict[str, Candidate], models: Sequence[ModelConfig]
) -> tuple[TaskPrompts | None, int]:
    """Prompts of the task as the first model reads them, and the number of new tokens."""
    if request.task is None:
        return None, NEW_TOKENS if request.new_tokens is None else request.new_tokens
    if request.prompt_tokens is not None:
        raise UserError("--prompt-tokens: prompts of a task are as long as they are; give it or --task, not both")
    candidate = next(iter(candidates.values()), None)
    if candidate is None:
        model, engine = models[0], EngineConfig()
        split = TaskSection(name=request.task).prepared(request.split)
    else:
        model, engine = candidate.config.model, candidate.config.engine
        split = prepared_split(candidate, request.task, request.split)

    from moevolve.workers.profiling.prompts import PromptMeter

    found = PromptMeter(model, engine).prompts(split)
    prompts = TaskPrompts(split.task, split.split, tuple(sorted(found, key=len)))
    return prompts, split.max_new_tokens if request.new_tokens is None else request.new_tokens


def _settings(
    request: ProfileRequest, full: ModelConfig | None, positions: int, prompts: TaskPrompts | None, new_tokens: int
) -> ProfileSettings:
    if prompts is None:
        tokens = longest = request.prompt_tokens or usual_prompt_tokens(positions)
        fewer = "--prompt-tokens or --new-tokens"
    else:
        tokens, longest = prompts.mean, prompts.longest
        fewer = "--new-tokens, or truncate prompts with engine.max_prompt_tokens"
    if longest + new_tokens > positions:
        raise UserError(
            f"{longest} prompt tokens and {new_tokens} new ones are more than the model's {positions} positions; "
            f"give smaller {fewer}"
        )
    return ProfileSettings(
        tuple(request.batch_sizes),
        tokens,
        new_tokens,
        request.timed_runs,
        request.device,
        (request.dtype or "auto") if full is None else full.dtype,
        request.threads,
        prompts,
    )
