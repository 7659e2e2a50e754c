"""The smallest size that keeps a share of the full model's score, bisected by one-shot choices.

Every size that is tried is a search of its own in the store, so that a repeated request evaluates none of it again.
"""

from __future__ import annotations

import math
from bisect import bisect_left

from moevolve.evaluators.errors import UserError
from moevolve.search.config.files import as_override, changed_config
from moevolve.search.config.run import FinalSection, RunConfig
from moevolve.search.pools.ray_actor import ModelProbe
from moevolve.search.results.kept import full_kept, winner_kept
from moevolve.search.running.execute import execute
from moevolve.search.running.launch import recorded, set_up_new
from moevolve.search.running.observer import Observer
from moevolve.search.running.set_up import with_changes
from moevolve.search.running.study import SharedWorkers
from moevolve.search.shrink.amounts import possible_experts
from moevolve.search.shrink.dense import Genome, narrower_genomes
from moevolve.search.shrink.goal import Amount
from moevolve.search.shrink.record import Journal, SizeTrial
from moevolve.store.repository import Store
from moevolve.workers.contract.facts import ModelFacts

# Calibration tokens, the same for all sizes so that they share one calibration. How many suffice depends on the size:
# 16,384 for a quarter of 32 experts on text (`genome.calibration_loss`).
_TOKENS = 32768


def smallest(
    amount: Amount,
    config: RunConfig,
    store: Store,
    journal: Journal,
    probe: ModelProbe,
    workers: SharedWorkers,
    observer: Observer,
) -> tuple[RunConfig, str]:
    """Find the smallest size whose best one-shot choice keeps the share of the full model's score that is asked for.

    Args:
        amount: The share.
        config: Settings of the search at the largest size.
        store: Store of the searches.
        journal: Gets every size that is tried.
        probe: Process that describes the model.
        workers: Workers of all searches.
        observer: Its `on_note` takes a line for every size that is tried.

    Returns:
        Settings of the search at the size, and a sentence about what its one-shot choice keeps.

    Raises:
        UserError: No size keeps so much, or `dev` has too few rows to show that one does.
    """
    assert amount.share is not None
    setup, least = set_up_new(config, probe.call), amount.share
    unit, genomes = genomes_by_size(setup.facts)
    phrases: dict[int, str] = {}

    def keeps(size: int) -> bool:
        tried = one_shots(at_size(config, size, genomes[size], setup.facts))
        changes = {name: getattr(tried, name) for name in ("name", "genome", "phases", "final", "skip_phases_at")}
        stages = Observer(
            on_stage=lambda stage: observer.on_stage(f"{size} {unit}: {stage}"), on_progress=observer.on_progress
        )
        execute(recorded(with_changes(setup, **changes), store, call=probe.call), store, stages, workers.lend)
        search = store.search(tried.name)
        kept, full = winner_kept(store, search), full_kept(store, search)
        enough = kept is not None and kept.low >= least
        others = (each for each in journal.record.sizes if each.search != tried.name)
        journal.note(sizes=(*others, SizeTrial(size, tried.name, False, kept, enough)))
        phrases[size] = f"{amount}: {size} {unit} keep {'nothing, since all failed' if kept is None else kept}"
        verdict = "enough" if enough else "too little"
        observer.on_note(f"{phrases[size]} by the best one-shot choice, {verdict}")
        if full is not None and full.low < least:
            raise UserError(
                f"{amount}: `dev` has so few rows that even a candidate with all of the full model's answers is only "
                f"known to keep {100 * full.low:.1f} % with a confidence of 95 %; give more rows, or a smaller share"
            )
        return enough

    sizes = list(genomes)
    journal.note(unit=unit)
    most = math.ceil(math.log2(len(sizes) + 1))
    observer.on_note(
        f"{amount}: {sizes[0]} to {sizes[-1]} {unit}; at most {most} are tried by one-shots, then one is searched"
    )
    place = bisect_left(sizes, True, key=keeps)
    if place == len(sizes):
        raise UserError(f"{phrases[sizes[-1]]}, and fewer keep less; give a smaller share")
    size = sizes[place]
    sentence = f"{phrases[size]} of the full model's score on `dev`, by one-shot choices"
    return at_size(config, size, genomes[size], setup.facts), sentence


def at_size(config: RunConfig, size: int, genome: Genome, facts: ModelFacts) -> RunConfig:
    """Return the settings of the search at a size."""
    changes: dict[str, object] = {f"genome.{name}": value for name, value in genome.items()}
    if facts.experts:
        changes |= {"genome.calibration_tokens": _TOKENS, "genome.calibration_most": _TOKENS}
    # A winner that is as good as is asked for on `search` may not be on `dev`.
    changes |= {"name": f"{config.name}-{size}", "skip_phases_at": None}
    return changed_config(config, [as_override(key, value) for key, value in changes.items()], config.name)


def one_shots(config: RunConfig) -> RunConfig:
    """Return a search of the one-shot choices that another one begins with.

    The best on `search` is repaired as that search's is, and scored on `dev`.
    """
    first, last, final = config.phases[0], config.phases[-1], FinalSection(rerank=1, test=False)
    if not first.named:
        raise UserError("phases.0.init: --keep-score tries sizes by one-shot choices, and it names none")
    count = len(first.named)
    phases = [first.model_copy(update={"evaluations": count, "initial": count, "init": first.named})]
    if last.kind == "repair":
        phases.append(last.model_copy(update={"evaluations": 1}))
    return config.model_copy(update={"name": f"{config.name}-one-shots", "phases": tuple(phases), "final": final})


def genomes_by_size(facts: ModelFacts) -> tuple[str, dict[int, Genome]]:
    """Return words for what the sizes of a model count, and settings of genomes by size, ascending."""
    if facts.dense is not None:
        return f"of {facts.dense.width} neurons", narrower_genomes(facts.dense)
    possible = possible_experts(facts.experts, facts.rule.groups)[:-1]
    return f"of {facts.experts} experts", {count: {"experts": count} for count in possible}


def refuse_losing(journal: Journal, store: Store, amount: Amount, config: RunConfig) -> None:
    """Record what the winner of the search at the size found keeps.

    Raises:
        UserError: It keeps less than is asked for, although a one-shot choice has kept enough.
    """
    kept, found = winner_kept(store, store.search(config.name)), journal.record.sizes
    size = min(trial.size for trial in found if trial.enough and not trial.searched)
    enough = kept is not None and amount.share is not None and kept.low >= amount.share
    if not any(trial.searched for trial in found):
        journal.note(sizes=(*found, SizeTrial(size, config.name, True, kept, enough)))
    if not enough:
        larger = min((trial.size for trial in found if trial.size > size and trial.enough), default=size + 1)
        raise UserError(
            f"{amount}: the search's winner with {size} {journal.record.unit} keeps {kept or 'nothing'}, less than its "
            f"one-shot choice kept; give {larger} of them, or a smaller share"
        )
