"""A checkpoint that was changed in its place: what is stored of it before is of another model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from local_workers import local_pool

from moevolve.evaluators.errors import UserError
from moevolve.search.config.files import parse_run_config, parse_stored_config
from moevolve.search.running.execute import execute
from moevolve.search.running.launch import register, set_up_new
from moevolve.search.running.observer import Observer
from moevolve.search.running.resume import set_up_stored
from moevolve.store.repository import Store


def change(file: Path, **settings: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def end_at_every_answer(model: Path) -> None:
    words = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    change(model / "generation_config.json", eos_token_id=[2, *(words[letter] for letter in "ABCD")])


def write_again(model: Path) -> None:
    for name in ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"):
        content = dict(reversed(json.loads((model / name).read_text()).items()))
        version = {"transformers_version": "99.0"} if "transformers_version" in content else {}
        (model / name).write_text(json.dumps(content | version, indent=1))


class Searches:
    """Short searches of one checkpoint that can be changed, in a store of `folder`."""

    def __init__(self, tiny: Any, folder: Path) -> None:
        self.model = shutil.copytree(tiny.model, folder / "model")
        task = yaml.safe_load(tiny.task.read_text()) | {"fitness": "generate", "max_new_tokens": 1}
        task["source"]["files"]["all"] = str(tiny.folder / "pick.jsonl")
        self.task = folder / "generate.yaml"
        self.task.write_text(yaml.safe_dump(task))
        self._tiny, self._folder = tiny, folder

    def run(self, name: str, **engine: Any) -> list[tuple[Any, ...]]:
        """Phenotype, fitness and tie-break value of every individual of a search."""
        data = self._tiny.run_data(
            name,
            model={"path": str(self.model), "device": "cpu"},
            tasks=[{"name": str(self.task), "counts": {"search": 12}}],
            phases=[{"kind": "prune", "evaluations": 4, "initial": 4}],
            engine=engine,
            final={"rerank": 0, "test": False},
        )
        with Store.open(f"sqlite:///{self._folder}/moevolve.db") as opened:
            setup = set_up_new(parse_run_config(data, "test"))
            register(setup, opened)
            execute(setup, opened, Observer(), local_pool)
            return [(row.phenotype_hash, row.fitness, row.tie_break) for row in opened.history(setup.search_id)]

    def measured(self, name: str) -> int:
        """Evaluations that were made for a search rather than found."""
        with Store.open(f"sqlite:///{self._folder}/moevolve.db") as store:
            return sum(cost.evaluations - cost.earlier for cost in store.costs(store.search(name)).splits)


@pytest.fixture
def searches(tiny: Any, tmp_path: Path) -> Searches:
    return Searches(tiny, tmp_path)


def test_scores_are_kept_if_a_checkpoint_is_only_saved_again_and_measured_anew_if_it_changes(
    searches: Searches, in_process: Any
) -> None:
    def evaluate(split: str, status: int = 0) -> Any:
        done = in_process("evaluate", "first:0", "--task", searches.task, "--split", split, "--json")
        assert done.returncode == status, done.stderr
        return done.stderr if status else json.loads(done.stdout)

    first = searches.run("first")
    assert any(fitness > 0 for _, fitness, _ in first)
    measured = evaluate("dev")
    write_again(searches.model)
    assert searches.run("again") == first
    assert searches.measured("again") == 0 < searches.measured("first")
    assert evaluate("dev") == measured, "the seconds that it took, too"

    searches.run("wrapped", chat_template="mixtral")
    assert searches.measured("wrapped") == searches.measured("first"), "their prompts are others"

    end_at_every_answer(searches.model)
    assert searches.run("changed") == [(phenotype, 0, tie) for phenotype, _, tie in first]
    assert "not the checkpoint that search first ran on" in evaluate("search", 2)
    with Store.open(f"sqlite:///{searches.model.parent}/moevolve.db") as store, pytest.raises(UserError, match="first"):
        set_up_stored(store, "first")


def test_a_search_on_a_hub_id_keeps_to_its_commit(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    repository = tmp_path / "hub" / "models--owner--name"
    (repository / "refs").mkdir(parents=True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    def move(commit: str) -> None:
        shutil.copytree(tiny.model, repository / "snapshots" / commit)
        (repository / "refs" / "main").write_text(commit)

    first, second = "1" * 40, "2" * 40
    move(first)
    tasks = [{"name": str(tiny.task)}]
    data = tiny.run_data("hub", model={"path": "owner/name", "device": "cpu"}, tasks=tasks)
    settings = parse_run_config(data, "test")
    with Store.open(f"sqlite:///{tmp_path}/hub.db") as store:
        setup = set_up_new(settings)
        register(setup, store)
        assert setup.config.model.revision == first, "what its workers load"
        assert set_up_stored(store, "hub", lambda _: settings).config.model.revision == first
        move(second)
        assert set_up_new(settings).config.model.revision == second
        assert set_up_stored(store, "hub").config.model.revision == first
        assert parse_stored_config(store.search("hub").config, "hub").model.revision == first
        with pytest.raises(UserError, match="not the checkpoint that search hub ran on"):
            set_up_stored(store, "hub", lambda _: settings)
