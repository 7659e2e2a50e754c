"""Whole EEP searches on tiny models of the newer families, in this process: run, interrupted, exported, evaluated."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dense_lab import never, search
from families import VARIANTS, random_model
from gguf import GGMLQuantizationType as Type
from gguf_checkpoints import gguf_checkpoint
from local_workers import local_pool
from packed_checkpoints import fp8_checkpoint
from search_lab import population

from moevolve.evaluators.errors import UserError
from moevolve.search.config.files import load_run_config
from moevolve.search.config.run import RunConfig
from moevolve.search.genomes.eep.space import EepGenome, EepSpace
from moevolve.search.interface.checkpoints.export import ExportRequest
from moevolve.search.interface.checkpoints.profile import ProfileRequest
from moevolve.search.loop.setup import SearchSetup
from moevolve.search.running.calibration import calibrated_setup
from moevolve.search.running.launch import register
from moevolve.search.running.set_up import describe_search, set_up
from moevolve.store.records import IndividualRecord
from moevolve.store.repository import Store
from moevolve.workers.checkpoints.loading import load_model
from moevolve.workers.contract.edits import IdentityEdit
from moevolve.workers.contract.messages import EvaluationRequest
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.worker import EvaluationWorker

GROUPED = "deepseek_v3-grouped"
GENOMES: dict[str, dict[str, Any]] = {
    GROUPED: {"experts": 4, "groups": 2},
    "gpt_oss": {"experts": 3, "groups": "per_layer", "router_space": "logits"},
}


def family_run(tiny: Any, folder: Path, variant: str, init: tuple[str, ...] = (), **genome: Any) -> RunConfig:
    """A search of 12 individuals on a tiny random model; `init` names baselines that it begins with."""
    directory = folder / "model"
    shutil.copytree(tiny.model, directory)
    (directory / "model.safetensors").unlink()
    sizes = {"vocab_size": 20, "hidden_size": 16, "max_position_embeddings": 64, "initializer_range": 0.4}
    random_model(variant, seed=5, **sizes).save_pretrained(directory)
    changes = {
        "model": {"path": str(directory), "device": "cpu"},
        "tasks": [{"name": str(tiny.task), "counts": {"calibration": 16}}],
        "phases": [
            {"kind": "prune", "evaluations": 6, "initial": 5} | ({"init": list(init)} if init else {}),
            {"kind": "merge", "evaluations": 6, "sigma": 0.2},
        ],
        "genome": {"kind": "eep"} | GENOMES.get(variant, {"experts": 4, "groups": 2}) | genome,
    }
    return load_run_config(tiny.write_run(folder / "run.yaml", variant, **changes))


def searched(run: RunConfig, store: Store, stop: int | None = None) -> SearchSetup:
    """A whole search, one that was interrupted after `stop` evaluations if said."""
    setup = set_up(run, "family-1")
    register(setup, store)
    setup = calibrated_setup(setup, store, local_pool(setup).calibrate)
    if stop is not None:
        with pytest.raises(KeyboardInterrupt):
            search(setup, store, stop)
        setup = calibrated_setup(set_up(run, "family-1"), store, never)
    search(setup, store)
    return setup


def best_of(store: Store, phase: str) -> IndividualRecord:
    rows = [row for row in store.history("family-1") if row.phase == phase]
    return max(rows, key=lambda row: row.fitness or 0.0)


def score(setup: SearchSetup, model: ModelConfig) -> float:
    """An unedited checkpoint's score on the search split."""
    (split,) = setup.prepared["search"]
    worker = EvaluationWorker(model, setup.config.engine)
    reply = worker.evaluate(EvaluationRequest(IdentityEdit(), (split.ref,)), (split,))
    assert reply.failure is None
    return reply.results[split.fingerprint].score


LOGITS = ("gpt_oss", "gemma4_text", "deepseek_v4")
LAUNCHED = ("granitemoehybrid", GROUPED, "gpt_oss", "gemma4_text", "nemotron_h-latent", "deepseek_v4")
"""Families whose models differ for a launch; the last three can't be repaired."""


@pytest.mark.parametrize("variant", LAUNCHED)
def test_a_launch_accepts_what_can_be_searched_and_repaired(tiny: Any, tmp_path: Path, variant: str) -> None:
    """What a launch finds out about a model before it starts workers, for a search with repairs."""
    genome: dict[str, Any] = {"router_space": "logits"} if variant in LOGITS else {}
    run = family_run(tiny, tmp_path, variant, **(genome | {"experts": 4, "groups": "per_layer"}))
    phases = [{"kind": "prune", "evaluations": 4, "initial": 4}, {"kind": "repair", "evaluations": 2}]
    config = RunConfig.model_validate(run.model_dump(mode="json") | {"phases": phases})
    if VARIANTS[variant].unrepairable:
        with pytest.raises(UserError, match=r"phases\.1\.repair: candidates of a .* model can't be repaired: its "):
            describe_search(config)
        config = RunConfig.model_validate(run.model_dump(mode="json") | {"phases": phases[:1]})
    _, facts = describe_search(config)
    assert facts.experts in (6, 8) and len(facts.moe_layers) >= 2


