"""Every baseline as an individual of a search, compared with the same choice computed token by token in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dense_lab import search
from hypothesis import given
from hypothesis import strategies as st
from local_workers import local_pool
from numpy.typing import NDArray
from plain_experts import Token, change, plain_tokens
from search_samples import PRUNE, eep_space, few
from tiny_models import WORDS, save_tiny_model

from moevolve.search.config.files import load_run_config
from moevolve.search.genomes.eep import baselines
from moevolve.search.genomes.eep.baselines import BASELINES, cheapest_to_drop
from moevolve.search.genomes.eep.space import EepGenome
from moevolve.search.genomes.registry import baseline_offspring
from moevolve.search.genomes.repaired import RepairedGenome
from moevolve.search.running.calibration import calibrated_setup, stored_calibration
from moevolve.search.running.candidates import find_candidate
from moevolve.search.running.launch import register
from moevolve.search.running.set_up import set_up
from moevolve.store.repository import Store
from moevolve.workers.contract.edits import Calibration
from moevolve.workers.engine.engine import GenerationEngine
from moevolve.workers.engine.measuring import token_sequences
from moevolve.workers.methods.eep.edit import EepEdit
from moevolve.workers.model.resident import ResidentModel

EXPERTS, RETAINED, LAYERS, TOKENS = 6, 3, 3, 60
PRUNING = ("frequency", "soft_activation", "reap", "energy", "naee")
Layers = list[list[Token]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A random model of a family with the tiny workspace's tokenizer."""
    own: dict[str, dict[str, Any]] = {
        "mixtral": {"intermediate_size": 16, "num_local_experts": EXPERTS},
        "qwen2_moe": {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 8, "num_experts": EXPERTS},
    }

    def make(family: str) -> Path:
        directory = tmp_path_factory.getbasetemp() / f"experts-{family}"
        if not directory.exists():
            sizes = {"num_hidden_layers": LAYERS, "num_experts_per_tok": 2, **own[family]}
            save_tiny_model(directory, family, WORDS, seed=5, **sizes)
        return directory

    return make


@pytest.fixture(scope="module")
def plain(models: Callable[[str], Path], tiny: Any) -> Callable[[str], Layers]:
    """Outputs of each layer's experts on the calibration tokens of the tiny task."""
    made: dict[str, Layers] = {}

    def get(family: str) -> Layers:
        if family not in made:
            config = load_run_config(
                tiny.write_run(models(family) / "run.yaml", "plain", **run_of(models(family), [begins_with("random")]))
            )
            resident = ResidentModel.load(config.model)
            splits = tuple(task.prepared("calibration") for task in config.tasks)
            engine = GenerationEngine(resident.model, resident.tokenizer, config.engine)
            sequences = token_sequences(engine, splits, TOKENS)
            made[family] = [plain_tokens(resident, layer, sequences) for layer in resident.layers]
        return made[family]

    return get


def run_of(model: Path, phases: list[dict[str, Any]], groups: Any = "per_layer", **genome: Any) -> dict[str, Any]:
    tokens = {"calibration_tokens": TOKENS, "calibration_most": TOKENS}
    section = {"kind": "eep", "experts": RETAINED, "groups": groups, **tokens}
    return {
        "model": {"path": str(model), "device": "cpu"},
        "genome": section | genome,
        "phases": phases,
        "final": {"rerank": 0, "test": False},
    }


def begins_with(*names: str, kind: str = "prune", **settings: Any) -> dict[str, Any]:
    """A phase of baselines only."""
    return {"kind": kind, "evaluations": len(names), "initial": len(names), "init": list(names), **settings}


def share(values: Any) -> NDArray[np.float64]:
    return np.asarray(values) / np.sum(values)


def scores_of(name: str, tokens: list[Token]) -> NDArray[np.float64]:
    """A layer's scores, as the baseline's paper defines them."""
    scores, counts = np.zeros(EXPERTS), np.zeros(EXPERTS)
    for token in tokens:
        for expert in token.chosen:
            counts[expert] += 1
            norm, gate = float(token.outputs[expert].norm()), float(token.gates[expert])
            scores[expert] += (gate * norm) ** (2 if name == "energy" else 1)
    if name == "frequency":
        return counts
    if name == "soft_activation":
        return sum(token.probabilities.numpy() for token in tokens)  # type: ignore[return-value]
    if name == "energy":
        return scores
    return scores / np.maximum(counts, 1)


