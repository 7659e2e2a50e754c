"""The settings of a search that suit a model, the data and this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from moevolve.evaluators.errors import UserError
from moevolve.search.config.files import (
    PRESET,
    apply_override,
    parse_run_config,
    resolve_paths,
    with_preset,
)
from moevolve.search.config.run import RunConfig
from moevolve.search.genomes.eep.space import EepSpace
from moevolve.search.genomes.repaired import base_space
from moevolve.search.running.set_up import pinned
from moevolve.search.shrink.amounts import Chosen, fitting_experts, fitting_share, kept_experts, possible_experts
from moevolve.search.shrink.dense import check_dense, dense_settings
from moevolve.search.shrink.goal import Goal
from moevolve.search.shrink.places import Place, placed
from moevolve.search.shrink.timing import fewest, shortened
from moevolve.workers.checkpoints.files import gguf_file, gguf_parts, weight_bytes
from moevolve.workers.checkpoints.stated import stated_model
from moevolve.workers.contract.facts import FileSizes, ModelFacts
from moevolve.workers.families.registry import only_inside

if TYPE_CHECKING:  # it imports Ray
    from moevolve.search.pools.ray_actor import ModelProbe

# Most experts of all layers together whose subsets are searched without repairs: with 384 of them 300 candidates still
# improve on the formula that they start from, with 768 none does (`search/strategies/README.md`). Of more, formulas'
# choices alone are compared, unless --evaluations asks for others.
_MOST_CHOICES = 512
# How often the full model continues every calibration row where a repair asks for more tokens: with 40 rows of one
# language, 7 continuations of each gain nearly as much as 260 more rows.
_CONTINUATIONS = 7
# Said of models whose experts aren't on the device, by where they are.
_ELSEWHERE = {
    "host": "the full model's experts stay in the host's memory, and models run layer by layer",
    "disk": "the full model's experts stay on the disk, and models run layer by layer",
}


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


def provisional(goal: Goal, tasks: Sequence[str] = ("chats",)) -> RunConfig:
    """Return settings of a search before the model is known, for what describes the model."""
    return _assembled(goal, tasks, Chosen({"experts": 1}), Place())


def settings_for(
    goal: Goal, tasks: Sequence[str], probe: ModelProbe, on_stage: Callable[[str], None]
) -> tuple[RunConfig, str]:
    """Choose the settings of a request's search.

    Args:
        goal: What is asked for.
        tasks: Names or paths of the tasks.
        probe: Process that describes the model.
        on_stage: Called with a line about each stage.

    Returns:
        The settings, and a sentence about what is kept and where the full model's experts are. With --keep-score the
        settings are those at the largest size, and what is kept isn't known yet.

    Raises:
        UserError: A task has no `test` split, or the amount suits neither the model nor this machine.
    """
    config = provisional(goal, tasks)
    _refuse_unchecked(config)
    on_stage("starting Ray")
    gpus = probe.gpus(config)
    place = Place(workers={"count": max(1, gpus), "num_gpus": 1 if gpus else 0})
    config = _assembled(goal, tasks, Chosen({"experts": 1}), place)
    sizes: Sizes = probe.call(sizes_of, config, not goal.request.custom_code)
    dense = sizes.facts.dense
    chosen = _of_experts(goal, sizes) if dense is None else dense_settings(goal, dense)
    config = _assembled(goal, tasks, chosen, place)
    sentence = chosen.sentence or _kept(goal, config, sizes.facts)
    if goal.request.evaluations is not None and goal.request.evaluations < fewest(config.phases):
        raise UserError(
            f"--evaluations {goal.request.evaluations}: the preset has {fewest(config.phases)} one-shot choices; give "
            "at least as many"
        )
    config = _assembled(goal, tasks, chosen, placed(goal, config, place, probe))
    sentences = ["" if goal.amount.kind == "keep_score" else sentence, _ELSEWHERE.get(config.model.expert_offload, "")]
    return config, "; ".join(filter(None, sentences))


def _assembled(goal: Goal, tasks: Sequence[str], chosen: Chosen, place: Place) -> RunConfig:
    """Put the settings of a search together: the request's, the chosen ones, the preset's, and the user's overrides."""
    data: dict[str, Any] = {
        "name": goal.name,
        "seed": goal.request.seed,
        "model": {"path": goal.request.model},
        "tasks": [{"name": task} for task in tasks],
        "genome": dict(chosen.genome),
        "window": place.window,
    }
    if place.experts is not None:
        data["model"]["expert_offload"] = place.experts
    if place.threads is not None:
        data["engine"] = {"threads": place.threads}
    if place.workers:
        data["workers"] = dict(place.workers)
    if chosen.preset is not None:
        data[PRESET] = chosen.preset
    lines = goal.overrides
    of_phases = [line for line in lines if line.startswith("phases.")]  # which the preset has
    for line in lines:
        if line not in of_phases:
            apply_override(data, line)
    resolve_paths(data, Path.cwd())
    data = _with_preset(data)
    for line in of_phases:
        apply_override(data, line)
    config = parse_run_config(data, "shrink")
    phases = config.phases
    if not chosen.repaired:
        phases = tuple(phase.model_copy(update={"repair": None}) for phase in phases if phase.kind != "repair")
    evaluations = goal.request.evaluations or (fewest(phases) if chosen.only_formulas else None)
    if evaluations is not None:
        phases = shortened(phases, evaluations)
    return config if phases == config.phases else config.model_copy(update={"phases": phases})