@pytest.mark.parametrize("variant", list(GENOMES))
def test_a_search_runs_resumes_and_its_best_are_stock_checkpoints(tiny: Any, tmp_path: Path, variant: str) -> None:
    """Its calibrated starts see the family's own scores, biases and routing groups."""
    names = ("frequency", "soft_activation", "reap", *(() if variant == GROUPED else ("naee",)))
    run = family_run(tiny, tmp_path, variant, names)
    with Store.open(f"sqlite:///{tmp_path / 'whole.db'}") as store:
        setup = searched(run, store)
        rows = store.history("family-1")
        assert [row.phase for row in rows] == ["prune"] * 6 + ["merge"] * 6
        assert tuple(row.operator for row in rows[: len(names)]) == names
        assert all(row.failure is None for row in rows) and len({row.fitness for row in rows}) > 2
        space = setup.space
        assert isinstance(space, EepSpace)
        for row in rows[:6]:
            genome = space.from_bytes(row.genome)
            assert isinstance(genome, EepGenome)
            # As many experts of every routing group.
            groups = space.subsets.routing_groups
            by_group = space.kept(genome).reshape(space.groups, groups, -1) // (space.experts // groups)
            assert genome.one_hot and (by_group == np.arange(groups)[:, None]).all()
        for phase in ("prune", "merge"):
            best = best_of(store, phase)
            report = ExportRequest(f"{variant}:{best.index}", tmp_path / phase).answer(store)
            assert report.parameters == space.describe(space.from_bytes(best.genome)).parameters
            assert report.form == "stock" or phase == "merge"
            if report.form == "stock":
                exported = ModelConfig(str(report.directory), device="cpu")
                assert score(setup, exported) == pytest.approx(best.fitness, abs=1e-6)
        whole = population(store, "family-1")
    if variant != GROUPED:
        return
    # A store of its own, so that no evaluation is reused.
    with Store.open(f"sqlite:///{tmp_path / 'interrupted.db'}") as store:
        searched(run, store, stop=7)
        assert population(store, "family-1") == whole


def test_a_quantised_checkpoint_is_exported_in_its_own_format(tiny: Any, tmp_path: Path) -> None:
    """What is pruned is copied; what is merged has new numbers, so it is written dequantised."""
    run = family_run(tiny, tmp_path, GROUPED)
    plain = Path(run.model.path)
    model, tokenizer = load_model(ModelConfig(str(plain), device="cpu", dtype="float32"))
    packed, _ = fp8_checkpoint(model, tokenizer, tmp_path / "quantised")  # type: ignore[arg-type]
    run = run.model_copy(update={"model": replace(run.model, path=packed.path, dtype="float32")})
    with Store.open(f"sqlite:///{tmp_path / 'whole.db'}") as store:
        setup = searched(run, store)
        pruned = f"{GROUPED}:{best_of(store, 'prune').index}"
        report = ExportRequest(pruned, tmp_path / "pruned").answer(store)
        assert (report.form, report.agreement) == ("source", None) and report.copied > 0
        settings = json.loads((report.directory / "config.json").read_text())
        assert settings["quantization_config"]["quant_method"] == "fp8" and settings["n_routed_experts"] == 4
        exported = ModelConfig(str(report.directory), device="cpu", dtype="float32")
        assert score(setup, exported) == pytest.approx(best_of(store, "prune").fitness, abs=1e-6)
        (record,) = store.individual(pruned).exports
        assert record.form == "source" and json.loads(record.checks) == {"copied": report.copied}
        assert ExportRequest(pruned, tmp_path / "plain", dtype="float32").answer(store).form == "stock"
        merged = f"{GROUPED}:11"  # its routers are merged, too
        report = ExportRequest(merged, tmp_path / "merged").answer(store)
        assert report.form in ("stock", "native")
        assert "quantization_config" not in json.loads((report.directory / "config.json").read_text())
        for individual, changes, message in (
            (merged, {"form": "source"}, "doesn't fold into a smaller router"),
            (pruned, {"form": "stock", "mtp": "keep"}, "--mtp: only the source form"),
        ):
            with pytest.raises(UserError, match=message):
                ExportRequest(individual, tmp_path / "refused", **changes).answer(store)  # type: ignore[arg-type]
    assert not (tmp_path / "refused").exists()


def test_a_gguf_file_is_searched_and_pruned(tiny: Any, tmp_path: Path) -> None:
    """The file, with its config and tokenizer next to it, is a model like any other."""
    run = family_run(tiny, tmp_path, "gpt_oss")
    model, tokenizer = load_model(ModelConfig(run.model.path, device="cpu", dtype="float32"))
    packed, _ = gguf_checkpoint(model, tokenizer, tmp_path / "gguf", Type.F16)  # type: ignore[arg-type]
    run = run.model_copy(update={"model": replace(run.model, path=packed.path, dtype="float32")})
    with Store.open(f"sqlite:///{tmp_path / 'whole.db'}") as store:
        setup = searched(run, store)
        best = best_of(store, "prune")
        report = ExportRequest(f"gpt_oss:{best.index}", tmp_path / "pruned").answer(store)
        with pytest.raises(UserError, match=r"is a GGUF file.* --form stock"):
            ProfileRequest((f"gpt_oss:{best.index}",)).answer(store)
    assert report.form == "source" and {"config.json", "model.gguf"} <= {
        each.name for each in report.directory.iterdir()
    }
    exported = ModelConfig(str(report.directory / "model.gguf"), device="cpu", dtype="float32")
    assert score(setup, exported) == pytest.approx(best.fitness, abs=1e-6)


def test_a_search_that_the_family_cannot_express_never_starts(tiny: Any, tmp_path: Path) -> None:
    run = family_run(tiny, tmp_path, "gpt_oss", router_space="probs")
    with pytest.raises(UserError, match=r"genome\.router_space \(gpt_oss model\)"):
        set_up(run, "family-1")
    (tmp_path / "grouped").mkdir()
    with pytest.raises(UserError, match=r"init: naee .* 2 routing groups"):
        set_up(family_run(tiny, tmp_path / "grouped", GROUPED, ("naee",)), "family-1")
