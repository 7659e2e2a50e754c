"""Settings of a search that suit a model, the data and this machine, as plain data."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moevolve.evaluators.errors import UserError
from moevolve.search.config.files import (
    PRESET,
    apply_override,
    override_lines,
    parse_run_config,
    resolve_paths,
    with_preset,
)
from moevolve.search.config.run import RunConfig
from moevolve.search.genomes.eep.space import EepSpace
from moevolve.search.genomes.repaired import base_space
from moevolve.search.running.set_up import pinned
from moevolve.search.shrink.budget import (
    SizeBudget,
    budget_of,
    fitting_experts,
    fitting_share,
    kept_experts,
    kept_share,
    possible_experts,
)
from moevolve.search.shrink.dense import dense_settings
from moevolve.search.shrink.options import ShrinkOptions
from moevolve.search.shrink.timing import fewest, shortened
from moevolve.search.strategies.schedule import largest_window
from moevolve.workers.checkpoints.files import gguf_file, gguf_parts, weight_bytes
from moevolve.workers.contract.facts import FileSizes, ModelFacts
from moevolve.workers.contract.settings import ExpertOffload, ModelConfig
from moevolve.workers.families.registry import only_inside

if TYPE_CHECKING:
    from moevolve.search.pools.ray_actor import ModelProbe

_WINDOW = 4
"""Most individuals under evaluation at once, and so the most workers without GPUs: the search depends on it. It is
smaller for phases of few individuals, so that they have 8 rounds (`search/loop/README.md`)."""
_MOST_CHOICES = 512
"""Most experts of all layers together whose subsets are searched without repairs: with 384 of them 300 candidates still
improve on the formula that they start from, with 768 none does (`search/strategies/README.md`). Of more, only formulas'
choices are compared, unless `--evaluations` asks for others."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the choice of settings needs to know of a model.

    Attributes:
        facts: The model's facts.
        quantised: True if the checkpoint's weights are packed.
        own_form: True if smaller checkpoints can only have the checkpoint's own form, so that experts keep their width.
        narrows: False if the checkpoint has to be stock, and a stock one can't have narrower experts.
        files: Sizes of the weight files of a smaller checkpoint, in the checkpoint's own form if it has to be that.
    """

    facts: ModelFacts
    quantised: bool
    own_form: bool
    narrows: bool
    files: FileSizes


def folder_of(request: ShrinkOptions) -> Path:
    """The folder of the new checkpoint."""
    if request.output is not None:
        return Path(request.output)
    model = Path(request.model)
    stem = model.stem if model.suffix == ".gguf" else model.resolve().name if model.exists() else model.name
    given = (request.active, request.experts, request.neurons, request.size, request.keep_score)
    budget = next((each for each in given if each), "small")
    return Path(f"{stem}-{budget.replace('%', 'pct')}")


def settings_of(
    request: ShrinkOptions, tasks: Sequence[str], probe: ModelProbe, on_stage: Callable[[str], None]
) -> tuple[dict[str, Any], list[str]]:
    """The settings of a request's search as plain data, and sentences about what is kept and why."""
    data, choices = base_settings(request, tasks), list[str]()
    for section in parsed(data).tasks:  # what is wrong is refused before Ray starts
        if "test" not in (task := section.task()).splits:
            raise UserError(f"{task.origin}: there is no `test` split, which the smaller model is checked on")
    on_stage("starting Ray")
    data = on_gpus(data, request, probe)
    config = parsed(data)
    on_stage("choosing settings for the model and this machine")
    sizes: Sizes = probe.call(sizes_of, config, not request.custom_code)
    facts = sizes.facts
    if facts.dense is not None:
        found, text = dense_settings(request, facts.dense)
        choices += [text] if text else []
        data = with_preset(data | found, "shrink")
        return _placed(data if request.repair != "none" else _unrepaired(data), request, probe), choices
    if request.active is not None:
        raise UserError(
            f"--active {request.active}: this model is a mixture of experts, of which a token uses {facts.active} of "
            f"{facts.experts}; give --experts or --neurons, and beside --experts fewer per token with --set "
            f"genome.active={max(1, facts.active // 2)}"
        )
    repairs = facts.unrepairable is None and not sizes.quantised
    repaired = request.repair == "auto" or (request.repair is None and repairs)
    genome: dict[str, Any] = {}  # its kind is that of the preset
    budget = budget_of(request)
    if request.neurons is not None:
        _check_narrowing(request, sizes, repaired)
    filled = repaired and not sizes.own_form and sizes.narrows
    if request.neurons is not None:
        genome["neuron_share"], preset = kept_share(request.neurons), "counts"
    elif budget is not None and filled:
        genome["neuron_share"] = fitting_share(budget, sizes.files, facts.experts)
        preset = "counts"
    else:
        preset = "repaired" if repaired else "prune"
        genome["experts"] = _experts(request, budget, sizes)
    data = _worthwhile(data | {"genome": genome, "preset": preset}, facts)
    if request.keep_score is None:
        choices.append(_kept(request, data, facts))
    return _placed(data, request, probe), choices


