"""The contract of all registered methods, on tiny models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from dense_edits import HEAD_DIM, LAYERS, divided, head_masks, masked
from edit_checks import Residents, assert_close, digest, logits
from families import edit_of_kind
from torch import Tensor

from moevolve.evaluators.errors import CandidateError, UserError
from moevolve.evaluators.types import Example, Matching, PreparedSplit
from moevolve.workers.checkpoints.native import import_native
from moevolve.workers.contract.card import ExportCard
from moevolve.workers.contract.edits import (
    Calibration,
    Edit,
    IdentityEdit,
    LayeredEdit,
    Measurement,
    calibration_fingerprint,
)
from moevolve.workers.contract.fitting import FitRows
from moevolve.workers.contract.methods import ExpertsOwner
from moevolve.workers.contract.settings import EngineConfig, ModelConfig
from moevolve.workers.engine.engine import GenerationEngine
from moevolve.workers.engine.measuring import analyse_usage, calibrate
from moevolve.workers.export.export import export_model
from moevolve.workers.methods.eep.edit import EepEdit, ExpertsMeasurement
from moevolve.workers.methods.factorllm.edit import (
    CmoeMeasurement,
    FactorLlmEdit,
    FactorLlmMeasurement,
    MoeficationMeasurement,
)
from moevolve.workers.methods.nanomoe.edit import BlockForm, NanoMoeEdit
from moevolve.workers.methods.registry import METHODS, experts_owner
from moevolve.workers.methods.repair.edit import RepairedEdit, RepairSettings
from moevolve.workers.methods.tomoe.edit import ToMoeEdit, ToMoeMeasurement
from moevolve.workers.model.resident import ResidentModel
from moevolve.workers.profiling.costs import active_parameters

EXPERTS = 4
SEQUENCES = [tuple(np.random.default_rng(i).integers(3, 97, 4 + 3 * i).tolist()) for i in range(4)]
TOKENS = sum(map(len, SEQUENCES))
SPLIT = PreparedSplit(
    "task",
    "search",
    "generate",
    "accuracy",
    Matching(),
    1,
    " ",
    tuple(Example(f"the quick {word} fox", ("dog",), ()) for word in ("a", "b", "brown", "larger")),
)


@dataclass(frozen=True)
class Sample:
    """The inputs that a method is tested with.

    Attributes:
        family: a model that its edits fit.
        other: one that they don't.
        edits: some of its edits; the first has a native checkpoint.
        broken: an edit whose values are at fault.
        measurements: one of every type that it has a calibrator for.
        routed: layers of experts that are seen in the first edit.
    """

    family: str
    other: str
    edits: tuple[Any, ...]
    broken: Any
    measurements: tuple[Measurement, ...] = ()
    routed: int = 0


def mixed(seed: int = 0, step: float = 0.1) -> NanoMoeEdit:
    form, names = BlockForm("II", 4, 3), ("layers.0.mlp.up_proj", "layers.2.self_attn.q_proj")
    steps = np.random.default_rng(seed).normal(0, step, (len(names), *form.mixing_shape))
    return NanoMoeEdit(form, names, form.unmixed + steps)


def not_finite() -> EepEdit:
    edit = edit_of_kind(3, 6, "both", EXPERTS, 2, "probs", 0)
    matrices = edit.expert_merging.copy()
    matrices[1, 2, 3] = np.nan
    return EepEdit(edit.router_mapping, matrices, 2)


def repaired(base: Any) -> RepairedEdit:
    rows = np.random.default_rng(5).integers(3, 97, 240)
    return RepairedEdit(base, RepairSettings(ridge_lambdas=(0.1,)), FitRows(rows, np.full(12, 20), np.full(12, 20)))


EEP_EDITS = tuple(edit_of_kind(3, 6, kind, EXPERTS, 2, "probs", seed) for seed, kind in enumerate(("both", "prune")))
SAMPLES: dict[type, Sample] = {
    EepEdit: Sample(
        "mixtral",
        "llama",
        EEP_EDITS,
        not_finite(),
        (ExpertsMeasurement(("importance", "usage"), None, 60),),
        routed=3,
    ),
    FactorLlmEdit: Sample(
        "llama",
        "mixtral",
        (divided(), divided(seed=1)),
        divided(bias=np.inf),
        (
            FactorLlmMeasurement(EXPERTS, 2, 1, "kmeans", True, 3, 1e-3, 60),
            MoeficationMeasurement(EXPERTS, 60),
            CmoeMeasurement(EXPERTS, 1, 5, 1e-3, 60),
        ),
        routed=3,
    ),
    NanoMoeEdit: Sample("llama", "opt", (mixed(), mixed(1)), mixed(step=np.inf)),
    ToMoeEdit: Sample(
        "llama",
        "mixtral",
        tuple(masked(heads=head_masks(), seed=seed) for seed in (0, 1)),
        masked(heads=replace(head_masks(), value_bias=np.full((LAYERS, HEAD_DIM), np.nan))),
        (ToMoeMeasurement(True, 2, 0.5, 3, 20, 60),),
        routed=3,
    ),
    RepairedEdit: Sample(
        "mixtral",
        "llama",
        tuple(repaired(edit) for edit in EEP_EDITS),
        repaired(not_finite()),
        routed=3,
    ),
}
KINDS = pytest.mark.parametrize("kind", METHODS, ids=lambda kind: kind.__name__)


@KINDS
def test_there_is_a_sample_of_everything_that_a_method_offers(kind: type) -> None:
    sample, method = SAMPLES[kind], METHODS[kind]
    assert method.edit is kind and all(type(edit) is kind for edit in (*sample.edits, sample.broken))
    assert {type(measurement) for measurement in sample.measurements} == set(method.calibrators)
    assert all(isinstance(edit, Edit) and len(edit.phenotype_hash) == 64 for edit in sample.edits)


@KINDS
def test_edits_change_the_model_and_are_reverted_bit_for_bit(kind: type, resident: Residents, tokens: Tensor) -> None:
    sample = SAMPLES[kind]
    model = resident(sample.family)
    before, plain = digest(model), logits(model, None, tokens)
    first, second = (logits(model, edit, tokens) for edit in sample.edits)
    assert float((first - plain).abs().max()) > 1e-3 and float((first - second).abs().max()) > 1e-3
    for edit in sample.edits:  # in place of each other, not of the unedited model
        model.apply(edit)
    model.revert()
    assert torch.equal(logits(model, None, tokens), plain)
    assert digest(model) == before
    assert torch.equal(logits(model, sample.edits[0], tokens), first), "what ran before leaves no trace"
    for edit in sample.edits:
        assert not isinstance(edit, LayeredEdit) or len(set(edit.layer_hashes)) == LAYERS


@KINDS
def test_edits_at_fault_or_of_other_models_are_refused(kind: type, resident: Residents, tokens: Tensor) -> None:
    sample = SAMPLES[kind]
    model = resident(sample.family)
    plain = logits(model, None, tokens)
    for before in (IdentityEdit(), sample.edits[0]):
        model.apply(before)
        with pytest.raises(CandidateError, match="finite"):
            model.apply(sample.broken)
        assert isinstance(model.applied, IdentityEdit)
        assert torch.equal(logits(model, None, tokens), plain)
    other = resident(sample.other)
    with pytest.raises(UserError):
        other.apply(sample.edits[0])
    assert isinstance(other.applied, IdentityEdit)


@KINDS
def test_checkpoints_compute_the_same_and_can_be_counted(kind: type, resident: Residents, tmp_path: Path) -> None:
    sample = SAMPLES[kind]
    model = resident(sample.family)
    edit = sample.edits[0]
    report = export_model(model, edit, tmp_path / "out", ExportCard("A model", "someone/base", "f00d"))
    assert report.form == "native" and report.agreement.holds
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert edit.phenotype_hash in card and f"{report.parameters:,}" in card
    exported = cast(Any, import_native(tmp_path / "out")).from_pretrained(tmp_path / "out")
    assert report.parameters >= active_parameters(exported) > 0


@KINDS
def test_every_token_is_counted_when_a_model_is_watched(kind: type, resident: Residents, tokens: Tensor) -> None:
    sample = SAMPLES[kind]
    model = resident(sample.family)
    plain = logits(model, None, tokens)
    edited = logits(model, sample.edits[0], tokens)
    found = analyse_usage(model, sample.edits[0], SEQUENCES)
    assert (found.tokens, len(found.routed)) == (TOKENS, sample.routed)
    for layer in found.routed:
        # Every token has as many experts as any other, in all of these.
        assert layer.counts.sum() > 0 and layer.counts.sum() % TOKENS == 0
        assert layer.together.trace() == layer.counts.sum()
        assert (layer.together == layer.together.T).all()
    assert torch.equal(logits(model, None, tokens), plain)
    assert_close(logits(model, sample.edits[0], tokens), edited, 0.0)


@KINDS
def test_measurements_measure_the_same_every_time_and_change_nothing(
    kind: type, resident: Residents, tokens: Tensor
) -> None:
    sample = SAMPLES[kind]
    model = resident(sample.family)
    engine = GenerationEngine(model.model, model.tokenizer, EngineConfig())
    before, plain = digest(model), logits(model, None, tokens)
    edited = [logits(model, edit, tokens) for edit in sample.edits]
    model.revert()
    for measurement in sample.measurements:
        made, again = (calibrate(model, engine, measurement, [SPLIT]) for _ in range(2))
        stored = Calibration.from_bytes(made.to_bytes())
        assert stored.tokens_run == 4 * 6, "a beginning, four words and an answer"
        for name in set(made.arrays) - {"seconds"}:
            assert np.array_equal(made.arrays[name], again.arrays[name])
            assert np.array_equal(made.arrays[name], stored.arrays[name])
        assert len(calibration_fingerprint(measurement, "model", "engine", ("task",))) == 64
    assert torch.equal(logits(model, None, tokens), plain)
    for edit, expected in zip(sample.edits, edited, strict=True):
        assert torch.equal(logits(model, edit, tokens), expected)
    model.revert()
    assert digest(model) == before


def test_one_method_owns_the_experts(
    model_config: Callable[..., ModelConfig], resident: Residents, tmp_path: Path
) -> None:
    (owner,) = [method for method in METHODS.values() if issubclass(method.applicator, ExpertsOwner)]
    assert experts_owner() is owner
    hosted = ResidentModel.load(model_config("mixtral", expert_offload="host"))
    for ordinal, layer in enumerate(resident("mixtral").layers):
        for name, tensor in hosted.original_experts(ordinal).items():
            assert torch.equal(tensor, layer.expert_tensors()[name])
    report = export_model(resident("mixtral"), IdentityEdit(), tmp_path / "out", ExportCard("As it is", "base", "f00d"))
    assert (report.form, report.experts, report.active) == ("stock", 6, 2)


def test_unknown_edits_are_refused_with_those_that_are_known(resident: Residents, tmp_path: Path) -> None:
    class Strange:
        phenotype_hash = "strange"

    known = "EepEdit, FactorLlmEdit, NanoMoeEdit, RepairedEdit, ToMoeEdit"
    with pytest.raises(UserError, match=f"edits of kind Strange are unknown; there are {known}"):
        resident("mixtral").apply(Strange())
    with pytest.raises(UserError, match="edits of kind Strange can't be exported; export one of EepEdit, FactorLlm"):
        export_model(resident("mixtral"), Strange(), tmp_path / "out", ExportCard("", "", ""))
    assert isinstance(resident("mixtral").applied, IdentityEdit)