def _with_preset(data: dict[str, Any]) -> dict[str, Any]:
    """Add what the preset has; its repairs let the full model continue calibration rows that are too few.

    They don't where the experts aren't on the device: every token that is written takes all experts from where they
    are. Phases that a request gives itself stay as they are.
    """
    found = with_preset(data, "shrink")
    model: Any = found["model"]
    elsewhere = isinstance(model, dict) and model.get("expert_offload", "device") != "device"
    if "phases" in data or "phases" not in found or elsewhere:
        return found
    more, phases = {"continuations": _CONTINUATIONS}, cast(list[dict[str, Any]], found["phases"])
    changed = [each | {"repair": more | each["repair"]} if "repair" in each else each for each in phases]
    return found | {"phases": changed}


def refuse_wrong_settings(goal: Goal) -> None:
    """Raise UserError for settings, tasks and amounts that the request and the model's config.json rule out.

    It takes no time, unlike what needs torch or Ray.
    """
    config = provisional(goal, goal.request.tasks or ("chats",))
    if goal.request.tasks:
        _refuse_unchecked(config)
    stated = stated_model(config.model) if config.workers.cluster is None else None  # whose nodes have other folders
    if stated is None:
        return
    if not stated.experts:
        check_dense(goal)
        return
    config.genome.check_experts(stated.family, stated.experts)
    _check_mixture(goal, stated.experts, stated.active)
    if goal.amount.kind == "experts":
        kept_experts(goal.amount, stated.experts, stated.groups)
    if goal.amount.kind == "neurons":
        narrows = goal.request.custom_code or not stated.shares_width
        _check_narrowing(goal, _repairs(goal, not stated.quantised), stated.own_form, narrows)


def _refuse_unchecked(config: RunConfig) -> None:
    """Raise UserError if a task has no rows that the smaller model could be checked on, or two have one name."""
    names = set[str]()
    for section in config.tasks:
        task = section.task()
        if "test" not in task.splits:
            raise UserError(f"{task.origin}: the task has no `test` split to check the smaller model on; add one")
        if task.name in names:
            raise UserError(f"--task {section.name}: another task has this name; rename the file, or leave one out")
        names.add(task.name)


def _of_experts(goal: Goal, sizes: Sizes) -> Chosen:
    """Choose what is searched of a mixture of experts."""
    facts, amount = sizes.facts, goal.amount
    _check_mixture(goal, facts.experts, facts.active)
    repaired = _repairs(goal, facts.unrepairable is None and not sizes.quantised)
    narrows = repaired and not sizes.own_form and sizes.narrows
    if amount.kind == "neurons":
        _check_narrowing(goal, repaired, sizes.own_form, sizes.narrows)
        assert amount.share is not None
        return Chosen({"neuron_share": amount.share}, "counts")
    if amount.kind == "size" and narrows:
        return Chosen({"neuron_share": fitting_share(amount, sizes.files, facts.experts)}, "counts")
    count, groups = facts.experts, facts.rule.groups
    if amount.kind == "size":
        kept = fitting_experts(amount, sizes.files, count, groups)
    elif amount.kind == "experts":
        kept = kept_experts(amount, count, groups)
    else:  # the largest, until the smallest that keeps the score is found
        kept = possible_experts(count, groups)[-2]
    many = not repaired and len(facts.moe_layers) * count > _MOST_CHOICES
    return Chosen({"experts": kept}, "repaired" if repaired else "prune", only_formulas=many)


