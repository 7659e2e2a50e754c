"""Searches that begin with baselines: who comes first, what is bred from them, replay, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dense_lab import never, search
from local_workers import local_pool
from pydantic import ValidationError
from search_lab import population, run_config
from search_samples import dense_model, mixtral

from moevolve.evaluators.errors import UserError
from moevolve.search.config.files import load_run_config
from moevolve.search.config.run import RunConfig
from moevolve.search.genomes.contract.phases import MergePhase, PrunePhase, TunePhase
from moevolve.search.genomes.eep.section import EepSection
from moevolve.search.genomes.factorllm.space import FactorLlmSection
from moevolve.search.genomes.registry import check_baselines, make_space
from moevolve.search.running.calibration import calibrated_setup
from moevolve.search.running.candidates import find_candidate
from moevolve.search.running.launch import register
from moevolve.search.running.resume import set_up_stored
from moevolve.search.running.set_up import set_up
from moevolve.store.repository import Store
from moevolve.workers.contract.fitting import RowsMeasurement
from moevolve.workers.methods.eep.edit import ExpertsMeasurement, Until

CMA = "nevergrad:DiagonalCMA"
PHASES = [
    {"kind": "prune", "evaluations": 8, "initial": 5, "init": ["random", "reap", "frequency", "naee"]},
    {"kind": "merge", "evaluations": 6, "initial": 3, "init": ["hope", "soft_activation"], "strategy": CMA},
]
BRED = {"mutation", "crossover+mutation", "surrogate"}


def warm_run(tiny: Any, folder: Path, strategy: str, phases: Any = None, groups: Any = 2, **more: Any) -> RunConfig:
    changes = {"strategy": strategy, "phases": phases or PHASES, **more}
    tokens = {"calibration_tokens": 150, "calibration_most": 300, "naee_tokens": 60}
    changes["genome"] = {"kind": "eep", "experts": 2, "groups": groups, **tokens}
    changes["final"] = {"rerank": 0, "test": False}
    return load_run_config(tiny.write_run(folder / "run.yaml", "warm", **changes))


def launch(config: RunConfig, store: Store, stop: int | None = None) -> None:
    setup = set_up(config, "warm-1")
    register(setup, store)
    search(calibrated_setup(setup, store, local_pool(setup).calibrate), store, stop)


def test_baselines_come_first_and_a_resumed_search_is_the_same(tiny: Any, tmp_path: Path) -> None:
    config = warm_run(tiny, tmp_path, "surrogate", tasks=[f"{tiny.task}@kl"])
    with Store.open(f"sqlite:///{tmp_path / 'whole.db'}") as store:
        launch(config, store)
        whole = population(store, "warm-1")
    with Store.open(f"sqlite:///{tmp_path / 'cut.db'}") as store:
        with pytest.raises(KeyboardInterrupt):
            launch(config, store, 2)
        with pytest.raises(KeyboardInterrupt):
            search(calibrated_setup(set_up_stored(store, "warm"), store, never), store, 7)
        search(calibrated_setup(set_up_stored(store, "warm"), store, never), store)
        assert population(store, "warm-1") == whole
        rows = store.history("warm-1")
        for index in (0, 8):
            subject = find_candidate(store, f"warm:{index}")
            assert subject.detail is not None
            assert subject.edit.phenotype_hash == subject.detail.individual.phenotype_hash
    operators = [row.operator for row in rows]
    assert operators[:5] == ["reap", "frequency", "naee", "random", "random"]
    assert operators[8:11] == ["hope", "soft_activation", "random"]
    assert [row.parents for row in rows[:5] + rows[8:11]] == [()] * 8
    assert set(operators[5:8]) <= BRED and set(operators[11:]) == {CMA}
    assert len({row.fitness for row in rows}) > 3


def test_random_individuals_are_those_of_a_search_without_baselines_and_children_descend_from_them(
    tiny: Any, tmp_path: Path
) -> None:
    found = []
    for name, first in (("warm", "reap"), ("cold", "random")):
        (tmp_path / name).mkdir()
        phases = [{"kind": "prune", "evaluations": 6, "initial": 3, "init": [first]}]
        # Spacious, so that no draw repeats the baseline and has to be drawn again.
        config = warm_run(tiny, tmp_path / name, "evolution", phases, groups="per_layer", window=1)
        with Store.open(f"sqlite:///{tmp_path / name}.db") as store:
            launch(config, store)
            found.append(store.history("warm-1"))
            assert {node.operator for node in store.ancestors("warm:5").nodes if node.depth == 0} <= {first, "random"}
    warm, cold = found
    assert warm[0].operator == "reap" and cold[0].operator == "random"
    assert [row.genome for row in warm[1:3]] == [row.genome for row in cold[1:3]]
    assert 0 in {parent for row in warm[3:] for parent in row.parents} and all(row.parents for row in warm[3:])


def test_names_that_mean_nothing_are_refused() -> None:
    eep = make_space(EepSection(experts=4), mixtral(), ())
    dense = make_space(FactorLlmSection(kind="factorllm", experts=4, active=2), dense_model())
    prune, merge = PrunePhase(evaluations=9, initial=3), MergePhase(evaluations=9, initial=3)
    for space, phase, name, message in (
        (eep, prune, "reep", r"phases.0.init: reep is unknown.*random, frequency"),
        (eep, merge, "start", r"start is unknown; a merge phase .*hope"),
        (dense, TunePhase(evaluations=9), "reap", r"a tune phase can begin with random, start, kmeans"),
    ):
        with pytest.raises(UserError, match=message):
            check_baselines([phase.model_copy(update={"init": (name,)})], space)
    with pytest.raises(UserError, match="dynamic_skipping requires 2 active experts per token, not 1"):
        make_space(EepSection(experts=4, active=1, dynamic_skipping=True), mixtral())


def test_settings_that_cannot_be_met_are_refused() -> None:
    with pytest.raises(ValidationError, match="initial 1 is less than the 2 individuals that init"):
        PrunePhase(evaluations=9, initial=1, init=("reap", "random", "naee"))
    with pytest.raises(ValidationError, match="a name comes twice"):
        PrunePhase(evaluations=9, initial=4, init=("reap", "reap"))


def test_only_what_is_needed_is_measured() -> None:
    def measurement(*init: str, **section: Any) -> Any:
        phase = MergePhase(evaluations=9, initial=len(init), init=init or ("random",))
        return make_space(EepSection(experts=4, **section), mixtral(), [phase]).measurement

    assert measurement() is None and measurement("random") is None
    assert measurement("reap") == ExpertsMeasurement(("importance",), None, 8192, Until(4, 0.002, 131072))
    assert measurement("reap", "frequency").statistics == ("importance", "usage")
    assert measurement(dynamic_skipping=True, calibration_tokens=99) == RowsMeasurement(99, "skipping")
    assert measurement("naee").subsets.limit == 5000


@pytest.mark.parametrize("of_phase", [True, False])
def test_the_surrogate_has_experts_measured_in_phases_that_prune(of_phase: bool) -> None:
    def measurement(kind: str) -> Any:
        phase = {"kind": kind, "evaluations": 9, "initial": 1} | ({"strategy": "surrogate"} if of_phase else {})
        return (
            run_config(phases=[phase], **({} if of_phase else {"strategy": "surrogate"})).space(mixtral()).measurement
        )

    assert measurement("merge") is None
    found = measurement("prune")
    assert isinstance(found, ExpertsMeasurement) and found.statistics == ("importance", "pairs", "usage")


def test_the_log_and_the_report_say_what_scores_were_measured_on(tiny: Any, tmp_path: Path) -> None:
    """And a search that is resumed says the same, of what the store has."""
    phases = [{"kind": "prune", "evaluations": 2, "initial": 2, "init": ["reap", "energy"]}]
    config, notes = warm_run(tiny, tmp_path, "evolution", phases), []
    with Store.open(f"sqlite:///{tmp_path / 'noted.db'}") as store:
        setup = set_up(config, "warm-1")
        register(setup, store)
        setup = calibrated_setup(setup, store, local_pool(setup).calibrate, notes.append)
        calibrated_setup(set_up_stored(store, "warm"), store, never, notes.append)
        search(setup, store)
        assert [row.operator for row in store.history("warm-1")] == ["reap", "energy"]
    first, again = notes
    assert first == again
    assert first.startswith("expert scores come from 30") and "genome.calibration_most allows no more" in first
