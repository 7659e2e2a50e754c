"""Small checkpoints of several families, and individuals of every kind exported from them, in this process."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter
from search_samples import MERGE, PRUNE, TUNE
from tiny_models import WORDS, save_tiny_model

from moevolve.evaluators.preparation.prepare import prepare_split
from moevolve.evaluators.preparation.registry import load_task
from moevolve.search.genomes.contract.base import Description
from moevolve.search.genomes.registry import AnyGenomeSection, make_space
from moevolve.workers.checkpoints.native import import_native
from moevolve.workers.contract.card import ExportCard
from moevolve.workers.contract.edits import Calibration
from moevolve.workers.contract.settings import EngineConfig, ModelConfig
from moevolve.workers.export.export import export_model
from moevolve.workers.model.describe import describe_model
from moevolve.workers.worker import EvaluationWorker

LAYERS, HIDDEN, HEADS, VOCABULARY = 3, 32, 4, 20
_COMMON: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "num_experts_per_tok": 2,
}
_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 24, "num_experts": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": 24, "num_local_experts": 4, "tie_word_embeddings": True},
    "qwen2_moe": _EXPERTS | {"shared_expert_intermediate_size": 20, "intermediate_size": 40, "mlp_only_layers": [1]},
    "llama4_text": {"intermediate_size": 24, "intermediate_size_mlp": 40, "num_local_experts": 4, "head_dim": 8},
    "llama": {"intermediate_size": 48},
    "qwen2": {"intermediate_size": 48},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": HIDDEN},
    "phi": {"intermediate_size": 48, "partial_rotary_factor": 0.5},
    "phi3": {"intermediate_size": 48},
}


@dataclass(frozen=True)
class Exported:
    """An individual's checkpoint, what its genome's space says it costs, and what the unedited model has."""

    directory: Path
    form: str
    described: Description
    parameters_full: int


def write_model(family: str, directory: Path) -> Path:
    """A random checkpoint of a family, with the tiny workspace's tokenizer."""
    save_tiny_model(directory, family, WORDS, seed=4, **(_COMMON | FAMILIES[family]))
    return directory


def export_sample(tiny: Any, model: Path, genome: dict[str, Any], directory: Path, merge: bool = False) -> Exported:
    """Export a random individual of a `genome` section; with `merge`, a mutated one of EEP's merge phase."""
    config = ModelConfig(str(model), device="cpu")
    facts = describe_model(config)
    space = make_space(TypeAdapter(AnyGenomeSection).validate_python(genome), facts)
    if space.measurement is not None:
        splits = (prepare_split(load_task(str(tiny.task)), "search"),)
        made = EvaluationWorker(config, EngineConfig()).calibrate(space.measurement, splits)
        space = space.calibrated(Calibration.from_bytes(made))
    rng = np.random.default_rng(6)
    found = space.sample(rng, PRUNE if genome["kind"] == "eep" else TUNE).genome
    if merge:
        found = space.breed(rng, MERGE, (found,)).genome
    report = export_model(config, found.express(), directory, ExportCard("sample", str(model), ""))
    return Exported(report.directory, report.form, space.describe(found), facts.parameters)


def load_plainly(directory: Path, **settings: Any) -> Any:
    """The checkpoint as `transformers` makes it, its modelling code kept out of the user's cache."""
    from transformers import AutoModelForCausalLM

    native = "auto_map" in json.loads((directory / "config.json").read_text())
    loader: Any = import_native(directory) if native else AutoModelForCausalLM
    return loader.from_pretrained(directory, **settings).eval()
