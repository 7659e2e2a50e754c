"""Recipes: checkpoints made without the store are those that the store exports, and other models are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from report_lab import finished
from safetensors.torch import load_file, save_file

import moevolve
from moevolve.evaluators.errors import UserError
from moevolve.kernels.routing_rule import RoutingRule
from moevolve.search.config.files import load_run_config
from moevolve.search.interface.recipe_file import read_recipe, selection_edit
from moevolve.store.repository import Store
from moevolve.workers.contract.facts import ModelFacts
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.model.describe import describe_model

PHASES: list[dict[str, Any]] = [
    {"kind": "prune", "evaluations": 3, "initial": 3, "init": ["reap", "random"]},
    {"kind": "merge", "evaluations": 3, "initial": 1, "sigma": 0.2},
    {"kind": "repair", "evaluations": 4, "repair": {"ridge_lambdas": [0.1], "tokens": 200, "neurons": True}},
]


@pytest.fixture(scope="module")
def store(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("recipes")
    run = tiny.write_run(
        folder / "run.yaml",
        "some",
        phases=PHASES,
        window=4,  # so that the first repaired one is a pruned one
        genome={"kind": "eep", "experts": 2, "groups": 4, "router_space": "logits"},
        final={"rerank": 1, "random_baselines": 0},
    )
    url = f"sqlite:///{folder / 'moevolve.db'}"
    with Store.open(url) as store:
        finished(store, load_run_config(run))
    return url


@pytest.fixture(scope="module")
def elsewhere(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the model."""
    folder = tmp_path_factory.mktemp("elsewhere") / "copy"
    shutil.copytree(tiny.model, folder)
    return folder


def logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        found: torch.Tensor = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()(tokens).logits
    return found


@pytest.mark.parametrize(("index", "form", "what"), [(1, "source", None), (5, None, "matrices"), (6, None, "repair")])
def test_a_copy_of_the_model_becomes_the_same_checkpoint(
    index: int, form: Any, what: str | None, store: str, elsewhere: Path, tmp_path: Path
) -> None:
    recipe = moevolve.recipe(store, f"some:{index}", output=tmp_path / "recipe.json")
    assert moevolve.show(store, f"some:{index}").individual.phenotype_hash == recipe.phenotype
    assert (recipe.matrices is not None, recipe.repair is not None) == (what == "matrices", what == "repair")
    assert list(recipe.kept_experts) == [0, 1, 2, 3] and recipe.scores and recipe.tasks
    moevolve.export(store, f"some:{index}", tmp_path / "stored", form=form)
    report = moevolve.apply(tmp_path / "recipe.json", str(elsewhere), directory=tmp_path / "applied", form=form)
    assert report.experts == 2 and report.form == (form or "stock")
    files = [tmp_path / name / "model.safetensors" for name in ("stored", "applied")]
    if what != "repair":
        assert files[0].read_bytes() == files[1].read_bytes()
    tokens = torch.arange(12).view(2, 6)
    stored, applied = (logits(file.parent, tokens) for file in files)
    assert (stored - applied).abs().max() <= 1e-4 * stored.abs().max()
    assert f"the recipe of some:{index}" in (tmp_path / "applied" / "README.md").read_text()


