"""Lists of kept experts as commands write and read them: the candidate comes back, and others are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from report_lab import finished

import moevolve
from moevolve.search.config.files import load_run_config
from moevolve.store.repository import Store

PHASES: list[dict[str, Any]] = [
    {"kind": "prune", "evaluations": 3, "initial": 3},
    {"kind": "merge", "evaluations": 2, "initial": 1, "sigma": 0.2},
]


@pytest.fixture(scope="module")
def store(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("lists")
    genome = {"kind": "eep", "experts": 2, "groups": "per_layer"}
    final = {"rerank": 1, "random_baselines": 0}
    run = tiny.write_run(folder / "run.yaml", "some", phases=PHASES, genome=genome, final=final)
    url = f"sqlite:///{folder / 'moevolve.db'}"
    with Store.open(url) as store:
        finished(store, load_run_config(run))
    return url


@pytest.mark.parametrize(("form", "suffix"), [("list", "json"), ("vllm-ascend", "jsonl"), ("easy-ep", "json")])
def test_a_list_is_read_back_as_the_same_candidate(
    form: str, suffix: str, store: str, tiny: Any, tmp_path: Path, in_process: Any
) -> None:
    file = tmp_path / f"kept-{form}.{suffix}"
    done = in_process("export", "some:1", file, "--form", form, "--store", store)
    assert done.returncode == 0 and "the 2 experts that each layer keeps" in done.stdout, done.stderr
    assert ("--additional-config" in done.stdout) == (form == "vllm-ascend")
    elsewhere = f"sqlite:///{tmp_path / 'elsewhere.db'}"
    (found,) = moevolve.import_eep(elsewhere, [file], experts_of=str(tiny.model))
    one, other = moevolve.show(store, "some:1"), moevolve.show(elsewhere, found.ref)
    assert one.individual.content_hash == other.individual.content_hash
    assert one.individual.phenotype_hash == other.individual.phenotype_hash
    assert [each.form for each in one.exports if each.path == str(file)] == [form]


def test_what_a_list_does_not_say_is_refused(store: str, tmp_path: Path, in_process: Any) -> None:
    def refused(*command: Any) -> str:
        done = in_process("export", *command, "--store", store, cwd=tmp_path)
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
        return str(done.stderr)

    said = refused("some:4", "merged.json", "--form", "list")
    assert "--form list says only which experts are kept: it" in said and said.endswith("; export a checkpoint\n")
    assert "--dtype: a list of experts has no tensors" in refused(
        "some:1", "kept.json", "--form", "list", "--dtype", "float32"
    )
    (tmp_path / "kept.json").write_text("mine")
    assert "kept.json exists already" in refused("some:1", "kept.json", "--form", "list")
    assert (tmp_path / "kept.json").read_text() == "mine" and not (tmp_path / "merged.json").exists()
