"""A minimal method, unknown to the workers until one line in the registry adds it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from edit_checks import assert_close, digest, logits
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from moevolve.evaluators.errors import CandidateError, UserError
from moevolve.evaluators.types import Example, Matching, PreparedSplit
from moevolve.workers.checkpoints.state import empty_model, layer_state
from moevolve.workers.contract.card import CheckpointForm, ExportCard, ExportSummary
from moevolve.workers.contract.edits import Calibration, Edit, IdentityEdit, Tokens
from moevolve.workers.contract.methods import Applicator, Blueprint, Method, ModelParts, Resident
from moevolve.workers.contract.settings import EngineConfig, ModelConfig
from moevolve.workers.export.export import export_model
from moevolve.workers.methods.registry import METHODS
from moevolve.workers.profiling.costs import _idle
from moevolve.workers.worker import EvaluationWorker

SPLIT = PreparedSplit(
    "pick",
    "search",
    "rank",
    "accuracy",
    Matching(),
    1,
    " ",
    tuple(Example(f"which is larger {word} :", ("fox",), ("fox", "dog")) for word in ("a", "b", "the")),
)


@dataclass(frozen=True, slots=True)
class ScaleEdit:
    """The output of every feed-forward network times a factor."""

    factor: float

    @property
    def phenotype_hash(self) -> str:
        return hashlib.sha256(f"scale/1 {self.factor!r}".encode()).hexdigest()


class ScaleApplicator(Applicator):
    def __init__(self, parts: ModelParts) -> None:
        self._networks: list[nn.Module] = [layer.mlp for layer in parts.model.get_decoder().layers]
        self._handles: list[RemovableHandle] = []

    def apply(self, edit: Edit) -> None:
        assert isinstance(edit, ScaleEdit)
        if not np.isfinite(edit.factor):
            raise CandidateError("the factor is not finite")
        self.revert()
        for network in self._networks:
            self._handles.append(network.register_forward_hook(lambda _m, _args, out: out * edit.factor))

    def revert(self) -> None:
        while self._handles:
            self._handles.pop().remove()


@dataclass(frozen=True, slots=True)
class ScaleMeasurement:
    tokens: int


def measure_lengths(resident: Resident, sequences: Sequence[Tokens], measurement: ScaleMeasurement) -> Calibration:
    return Calibration({"lengths": np.array([len(each) for each in sequences])})


class FoldingExporter:
    """Exports of dense models: the factor is folded into the down projections."""

    def obstacle(self, resident: Resident, edit: Edit) -> str | None:
        if not resident.dense_layers:
            raise UserError("scaled experts have no checkpoint form")
        return None

    def summary(self, resident: Resident, edit: Edit, form: CheckpointForm) -> ExportSummary:
        parameters = sum(each.numel() for each in resident.model.parameters())
        return ExportSummary(0, 0, parameters, "A scaled model", "a toy", "toy", "A stock checkpoint.")

    def build(self, resident: Resident, edit: Edit, form: CheckpointForm, directory: Path) -> Blueprint:
        assert isinstance(edit, ScaleEdit)
        factor, source = edit.factor, resident.model

        def layer(index: int) -> Iterator[tuple[str, Tensor]]:
            for name, tensor in layer_state(resident, index).items():
                yield name, tensor * factor if name == "mlp.down_proj.weight" else tensor

        return Blueprint(empty_model(type(source), source.config, source.dtype), layer)


PLAIN = Method(edit=ScaleEdit, applicator=ScaleApplicator)
WHOLE = Method(
    edit=ScaleEdit,
    applicator=ScaleApplicator,
    exporter=FoldingExporter(),
    calibrators={ScaleMeasurement: measure_lengths},
    described=lambda layer, position, edit: replace(layer, layer=90 + position),
    idle={"Strange": lambda module, config: 7},
)


Workers = Callable[[str], EvaluationWorker]


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, ScaleEdit, PLAIN)


@pytest.fixture(scope="module")
def worker(checkpoint: Callable[[str], Path]) -> Workers:
    made: dict[str, EvaluationWorker] = {}

    def get(family: str) -> EvaluationWorker:
        if family not in made:
            config = ModelConfig(str(checkpoint(family)), device="cpu")
            made[family] = EvaluationWorker(config, EngineConfig())
        return made[family]

    return get


def scaled_by_hand(directory: Path, factor: float, ids: Tensor) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    for name, parameter in model.named_parameters():
        if "down_proj" in name:
            parameter.data *= factor
    with torch.no_grad():
        logits: Tensor = model(ids).logits
    return logits


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_it_is_applied_and_reverted(family: str, worker: Workers, checkpoint: Any, tokens: Tensor) -> None:
    model = worker(family).resident
    before, plain = digest(model), logits(model, None, tokens)
    assert_close(logits(model, ScaleEdit(0.5), tokens), scaled_by_hand(checkpoint(family), 0.5, tokens))
    assert torch.equal(logits(model, IdentityEdit(), tokens), plain)
    assert digest(model) == before


def test_what_it_offers_is_used(
    worker: Workers, checkpoint: Any, tokens: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METHODS, ScaleEdit, WHOLE)
    dense, experts = worker("llama"), worker("mixtral")
    report = export_model(dense.resident, ScaleEdit(0.5), tmp_path / "out", ExportCard("Half", "base", "f00d"))
    assert report.form == "stock" and report.agreement.holds
    assert_close(scaled_by_hand(tmp_path / "out", 1.0, tokens), scaled_by_hand(checkpoint("llama"), 0.5, tokens))
    with pytest.raises(UserError, match="scaled experts have no checkpoint form"):
        export_model(experts.resident, ScaleEdit(0.5), tmp_path / "other", ExportCard("", "", ""))
    made = Calibration.from_bytes(dense.calibrate(ScaleMeasurement(8), (SPLIT,)))
    assert made.arrays["lengths"].tolist() == [7, 7] and made.tokens_run == 14
    found = experts.analyse(ScaleEdit(0.5), SPLIT)
    assert [layer.layer for layer in found.routed] == [90, 91, 92]
    strange = type("Strange", (nn.Module,), {})()
    strange.matrix = nn.Parameter(torch.ones(2, 2))
    assert _idle(strange, dense.resident.model.config) == 7