def plain_kept(name: str, layers: Layers, family: str) -> list[int]:
    """The experts that a group of layers keeps; Mixtral's weights are rescaled, Qwen's experts chosen on logits."""
    if name == "naee":
        subsets = list(combinations(range(EXPERTS), RETAINED))
        rules = family == "mixtral", family == "qwen2_moe"
        costs = [sum(change(tokens, kept, 2, *rules) for tokens in layers) for kept in subsets]
        return list(subsets[int(np.argmin(costs))])
    total = sum(share(scores_of(name, tokens)) for tokens in layers)
    return sorted(np.argsort(-total, kind="stable")[:RETAINED].tolist())  # type: ignore[operator]


def run_baselines(tiny: Any, folder: Path, data: dict[str, Any]) -> tuple[dict[str, tuple[Any, Any]], Any]:
    """Records and genomes by the baseline's name, and the stored calibration, of a search of baselines only."""
    config = load_run_config(tiny.write_run(folder / "run.yaml", "base", **data))
    with Store.open(f"sqlite:///{folder / 'store.db'}") as store:
        setup = set_up(config, "base-1")
        register(setup, store)
        setup = calibrated_setup(setup, store, local_pool(setup).calibrate)
        search(setup, store)
        found = {}
        for row in store.history("base-1"):
            subject = find_candidate(store, f"base:{row.index}")
            assert subject.edit.phenotype_hash == row.phenotype_hash and 0 < (row.fitness or 0) <= 1
            assert subject.detail is not None
            found[row.operator] = subject.detail.individual, subject.genome
        assert setup.space.measurement is not None
        return found, stored_calibration(setup.space.measurement, config, store, "base-1", setup.facts.fingerprint)


@pytest.fixture(scope="module", params=["mixtral", "qwen2_moe"])
def searched(
    request: pytest.FixtureRequest, models: Any, plain: Any, tiny: Any, tmp_path_factory: pytest.TempPathFactory
) -> Searched:
    """All baselines of a family: with matrices for every layer, or for two groups of layers and on logits."""
    family = str(request.param)
    settings: dict[str, Any] = {} if family == "mixtral" else {"groups": 2, "router_space": "logits"}
    data = run_of(models(family), [begins_with(*PRUNING)], **settings)
    return Searched(family, *run_baselines(tiny, tmp_path_factory.mktemp(family), data), plain(family))


@dataclass(frozen=True)
class Searched:
    """Baselines of a family's model, what was measured for them, and the same computed plainly."""

    family: str
    found: dict[str, tuple[Any, Any]]
    calibration: Calibration
    layers: Layers

    def groups(self, genome: EepGenome) -> list[Layers]:
        """The layers of each of the genome's groups."""
        owners = genome.space.layer_groups
        assert owners == ((0, 1, 2) if self.family == "mixtral" else (0, 0, 1))
        return [
            [layer for layer, owner in zip(self.layers, owners, strict=True) if owner == group]
            for group in range(genome.space.groups)
        ]


def test_pruning_baselines_keep_what_their_papers_say(searched: Searched) -> None:
    for name in PRUNING:
        individual, genome = searched.found[name]
        assert (individual.operator, individual.phase, individual.parents) == (name, "prune", ())
        assert genome.one_hot
        for kept, members in zip(genome.space.kept(genome).tolist(), searched.groups(genome), strict=True):
            assert kept == plain_kept(name, members, searched.family), name
    assert searched.found["naee"][0].summary.endswith("(naee, exhaustive: 20 subsets)")
    # Scores are sums over tokens; subsets of experts are measured by themselves.
    assert searched.calibration.tokens_run == 2 * len(searched.layers[0]) >= 2 * TOKENS
    assert searched.calibration.seconds > 0


def test_layers_of_a_group_count_alike_whatever_their_totals() -> None:
    """Summed as they are, the first layer would keep expert 0."""
    sums = np.ones((2, 3, 3, 3))
    sums[:, :, 1, 1] = [[50.0, 40.0, 10.0], [0.1, 0.5, 0.4]]
    space = eep_space(1, 1, layers=2, experts=3).calibrated(Calibration({"importance_sums": sums}))
    genome = baseline_offspring("reap", space, PRUNE).genome
    assert isinstance(genome, EepGenome) and space.kept(genome).tolist() == [[1]]


def test_importance_has_a_row_for_every_statistic_that_was_measured() -> None:
    space = eep_space(1, 1, layers=2, experts=3)
    assert space.importance(PRUNE).shape == (0, 3)
    pairs = np.array([[[4, 1, 0], [1, 2, 0], [0, 0, 2]], [[1, 1, 1], [1, 0, 0], [1, 0, 0]]], dtype=np.float32)
    sums = np.ones((2, 3, 3, 3))
    sums[:, :, 0, 0], sums[:, :, 0, 1] = 2, [[2, 4, 2], [0, 60, 20]]
    measured = {"counts": np.array([[1, 2, 1], [0, 30, 10]]), "importance_sums": sums, "pair_norms": pairs}
    frequency, reap, man, msan, energy, hope = space.calibrated(Calibration(measured)).importance(PRUNE)
    assert np.allclose(frequency, [(1 / 4 + 0) / 2, (2 / 4 + 3 / 4) / 2, (1 / 4 + 1 / 4) / 2])
    assert np.allclose(man, frequency) and np.allclose(reap, 1 / 3) and np.allclose(msan, 1 / 3)
    assert np.allclose(energy, 1 / 3)
    assert np.allclose(hope, [0.55, 0.25, 0.2])


