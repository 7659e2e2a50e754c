"""The smallest size that keeps a share of the full model's score: bisected by one-shot choices, then searched once.

Every size that is tried is a search of its own in the store, so that a repeated request evaluates none of it again.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from pathlib import Path
from typing import Any

from moevolve.evaluators.errors import UserError
from moevolve.search.config.run import FinalSection, RunConfig
from moevolve.search.interface.opening import opened_store
from moevolve.search.loop.setup import SearchSetup
from moevolve.search.pools.ray_actor import ModelProbe
from moevolve.search.results.kept import full_kept, winner_kept
from moevolve.search.running.execute import PoolFactory, execute
from moevolve.search.running.launch import recorded, set_up_new
from moevolve.search.running.observer import Observer
from moevolve.search.running.set_up import with_changes
from moevolve.search.shrink.budget import kept_score, possible_experts
from moevolve.search.shrink.choosing import folder_of, parsed
from moevolve.search.shrink.dense import narrower_genomes
from moevolve.search.shrink.options import ShrinkOptions
from moevolve.store.reader import StoreReader
from moevolve.workers.contract.facts import ModelFacts

# Calibration tokens, the same for all sizes so that they share one calibration. How many suffice depends on the size;
# for a quarter of 32 experts on text it is 16,384 (`genome.calibration_loss`).
_TOKENS = 32768


def smallest(
    request: ShrinkOptions, data: dict[str, Any], probe: ModelProbe, make_pool: PoolFactory, observer: Observer
) -> tuple[dict[str, Any], str]:
    """Find the smallest size whose best one-shot choice keeps the share of the score that a request asks for.

    If none does it is the largest one, since a search may find more than the one-shot choices.

    Args:
        request: The request.
        data: Settings of the search at the largest size.
        probe: Process that describes the model.
        make_pool: Makes the workers.
        observer: Its `on_note` takes a line for every size that is tried.

    Returns:
        Settings of the search at this size, and a sentence about it for people.

    Raises:
        UserError: The rows of `dev` are too few to show that any size keeps so much.
    """
    assert request.keep_score is not None
    asked, least = f"--keep-score {request.keep_score}", kept_score(request.keep_score)
    setup = set_up_new(parsed(data), probe.call)
    unit, genomes = sizes_of_model(setup.facts)
    fixed = {"calibration_tokens": _TOKENS, "calibration_most": _TOKENS} if setup.facts.experts else {}
    kept: dict[int, str] = {}

    def settings(count: int) -> dict[str, Any]:
        genome = fixed | data["genome"] | genomes[count]
        # A winner that is as good as was asked for on `search` may not be on `dev`.
        return data | {"name": f"{data['name']}-{count}", "genome": genome, "skip_phases_at": None}

    def is_enough(count: int) -> bool:
        config = one_shots(parsed(settings(count)))
        refuse_other_settings(store, config, folder_of(request))
        changes = {name: getattr(config, name) for name in ("name", "genome", "phases", "final", "skip_phases_at")}
        stages = Observer(
            on_stage=lambda stage: observer.on_stage(f"{count} {unit}: {stage}"), on_progress=observer.on_progress
        )
        tried = recorded(with_changes(setup, **changes), store, call=probe.call)
        execute(tried, store, stages, make_pool)
        search = store.search(config.name)
        winner, full = winner_kept(store, search), full_kept(store, search)
        enough = winner is not None and winner.kept.low >= least
        kept[count] = "nothing, since all failed" if winner is None else str(winner.kept)
        verdict = "enough" if enough else "too little"
        observer.on_note(f"{asked}: {count} {unit} keep {kept[count]} by the best one-shot choice, {verdict}")
        if full is not None and full.low < least:
            raise UserError(
                f"{asked}: `dev` has so few rows that even a candidate with all of the full model's answers is only "
                f"known to keep {100 * full.low:.1f} % with a confidence of 95 %; give more rows, or a smaller share"
            )
        return enough

    counts = list(genomes)
    observer.on_note(
        f"{asked}: {counts[0]} to {counts[-1]} {unit}, of which at most {math.ceil(math.log2(len(counts) + 1))} sizes "
        "are tried by one-shot choices, and one by a search"
    )
    store_url = setup.config.store if request.store is None else request.store
    with opened_store(store_url, create=True) as store:
        place = min(bisect_left(counts, True, key=is_enough), len(counts) - 1)
    size, below = counts[place], counts[place - 1] if place else None
    text = f"{asked}: {size} {unit} keep {kept[size]} of the full model's score on `dev` by the best one-shot choice"
    return settings(size), text if below not in kept else f"{text}; {below} keep {kept[below]}"


def one_shots(config: RunConfig) -> RunConfig:
    """The search of the one-shot choices that a search begins with, whose best is repaired as that of the search is.

    The best on `search` is scored on `dev`.
    """
    first, last, final = config.phases[0], config.phases[-1], FinalSection(rerank=1, test=False)
    if not first.named:
        raise UserError("phases.0.init: --keep-score tries sizes by one-shot choices, and it names none")
    count = len(first.named)
    phases = [first.model_copy(update={"evaluations": count, "initial": count, "init": first.named})]
    if last.kind == "repair":
        phases.append(last.model_copy(update={"evaluations": 1}))
    return config.model_copy(update={"name": f"{config.name}-one-shots", "phases": tuple(phases), "final": final})


def sizes_of_model(facts: ModelFacts) -> tuple[str, dict[int, dict[str, Any]]]:
    """The sizes that a model can be made: words for what they count, and settings of genomes by size, ascending."""
    if facts.dense is not None:
        return f"of {facts.dense.width} neurons", narrower_genomes(facts.dense)
    possible = possible_experts(facts.experts, facts.rule.groups)[:-1]
    return f"of {facts.experts} experts", {count: {"experts": count} for count in possible}


def refuse_too_little(request: ShrinkOptions, store: StoreReader, setup: SearchSetup) -> None:
    """Refuse the winner of the search at the size found if it keeps less than the share that a request asks for.

    Raises:
        UserError: It keeps less; the message names the next larger size.
    """
    assert request.keep_score is not None
    found = winner_kept(store, store.search(setup.config.name))
    if found is None or found.kept.low >= kept_score(request.keep_score):
        return
    unit, genomes = sizes_of_model(setup.facts)
    genome = setup.config.genome.model_dump()
    place = next(place for place, size in enumerate(genomes.values()) if genome == genome | size)
    size, *larger = [*genomes][place:]
    option = "--neurons" if setup.facts.dense is not None else "--experts"
    advice = f"the next larger size is {larger[0]} {unit}, by {option}" if larger else "fewer keep less"
    raise UserError(
        f"--keep-score {request.keep_score}: {size} {unit} keep {found.kept} by a search, too little, and {advice}; or "
        "give a smaller share"
    )


def refuse_other_settings(store: StoreReader, config: RunConfig, folder: Path) -> None:
    """Refuse a search of the same name with other settings, in terms of a shrink into a folder."""
    found = next((one.search for one in store.searches() if one.search.name == config.name), None)
    if found is not None and found.config_hash != config.config_hash:
        raise UserError(
            f"--output {folder}: the store has a search {config.name} with other settings; choose another folder, or "
            "another store with --store"
        )