def _unrepaired(data: dict[str, Any]) -> dict[str, Any]:
    """The settings with those of their preset, without repairs."""
    data = with_preset(data, "shrink")
    kept = [phase for phase in data["phases"] if phase["kind"] != "repair"]
    return data | {"phases": [phase | {"repair": None} for phase in kept]}


def _worthwhile(data: dict[str, Any], facts: ModelFacts) -> dict[str, Any]:
    """The settings without searching subsets where nothing is found: only formulas' choices are compared there."""
    if data["preset"] != "prune" or len(facts.moe_layers) * facts.experts <= _MOST_CHOICES:
        return data
    return with_evaluations(data, fewest(parsed(data).phases))


def _experts(request: ShrinkOptions, budget: SizeBudget | None, sizes: Sizes) -> int:
    """The number of experts to keep, which for --keep-score is the largest until one is found."""
    count, groups = sizes.facts.experts, sizes.facts.rule.groups
    if budget is not None:
        return fitting_experts(budget, sizes.files, count, groups)
    if request.experts is not None:
        return kept_experts(request.experts, count, groups)
    return possible_experts(count, groups)[-2]


def _placed(data: dict[str, Any], request: ShrinkOptions, probe: ModelProbe) -> dict[str, Any]:
    """The settings with the request's number of candidates and its overrides, and with places for this machine."""
    if request.evaluations is not None:
        least = fewest(parsed(data).phases)
        if request.evaluations < least:
            raise UserError(
                f"--evaluations {request.evaluations}: fewer than the one-shot choices of the preset; give at least "
                f"{least}"
            )
        data = with_evaluations(data, request.evaluations)
    data = _override(data, request)
    config = parsed(data)
    data["model"]["expert_offload"], most_workers = probe.call(room_for, config)
    cores, gpus = len(os.sched_getaffinity(0)), config.workers.least if config.workers.num_gpus else 0
    # How many candidates there is time for isn't known yet, and more at once than workers are no gain.
    most = _WINDOW if request.time is None else min(_WINDOW, gpus or cores)
    data["window"] = max(largest_window(config, most), min(_WINDOW, gpus))  # no GPU is left idle
    if not gpus:
        count = max(1, min(data["window"], cores, most_workers))
        threads = max(1, cores // count)
        data["engine"] = {"threads": threads}
        data["workers"] = {"count": count, "num_cpus": threads}
    return _override(data, request)


def _kept(request: ShrinkOptions, data: dict[str, Any], facts: ModelFacts) -> str:
    """Say how many experts are kept, and if they are narrower how wide, and what share of the model's neurons that is.

    Raises:
        UserError: The neurons are too few for any number of experts.
    """
    data = _override(data, request)
    config = parsed(data)
    try:
        space = base_space(config.space(facts))
    except UserError as error:
        raise UserError(f"{_option(request)}: {error}") from None
    if not isinstance(space, EepSpace) or space.neuron_share is None:
        return f"{_option(request)}: every layer keeps {data['genome']['experts']} of {facts.experts} experts"
    spaces = [space.keeping(count) for count in space.counts]
    ways = [f"{each.retained} with {each.width} ({each.kept_share:.1%})" for each in spaces]
    return (
        f"{_option(request)}: of {facts.experts} experts with {facts.expert_neurons} neurons, every layer keeps "
        f"{' or '.join(ways)}"
    )


def _option(request: ShrinkOptions) -> str:
    """The option that says how much is kept, with its value."""
    given = {"experts": request.experts, "neurons": request.neurons, "size": request.size}
    return next(f"--{name} {value}" for name, value in given.items() if value is not None)


def _check_narrowing(request: ShrinkOptions, sizes: Sizes, repaired: bool) -> None:
    """Raise UserError if experts can't be made narrower."""
    option = _option(request)
    if not repaired or sizes.own_form:
        raise UserError(
            f"{option}: narrower experts need a repair, weights that aren't quantised, and a model whose text part "
            "transformers loads alone; give --experts or --size"
        )
    if not sizes.narrows:
        raise UserError(
            f"{option} makes experts narrower, and in this family other parts' width follows from theirs, so that "
            "servers don't load it; add --custom-code, or give --experts or --size"
        )


def base_settings(request: ShrinkOptions, tasks: Sequence[str]) -> dict[str, Any]:
    """The settings that depend neither on what the model is like nor on this machine."""
    data: dict[str, Any] = {
        # The folder's name, without what names of searches can't have.
        "name": re.sub(r"[^A-Za-z0-9._-]+", "-", folder_of(request).resolve().name).lstrip("-._") or "shrink",
        "seed": request.seed,
        "model": {"path": request.model},
        "tasks": _named(tasks),
        "genome": {"experts": 1},  # until the model's number is known
        "window": _WINDOW,
    }
    resolve_paths(data, Path.cwd())
    return _override(data, request)


def on_gpus(data: dict[str, Any], request: ShrinkOptions, probe: ModelProbe) -> dict[str, Any]:
    """The settings with a worker for each GPU that there is."""
    gpus = probe.gpus(parsed(data))
    data["workers"] = {"count": max(1, gpus), "num_gpus": 1 if gpus else 0}
    return _override(data, request)


def _named(tasks: Sequence[str]) -> list[dict[str, Any]]:
    """The tasks' sections.

    Raises:
        UserError: Two tasks have one name.
    """
    names = set[str]()
    for task in tasks:
        name = Path(task).stem if task.endswith(".yaml") else task
        if name in names:
            raise UserError(f"--task {task}: there is another task {name!r}; rename the file, or leave one out")
        names.add(name)
    return [{"name": task} for task in tasks]


def _override(data: dict[str, Any], request: ShrinkOptions) -> dict[str, Any]:
    """Apply the request's overrides; those of single phases once a preset is chosen, which has the phases."""
    lines = override_lines(request.overrides)
    of_phases = [line for line in lines if line.startswith("phases.")]
    for line in lines:
        if line not in of_phases:
            apply_override(data, line)
    if of_phases and {PRESET, "phases"} & data.keys():
        data = with_preset(data, "shrink")
        for line in of_phases:
            apply_override(data, line)
    return data


def parsed(data: dict[str, Any]) -> RunConfig:
    """The configuration of plain data, which may name a preset."""
    return parse_run_config(with_preset(data, "shrink"), "shrink")


def with_evaluations(data: dict[str, Any], evaluations: int) -> dict[str, Any]:
    """Settings filled with those of their preset, with so many evaluations in all phases together."""
    data = with_preset(data, "shrink")
    for section, phase in zip(data["phases"], shortened(parsed(data).phases, evaluations), strict=True):
        section |= {"evaluations": phase.evaluations, "initial": phase.initial}
    return data


def sizes_of(config: RunConfig, stock: bool) -> Sizes:
    """What the headers and the config of a run's checkpoint say; `stock` if a smaller one has to be stock."""
    from moevolve.workers.checkpoints.loading import load_config, packing
    from moevolve.workers.export.sizes import file_sizes
    from moevolve.workers.methods.eep.export import width_obstacle
    from moevolve.workers.model.describe import meta_model
    from moevolve.workers.profiling.outline import outline_model

    model = pinned(config.model)
    outline = outline_model(model)
    facts, quantised = outline.facts, packing(model, load_config(model)) is not None
    own_form = quantised or only_inside(facts.family)
    files = file_sizes(model, "source" if own_form else "stock") if facts.experts else FileSizes(0, 0, 0)
    narrows = not (stock and facts.experts) or width_obstacle(meta_model(model)) is None
    return Sizes(facts, quantised, own_form, narrows, files)


def planned_bytes(config: RunConfig) -> int:
    """About how many bytes the weight files of a search's checkpoint take, at most.

    A dense model becomes plain numbers, and a mixture of experts keeps its format.
    """
    from moevolve.search.genomes.registry import costs_of
    from moevolve.search.running.plan.counts import described_as, model_sizes
    from moevolve.workers.profiling.outline import outline_model

    model = pinned(config.model)
    outline = outline_model(model)
    facts, costs = outline.facts, costs_of(config.space(outline.facts), outline)
    size = model_sizes(outline, costs, described_as(config.phases))[-1]
    kept = size.parameters or (size.active_parameters if size.experts == 1 else facts.parameters)
    whole = source_bytes(model) if facts.experts else facts.parameters * facts.dtype_bytes
    return whole * kept // facts.parameters


def source_bytes(model: ModelConfig) -> int:
    """Bytes of a checkpoint's weight files."""
    from moevolve.workers.checkpoints.loading import checkpoint_folder

    file = gguf_file(model)
    if file is not None:
        return sum(part.stat().st_size for part in gguf_parts(file))
    return weight_bytes(checkpoint_folder(model))


def room_for(config: RunConfig) -> tuple[ExpertOffload, int]:
    """Choose the first place of the original experts that fits (device, host, disk), with the most workers that do.

    A dense model has one place, the device.

    Raises:
        NoRoomError: None of them fits; the message says what is missing.
    """
    from moevolve.search.genomes.registry import costs_of
    from moevolve.search.running.plan.memory import launch_memory
    from moevolve.workers.checkpoints.loading import resolve_device
    from moevolve.workers.contract.capacity import NoRoomError, check_room, free_bytes
    from moevolve.workers.profiling.outline import outline_model

    config = config.model_copy(update={"model": pinned(config.model)})
    outline = outline_model(config.model)
    costs = costs_of(config.space(outline.facts), outline)
    device = resolve_device(config.model)
    places: tuple[ExpertOffload, ...] = ("device", "host", "disk") if config.on_gpu else ("device", "disk")
    places = places if outline.facts.experts else places[:1]
    for place in places:
        placed = config.model_copy(update={"model": replace(config.model, expert_offload=place)})
        needed = launch_memory(placed, outline, costs)
        try:
            check_room(needed, device)
            break
        except NoRoomError:
            if place == places[-1]:
                raise
    taken = needed.memory.device + needed.memory.host_peak
    return place, max(1, free_bytes(device) // max(taken, 1))
