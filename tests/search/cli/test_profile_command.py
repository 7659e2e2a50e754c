"""`moevolve profile` on a small search: what it measures, what it refuses, and that it leaves nothing behind."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from canned_profilee import CannedProfilees
from commands_here import refusal
from dense_lab import dense_run, search
from local_workers import local_pool
from profile_lab import export_sample, write_model

import moevolve
from moevolve.search.config.files import load_run_config
from moevolve.search.running.calibration import calibrated_setup
from moevolve.search.running.launch import register
from moevolve.search.running.set_up import set_up
from moevolve.store.repository import Store
from moevolve.workers.profiling.process import ProfiledProcess, load
from moevolve.workers.profiling.run import _Process

QUICK = ("--batch-sizes", "2,1", "--timed-runs", "2", "--prompt-tokens", "8", "--new-tokens", "2", "--threads", "1")

MIXED = {"kind": "nanomoe", "variant": "II", "blocks": 4, "rank": 3}


@pytest.fixture(scope="module")
def folder(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Searches `experts` (3 pruned individuals, and 2 merged and repaired ones) and `mixed` (one of another model)."""
    folder = tmp_path_factory.mktemp("profiled")
    phases = [
        {"kind": "prune", "evaluations": 3, "initial": 2},
        {"kind": "merge", "evaluations": 2, "initial": 1, "repair": {"tokens": 60}},
    ]
    experts = load_run_config(tiny.write_run(folder / "run.yaml", "experts", phases=phases))
    mixed = dense_run(tiny, folder, MIXED, "mixed")
    few = tuple(phase.model_copy(update={"evaluations": 1, "initial": 1}) for phase in mixed.phases)
    with Store.open(f"sqlite:///{folder / 'moevolve.db'}") as store:
        for config in (experts, mixed.model_copy(update={"phases": few})):
            setup = set_up(config, f"{config.name}-1")
            register(setup, store)
            search(calibrated_setup(setup, store, local_pool(setup).calibrate), store)
    return folder


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go, of this process and of those it starts; their home of downloads is `hf` beside it."""
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    for name, value in {"TMPDIR": tmp_path / "scratch", "HF_HOME": tmp_path / "hf", "OMP_NUM_THREADS": 1}.items():
        monkeypatch.setenv(name, str(value))
    return tmp_path / "scratch"


class ProcessHere(_Process):
    """In the place of a model's process: the same in this one, without the seconds that imports take."""

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if function is load:
            self._here = ProfiledProcess(*arguments)
            return self._here.loaded
        return self._here.measure(*arguments)