def test_a_repaired_baseline_of_all_rows_keeps_the_experts_used_most(models: Any, tiny: Any, tmp_path: Path) -> None:
    repair = begins_with("frequency", repair={"tokens": 60})
    data = run_of(models("mixtral"), [repair], calibration_tokens="all")
    found, made = run_baselines(tiny, tmp_path, data)
    counts = made.arrays["counts"]
    assert counts[0].sum() > 20 * TOKENS and len(set(counts.sum(axis=1))) == 1
    ((_, genome),) = found.values()
    assert isinstance(genome, RepairedGenome) and isinstance(genome.base, EepGenome)
    assert np.array_equal(genome.base.space.kept(genome.base), np.sort(np.argsort(-counts, axis=1)[:, :RETAINED]))


def test_dynamic_skipping_applies_to_every_candidate(
    models: Any, tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(baselines, "_EXHAUSTIVE", 19)
    data = run_of(
        *(models("mixtral"), [begins_with("random", "naee")]),
        dynamic_skipping=True,
        calibration_tokens=20,
    )
    found, _ = run_baselines(tiny, tmp_path, data)
    for individual, genome in found.values():
        edit = genome.express()
        assert isinstance(edit, EepEdit) and edit.skip_rows is not None and "skipped" in individual.summary
        assert 20 <= len(edit.skip_rows.tokens) < TOKENS, "whole prompts up to the limit"
    assert "(naee, greedy: 20 subsets are above the limit)" in found["naee"][0].summary


def outputs_of(seed: int, tokens: int, experts: int, hidden: int = 4) -> np.ndarray:
    """Weighted outputs [tokens, experts, hidden] of two of the experts per token."""
    rng = np.random.default_rng(seed)
    outputs = rng.normal(size=(tokens, experts, hidden))
    for token in range(tokens):
        outputs[token, rng.permutation(experts)[2:]] = 0
    return outputs


@few
@given(seed=st.integers(0, 2**32 - 1), experts=st.integers(2, 7), data=st.data())
def test_the_least_error_of_all_subsets_is_found(seed: int, experts: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, experts - 1))
    outputs = outputs_of(seed, 40, experts)
    gram = np.einsum("tih,tjh->ij", outputs, outputs)
    # The definition: what the layer's output misses without these experts.
    errors = {
        dropped: float(np.square(outputs[:, list(dropped)].sum(axis=1)).sum())
        for dropped in combinations(range(experts), count)
    }
    found = tuple(cheapest_to_drop(gram, count).tolist())
    assert errors[found] == pytest.approx(min(errors.values()), abs=1e-9)


def test_many_experts_are_dropped_greedily_and_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "_EXHAUSTIVE", 0)
    optimal, worst = 0, 1.0
    for seed in range(10):
        outputs = outputs_of(seed, 60, 10)
        gram = np.einsum("tih,tjh->ij", outputs, outputs)
        found = cheapest_to_drop(gram, 4)
        assert len(set(found.tolist())) == 4
        sums = {dropped: gram[np.ix_(dropped, dropped)].sum() for dropped in combinations(range(10), 4)}
        least, reached = min(sums.values()), gram[np.ix_(found, found)].sum()
        optimal, worst = optimal + (reached <= least + 1e-9), max(worst, reached / least)
        for inside in found:
            for outside in set(range(10)) - set(found.tolist()):
                swapped = [*(set(found.tolist()) - {inside}), outside]
                assert gram[np.ix_(swapped, swapped)].sum() >= reached - 1e-9, "a swap is better"
    assert optimal >= 7 and worst < 1.3


def test_layers_of_a_group_weigh_alike() -> None:
    loud, quiet = np.diag([9.0, 1.0, 1.0]) * 1000, np.diag([1.0, 5.0, 5.0])
    sums = np.stack([loud, quiet])
    space = eep_space(1, 1, layers=2, experts=3).calibrated(Calibration({"pair_norms": sums}))
    kept = space.kept(BASELINES["hope"].make(space).genome)
    assert kept.tolist() == [[0]], "0.82 + 0.09 against 0.09 + 0.45"