def _repairs(goal: Goal, can_be: bool) -> bool:
    """Return whether candidates are repaired, if those of the model can be."""
    return goal.request.repair == "auto" or (goal.request.repair is None and can_be)


def _check_mixture(goal: Goal, experts: int, active: int) -> None:
    """Raise UserError if what is asked for is for dense models only."""
    if goal.amount.kind == "active":
        raise UserError(
            f"{goal.amount}: this model is a mixture of experts already: a token uses {active} of {experts}; give "
            "--experts or --neurons, and beside --experts fewer per token with --set "
            f"genome.active={max(1, active // 2)}"
        )


def _check_narrowing(goal: Goal, repaired: bool, own_form: bool, narrows: bool) -> None:
    """Raise UserError if experts can't be made narrower."""
    if not repaired or own_form:
        raise UserError(
            f"{goal.amount}: narrower experts require a repair, unquantised weights, and a model whose text part "
            "transformers loads alone; give --experts or --size"
        )
    if not narrows:
        raise UserError(
            f"{goal.amount} makes experts narrower, and in this family other parts' width follows from theirs, so that "
            "servers don't load it; add --custom-code, or give --experts or --size"
        )


def _kept(goal: Goal, config: RunConfig, facts: ModelFacts) -> str:
    """Say how many experts are kept, and if they are narrower how wide, and what share of the model's neurons that is.

    Raises:
        UserError: The neurons are too few for any number of experts.
    """
    try:
        space = base_space(config.space(facts))
    except UserError as error:
        raise UserError(f"{goal.amount}: {error}") from None
    if not isinstance(space, EepSpace) or space.neuron_share is None:
        kept = config.genome.model_dump()["experts"]
        return f"{goal.amount}: every layer keeps {kept} of {facts.experts} experts"
    spaces = [space.keeping(count) for count in space.counts]
    ways = [f"{each.retained} with {each.width} ({each.kept_share:.1%})" for each in spaces]
    return (
        f"{goal.amount}: of {facts.experts} experts with {facts.expert_neurons} neurons, every layer keeps "
        f"{' or '.join(ways)}"
    )


def sizes_of(config: RunConfig, stock: bool) -> Sizes:
    """Return what the headers and the config of a run's checkpoint say; `stock` if a smaller one has to be stock."""
    from moevolve.workers.checkpoints.loading import load_config, packing
    from moevolve.workers.export.sizes import file_sizes
    from moevolve.workers.profiling.outline import outline_model

    model = pinned(config.model)
    outline = outline_model(model)
    facts, quantised = outline.facts, packing(model, load_config(model)) is not None
    own_form = quantised or only_inside(facts.family)
    files = file_sizes(model, "source" if own_form else "stock") if facts.experts else FileSizes(0, 0, 0)
    return Sizes(facts, quantised, own_form, not (stock and facts.width_linked), files)


def planned_bytes(config: RunConfig) -> int:
    """Return about how many bytes the weight files of a search's checkpoint take, at most.

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
    whole = (
        source_bytes(config.model_copy(update={"model": model}))
        if facts.experts
        else facts.parameters * facts.dtype_bytes
    )
    return whole * kept // facts.parameters


def source_bytes(config: RunConfig) -> int:
    """Return the bytes of the weight files of a run's model."""
    from moevolve.workers.checkpoints.loading import checkpoint_folder

    model = config.model
    file = gguf_file(model)
    if file is not None:
        return sum(part.stat().st_size for part in gguf_parts(file))
    return weight_bytes(checkpoint_folder(model))