def test_another_model_is_refused_by_its_first_tensor_that_differs(store: str, elsewhere: Path, tmp_path: Path) -> None:
    moevolve.recipe(store, "some:1", output=tmp_path / "recipe.json")
    shutil.copytree(elsewhere, tmp_path / "other")
    file = tmp_path / "other" / "model.safetensors"
    tensors = load_file(file)
    changed = sorted(tensors)[len(tensors) // 2]
    tensors[changed] = tensors[changed].clone()
    tensors[changed].view(-1)[-1] += 1e-3
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(UserError, match=f"not the recipe's model: the first tensor that differs is {changed}, here F"):
        moevolve.apply(tmp_path / "recipe.json", str(tmp_path / "other"), directory=tmp_path / "out")
    save_file(tensors | {"extra": torch.zeros(1)}, file, {"format": "pt"})
    with pytest.raises(UserError, match="not the recipe's model, which has no tensor extra"):
        moevolve.apply(tmp_path / "recipe.json", str(tmp_path / "other"), directory=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_token_sequences_can_be_in_a_file_of_their_own(
    store: str, elsewhere: Path, tmp_path: Path, in_process: Any
) -> None:
    command = ("recipe", "some:6", "--store", store, "-o", "recipe.json", "--data", "rows.json")
    done = in_process(*command, cwd=tmp_path)
    assert done.returncode == 0 and "rows.json" in done.stdout, done.stderr
    assert in_process(*command, cwd=tmp_path).returncode == 2, "files aren't overwritten"
    assert json.loads((tmp_path / "recipe.json").read_text())["rows"]["content"] is None
    apply = ("apply", "recipe.json", elsewhere, "out")
    done = in_process(*apply, cwd=tmp_path)
    assert done.returncode == 2 and "give their file with --data" in done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    (tmp_path / "wrong.json").write_text(json.dumps(rows | {"sequences": rows["sequences"] - 1}))
    done = in_process(*apply, "--data", "wrong.json", cwd=tmp_path)
    assert done.returncode == 2 and "aren't those that their hash says" in done.stderr
    done = in_process(*apply, "--data", "rows.json", cwd=tmp_path)
    assert done.returncode == 0 and "parts agree with the model" in done.stdout, done.stderr


def test_a_list_of_kept_experts_is_a_recipe(elsewhere: Path, tmp_path: Path) -> None:
    """REAP's keys are numbers of layers, llm-compressor's are modules."""
    kept = [[0, 3, 1], [1, 2, 3], [0, 2, 3], [3, 1, 0]]
    (tmp_path / "reap.json").write_text(json.dumps(dict(enumerate(kept))))
    modules = {f"model.layers.{layer}.block_sparse_moe": each for layer, each in enumerate(kept)}
    (tmp_path / "modules.json").write_text(json.dumps({"retained_experts": modules}))
    assert read_recipe(tmp_path / "reap.json") == read_recipe(tmp_path / "modules.json")
    moevolve.apply(tmp_path / "reap.json", str(elsewhere), directory=tmp_path / "out", form="source")
    source, small = (load_file(folder / "model.safetensors") for folder in (elsewhere, tmp_path / "out"))
    for layer, experts in enumerate(kept):
        router = f"model.layers.{layer}.block_sparse_moe.gate.weight"
        assert torch.equal(small[router], source[router][experts])
        for new, old in enumerate(experts):
            name = f"model.layers.{layer}.block_sparse_moe.experts.{{}}.w2.weight"
            assert torch.equal(small[name.format(new)], source[name.format(old)])


def test_a_malformed_recipe_is_refused(elsewhere: Path, tmp_path: Path) -> None:
    for content, said in (
        ("[1]", "a recipe is a JSON object"),
        ("{", "not JSON"),
        ('{"recipe": 9}', "a recipe of form 9"),
        ('{"mlp": [1]}', "'mlp' is no decoder layer"),
        ('{"0": [1, "2"]}', "0.1: Input should be a valid integer"),
        ('{"0": [1], "1": [1], "2": [1]}', "layer 3 retains 0 experts, and layer 0 1"),
        ('{"0": [1, 1], "1": [1, 2], "2": [1, 2], "3": [1, 2]}', "layer 0 retains expert 1 twice"),
        ('{"0": [1], "1": [1], "2": [1], "3": [8]}', "layer 3 retains expert 8 of"),
    ):
        (tmp_path / "bad.json").write_text(content)
        with pytest.raises(UserError, match=said) as error:
            moevolve.apply(tmp_path / "bad.json", str(elsewhere), directory=tmp_path / "out")
        assert "bad.json" in str(error.value)


def test_layers_for_multi_token_prediction_are_passed_over(elsewhere: Path) -> None:
    facts: ModelFacts = describe_model(ModelConfig(str(elsewhere), device="cpu"))
    kept = dict.fromkeys(range(5), (1, 0))
    assert np.array_equal(selection_edit(kept, facts, "a").expert_merging.argmax(axis=2), [[1, 0]] * 4)
    assert facts.rule == RoutingRule(True)
