"""Recipes: checkpoints made without the store are those that the store exports, and other models are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from report_lab import finished
from safetensors.torch import load_file, save_file

import moevolve
from moevolve.evaluators.errors import UserError
from moevolve.search.config.files import load_run_config
from moevolve.store.repository import Store

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
    assert (recipe.repair is not None) == (what == "repair")
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


def test_a_file_is_written_once(store: str, tmp_path: Path, in_process: Any) -> None:
    command = ("recipe", "some:6", "--store", store, "-o", "recipe.json")
    done = in_process(*command, cwd=tmp_path)
    assert done.returncode == 0 and "moevolve apply recipe.json" in done.stdout, done.stderr
    assert in_process(*command, cwd=tmp_path).returncode == 2, "files aren't overwritten"


def test_a_malformed_recipe_is_refused(store: str, elsewhere: Path, tmp_path: Path) -> None:
    whole = moevolve.as_data(moevolve.recipe(store, "some:6"))
    for content, said in (
        ("[1]", "not a recipe"),
        ("{", "not a recipe"),
        (json.dumps(whole | {"kept": 1}), "not a recipe: kept"),
        (json.dumps(whole | {"active": 1}), "changed after it was written, so write it again: phenotype"),
        (json.dumps(whole | {"arrays": whole["arrays"][:-8]}), "so write it again: arrays"),
    ):
        (tmp_path / "bad.json").write_text(content)
        with pytest.raises(UserError, match=said) as error:
            moevolve.apply(tmp_path / "bad.json", str(elsewhere), directory=tmp_path / "out")
        assert "bad.json" in str(error.value)
