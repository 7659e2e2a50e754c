"""Every baseline as a search of one individual, compared with the same choice computed token by token in float64."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dense_lab import search
from local_workers import local_pool
from numpy.typing import NDArray
from plain_experts import Token, change, plain_tokens
from report_lab import finished
from search_samples import PRUNE, eep_space

from moevolve.search.config.files import load_run_config
from moevolve.search.genomes.eep.baselines import average_linkage
from moevolve.search.genomes.eep.genome import EepGenome
from moevolve.search.genomes.registry import baseline_offspring
from moevolve.search.genomes.repaired import RepairedGenome
from moevolve.search.operations.subject import find_subject
from moevolve.search.running.calibration import calibrated_setup, stored_calibration
from moevolve.search.running.launch import register
from moevolve.search.running.set_up import set_up
from moevolve.store.repository import Store
from moevolve.workers.contract.edits import Calibration
from moevolve.workers.engine.engine import GenerationEngine
from moevolve.workers.engine.measuring import token_sequences
from moevolve.workers.methods.eep.edit import EepEdit
from moevolve.workers.model.resident import ResidentModel

EXPERTS, RETAINED, LAYERS, TOKENS = 6, 3, 3, 60
PRUNING = ("frequency", "soft_activation", "reap", "naee")
Layers = list[list[Token]]


@pytest.fixture(scope="module")
def models(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A random model of a family with the tiny workspace's tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    common = {
        "vocab_size": 20,
        "hidden_size": 16,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.4,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    own = {
        "mixtral": {"intermediate_size": 16, "num_local_experts": EXPERTS},
        "qwen2_moe": {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 8, "num_experts": EXPERTS},
    }

    def make(family: str) -> Path:
        directory = tmp_path_factory.getbasetemp() / f"experts-{family}"
        if not directory.exists():
            shutil.copytree(tiny.model, directory)
            (directory / "model.safetensors").unlink()
            with torch.random.fork_rng():
                torch.manual_seed(5)
                model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **common, **own[family]))
                for name, parameter in model.named_parameters():
                    if ".mlp.gate." in name:
                        torch.nn.init.normal_(parameter, std=0.4)
            model.save_pretrained(directory)
        return directory

    return make


@pytest.fixture(scope="module")
def plain(models: Callable[[str], Path], tiny: Any) -> Callable[[str], Layers]:
    """Outputs of each layer's experts on the calibration tokens of the tiny task."""
    made: dict[str, Layers] = {}

    def get(family: str) -> Layers:
        if family not in made:
            config = load_run_config(tiny.write_run(models(family) / "run.yaml", "plain", **run_of(models(family))))
            resident = ResidentModel.load(config.model)
            splits = tuple(task.prepared("calibration") for task in config.tasks)
            engine = GenerationEngine(resident.model, resident.tokenizer, config.engine)
            sequences = token_sequences(engine, splits, TOKENS)
            made[family] = [plain_tokens(resident, layer, sequences) for layer in resident.layers]
        return made[family]

    return get


def run_of(model: Path, name: str = "random", groups: Any = "per_layer", **genome: Any) -> dict[str, Any]:
    kind = "merge" if name == "hc_smoe" else "prune"
    return {
        "model": {"path": str(model), "device": "cpu"},
        "genome": {
            "kind": "eep",
            "experts": RETAINED,
            "groups": groups,
            "calibration_tokens": TOKENS,
        }
        | genome,
        "phases": [{"kind": kind, "evaluations": 1, "initial": 1, "init": [name]}],
        "final": {"rerank": 0, "test": False},
    }


def share(values: Any) -> NDArray[np.float64]:
    return np.asarray(values) / np.sum(values)


def scores_of(name: str, tokens: list[Token]) -> NDArray[np.float64]:
    """A layer's scores, as the baseline's paper defines them."""
    scores, counts = np.zeros(EXPERTS), np.zeros(EXPERTS)
    for token in tokens:
        for expert in token.chosen:
            counts[expert] += 1
            scores[expert] += float(token.gates[expert] * token.outputs[expert].norm())
    if name == "frequency":
        return counts
    if name == "soft_activation":
        return sum(token.probabilities.numpy() for token in tokens)  # type: ignore[return-value]
    return scores / np.maximum(counts, 1)