def test_an_individual_beside_its_full_model(
    folder: Path, tiny: Any, in_process: Any, scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On prompts of a task: one that was merged and repaired."""

    def content() -> list[str]:
        with Store.open(f"sqlite:///{folder / 'moevolve.db'}") as store:
            return [repr(store.individual(name)) for name in ("experts:0", "experts:4")]

    before = content()
    monkeypatch.setattr("moevolve.workers.profiling.run._Process", ProcessHere)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    task = ("--task", str(tiny.task), "--split", "search")
    quick = ("--batch-sizes", "3,1", "--timed-runs", "2", "--new-tokens", "2", "--threads", "1")
    done = in_process("profile", "experts:4", *task, *quick, "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    rows = load_run_config(folder / "run.yaml").tasks[0].prepared("search", calibrating=True).examples
    # A token for each word, and one that begins the text.
    lengths = sorted(1 + len(example.prompt.split()) for example in rows)
    mean = round(sum(lengths) / len(lengths))
    sizes = {"count": len(rows), "shortest": lengths[0], "longest": lengths[-1], "mean": mean}
    settings = found["settings"]
    assert settings["prompts"] == {"task": "pick", "split": "search", **sizes}
    assert (settings["batch_sizes"], settings["prompt_tokens"]) == ([1, 3], mean)
    assert "resident set" in found["peak_memory"] or "not measured" in found["peak_memory"]
    full, merged = (model["load"] for model in found["models"])
    assert [model["label"] for model in found["models"]] == ["full", "experts:4"]
    assert (full["device"], full["threads"]) == ("cpu", 1)
    assert (full["model_type"], merged["model_type"]) == ("mixtral", "moevolve_mixtral")
    with Store.open(f"sqlite:///{folder / 'moevolve.db'}") as store:
        record = store.individual("experts:4").individual
        assert merged["parameters"] == record.parameters < full["parameters"] == record.parameters_full
        assert merged["active_parameters"] == record.active_parameters
    tokens = {1: lengths[len(lengths) // 2], 3: sum(lengths[place * len(lengths) // 6] for place in (1, 3, 5))}
    for model in found["models"]:
        for batch, (size, read) in zip(model["batches"], tokens.items(), strict=True):
            assert (batch["batch_size"], batch["prompt_tokens"]) == (size, read)
            for stage, count in (("prefill", read), ("decode", size * 2)):
                fast, slow = sorted(batch[f"{stage}_seconds"])
                assert count / slow <= batch[f"{stage}_rate"] <= count / fast
            total = sum(batch["prefill_seconds"] + batch["decode_seconds"]) / 2
            assert batch["answer_rate"] == pytest.approx(size / total)
            assert batch["peak_bytes"] is None or 0 <= batch["peak_bytes"] < 2**28
    assert content() == before, "nothing is stored"
    assert not list(scratch.iterdir())


def test_a_folder_with_code_needs_trust_and_no_store(tiny: Any, in_process: Any, scratch: Path, tmp_path: Path) -> None:
    target = export_sample(tiny, write_model("llama", tmp_path / "whole"), MIXED, tmp_path / "own").directory
    assert "--trust-remote-code" in refusal("profile", target)
    done = in_process("profile", target, "--trust-remote-code", *QUICK)
    assert done.returncode == 0, done.stderr
    for expected in ("own", "parameters", "decode", "tokens/s", "1.00x", "100 %", "peak memory:"):
        assert expected in done.stdout
    assert not list(scratch.iterdir()) and not (tmp_path / "hf" / "modules").exists()


def test_an_interruption_leaves_nothing_behind(folder: Path, scratch: Path, tmp_path: Path) -> None:
    def interrupt(stage: str) -> None:
        if stage.endswith(": 1 of 5"):
            raise KeyboardInterrupt

    (tmp_path / "canned").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        canned = CannedProfilees(patch, tmp_path / "canned")
        with pytest.raises(KeyboardInterrupt):
            moevolve.profile(
                f"sqlite:///{folder / 'moevolve.db'}",
                ["experts:0"],
                prompt_tokens=8,
                observer=moevolve.Observer(on_stage=interrupt),
            )
    processes = [int(event.split()[-1]) for event in canned.events if "loads" in event]
    assert len(processes) == 2 and not [pid for pid in processes if Path(f"/proc/{pid}").exists()]
    assert not list(scratch.iterdir())


def test_what_is_refused(folder: Path, tiny: Any, tmp_path: Path) -> None:
    store = ("--store", f"sqlite:///{folder / 'moevolve.db'}")
    task = ("--task", str(tiny.task), "--new-tokens", "2")
    for message, *arguments in (
        ("--batch-sizes", "experts:0", "--batch-sizes", "1,,2"),
        ("--batch-sizes", "experts:0", "--batch-sizes", "0"),
        ("experts:99", "experts:99"),
        ("ghost", "full", "--search", "ghost"),
        ("--search", "full"),
        ("SEARCH:INDEX", "experts"),
        ("no such folder", tmp_path / "none"),
        ("config.json", tmp_path),
        ("experts:0 and mixed:0", "experts:0", "mixed:0"),
        ("64 positions", "experts:0", "--prompt-tokens", "60", "--new-tokens", "5"),
        ("64 positions", "experts:0", *task, "--new-tokens", "60"),
        ("not both", "experts:0", *task, "--prompt-tokens", "8"),
    ):
        assert str(message) in refusal("profile", *arguments, *store)
    assert "none.db" in refusal("profile", "experts:0", "--store", f"sqlite:///{tmp_path / 'none.db'}")
    assert not (tmp_path / "none.db").exists()