def plain_kept(name: str, layers: Layers, rescale: bool) -> list[int]:
    """The experts that a group of layers keeps."""
    if name == "naee":
        subsets = list(combinations(range(EXPERTS), RETAINED))
        costs = [sum(change(tokens, kept, 2, rescale, False) for tokens in layers) for kept in subsets]
        return list(subsets[int(np.argmin(costs))])
    total = sum(share(scores_of(name, tokens)) for tokens in layers)
    return sorted(np.argsort(-total, kind="stable")[:RETAINED].tolist())  # type: ignore[operator]


def owners_of(groups: Any) -> list[int]:
    return list(range(LAYERS)) if groups == "per_layer" else [layer * groups // LAYERS for layer in range(LAYERS)]


def run_baseline(tiny: Any, folder: Path, data: dict[str, Any]) -> tuple[Any, EepGenome, float, Any]:
    """The record, genome and fitness of a search's only individual, and the stored calibration."""
    config = load_run_config(tiny.write_run(folder / "run.yaml", "base", **data))
    with Store.open(f"sqlite:///{folder / 'store.db'}") as store:
        setup = set_up(config, "base-1")
        register(setup, store)
        setup = calibrated_setup(setup, store, local_pool(setup).calibrate)
        search(setup, store)
        (row,) = store.history("base-1")
        subject = find_subject(store, "base:0")
        assert subject.detail is not None and subject.edit.phenotype_hash == row.phenotype_hash
        genome = subject.genome
        assert isinstance(genome, EepGenome) and setup.space.recipe is not None
        made = stored_calibration(setup.space.recipe, config, store, "base-1", setup.facts.fingerprint)
        return subject.detail.individual, genome, row.fitness or 0.0, made


@pytest.mark.parametrize(("family", "groups"), [("mixtral", "per_layer"), ("qwen2_moe", 2)])
@pytest.mark.parametrize("name", PRUNING)
def test_a_pruning_baseline_is_a_search_of_one(
    name: str, groups: Any, family: str, models: Any, plain: Any, tiny: Any, tmp_path: Path
) -> None:
    individual, genome, fitness, calibration = run_baseline(tiny, tmp_path, run_of(models(family), name, groups))
    assert (individual.operator, individual.phase, individual.parents) == (name, "prune", ())
    assert 0 < fitness <= 1
    assert genome.one_hot
    owners = owners_of(groups)
    for group, kept in enumerate(genome.space.kept(genome).tolist()):
        members = [tokens for tokens, owner in zip(plain(family), owners, strict=True) if owner == group]
        assert kept == plain_kept(name, members, rescale=family == "mixtral")
    assert calibration.tokens_run == len(plain(family)[0]) >= TOKENS and calibration.seconds > 0
    if name == "naee":
        assert individual.summary.endswith("(naee, exhaustive: 20 subsets)")


def test_layers_of_a_group_count_alike_whatever_their_totals() -> None:
    """Summed as they are, the first layer would keep expert 0."""
    scores = np.array([[50.0, 40.0, 10.0], [0.1, 0.5, 0.4]], dtype=np.float32)
    space = eep_space(1, 1, layers=2, experts=3).calibrated(Calibration({"saliency": scores}))
    genome = baseline_offspring("reap", space, PRUNE).genome
    assert isinstance(genome, EepGenome) and space.kept(genome).tolist() == [[1]]


def test_importance_has_a_row_for_every_statistic_that_was_measured() -> None:
    space = eep_space(1, 1, layers=2, experts=3)
    assert space.importance(PRUNE).shape == (0, 3)
    pairs = np.array([[[4, 1, 0], [1, 2, 0], [0, 0, 2]], [[1, 1, 1], [1, 0, 0], [1, 0, 0]]], dtype=np.float32)
    measured = {"counts": np.array([[1, 2, 1], [0, 30, 10]]), "pair_norms": pairs}
    rows = space.calibrated(Calibration(measured)).importance(PRUNE)
    assert np.allclose(rows, [[(1 / 4 + 0) / 2, (2 / 4 + 3 / 4) / 2, (1 / 4 + 1 / 4) / 2], [0.55, 0.25, 0.2]])


def plain_clusters(distances: NDArray[np.float64], count: int) -> list[list[int]]:
    """Average linkage by definition: the mean over all pairs, computed again at every step."""
    clusters = [[point] for point in range(len(distances))]
    while len(clusters) > count:
        pairs = list(combinations(range(len(clusters)), 2))
        means = [distances[np.ix_(clusters[one], clusters[two])].mean() for one, two in pairs]
        one, two = pairs[int(np.argmin(means))]
        clusters[one] += clusters.pop(two)
    return sorted(sorted(cluster) for cluster in clusters)


@pytest.mark.parametrize(("groups", "space", "family"), [("per_layer", "probs", "mixtral"), (2, "logits", "qwen2_moe")])
def test_hc_smoe_merges_what_is_alike(
    groups: Any, space: str, family: str, models: Any, plain: Any, tiny: Any, tmp_path: Path
) -> None:
    data = run_of(models(family), "hc_smoe", groups, router_space=space)
    individual, genome, fitness, _ = run_baseline(tiny, tmp_path, data)
    assert (individual.operator, individual.phase, individual.parents) == ("hc_smoe", "merge", ())
    assert 0 < fitness <= 1
    owners = owners_of(groups)
    for group in range(genome.space.groups):
        members = [tokens for tokens, owner in zip(plain(family), owners, strict=True) if owner == group]
        squares, counts = np.zeros((EXPERTS, EXPERTS)), np.zeros(EXPERTS)
        for tokens in members:
            means = torch.stack([token.outputs for token in tokens]).mean(dim=0)
            squares += share([[float((a - b).norm()) for b in means] for a in means]) ** 2
            counts += scores_of("frequency", tokens)
        for row, cluster in enumerate(plain_clusters(np.sqrt(squares), RETAINED)):
            merging, mapping = np.zeros(EXPERTS), np.zeros(EXPERTS)
            merging[cluster] = counts[cluster] / counts[cluster].sum()
            mapping[cluster] = 1.0 if space == "probs" else merging[cluster]
            np.testing.assert_allclose(genome.expert_merging[group, row], merging, rtol=1e-6)
            np.testing.assert_allclose(genome.router_mapping[group, row], mapping, rtol=1e-6)


def test_all_rows_can_be_measured(models: Any, tiny: Any, tmp_path: Path) -> None:
    found = {}
    for tokens in (1, 10**9, "all"):
        (tmp_path / str(tokens)).mkdir()
        data = run_of(models("mixtral"), "frequency", calibration_tokens=tokens)
        found[tokens] = run_baseline(tiny, tmp_path / str(tokens), data)[3]
    assert found[1].tokens_run < found["all"].tokens_run == found[10**9].tokens_run
    assert found["all"].arrays["counts"].sum() == 2 * LAYERS * found["all"].tokens_run
    assert (found["all"].arrays["counts"] == found[10**9].arrays["counts"]).all()


def test_it_is_said_when_not_everything_was_tried(models: Any, tiny: Any, tmp_path: Path) -> None:
    individual, *_ = run_baseline(tiny, tmp_path, run_of(models("mixtral"), "naee", naee_subsets=19))
    assert individual.summary.endswith("(naee, greedy: 20 subsets are above the limit)")


def test_a_repaired_baseline_keeps_the_same_experts(models: Any, tiny: Any, tmp_path: Path) -> None:
    data = run_of(models("mixtral"), "reap")
    data["phases"][0]["repair"] = {"tokens": 60}
    config = load_run_config(tiny.write_run(tmp_path / "run.yaml", "base", **data))
    with Store.open(f"sqlite:///{tmp_path / 'store.db'}") as store:
        finished(store, config)
        genome, (row,) = find_subject(store, "base:0").genome, store.history(store.search("base").id)
    (tmp_path / "plain").mkdir()
    individual, plain, _, _ = run_baseline(tiny, tmp_path / "plain", run_of(models("mixtral"), "reap"))
    assert isinstance(genome, RepairedGenome) and genome.base == plain
    assert (row.operator, individual.operator) == ("reap", "reap")
    assert row.tie_break != individual.tie_break, "the repair changes something"


@pytest.mark.parametrize("name", ["random", "naee"])
def test_dynamic_skipping_applies_to_every_candidate(name: str, models: Any, tiny: Any, tmp_path: Path) -> None:
    data = run_of(models("mixtral"), name, dynamic_skipping=True, skipping_tokens=20)
    individual, genome, _, _ = run_baseline(tiny, tmp_path, data)
    edit = genome.express()
    assert isinstance(edit, EepEdit) and edit.skip_rows is not None and "skipped" in individual.summary
    assert 20 <= len(edit.skip_rows.tokens) < TOKENS, "whole prompts up to the limit"


@pytest.mark.parametrize("seed", range(5))
def test_average_linkage_is_the_mean_over_all_pairs(seed: int) -> None:
    points = np.random.default_rng(seed).standard_normal((11, 4))
    distances = np.linalg.norm(points[:, None] - points[None], axis=2)
    for count in range(1, 12):
        assert average_linkage(distances, count) == plain_clusters(distances, count)
