"""Statistics of experts, against loops over tokens in float64 from the definitions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from plain_experts import Token, change, plain_tokens

from moevolve.evaluators.errors import UserError
from moevolve.workers.contract.edits import Calibration, Edit, IdentityEdit
from moevolve.workers.families.decoder import state_of
from moevolve.workers.methods.eep.accuracy import scores_with_errors
from moevolve.workers.methods.eep.calibrate_experts import calibrate_experts
from moevolve.workers.methods.eep.edit import EepEdit, ExpertsMeasurement, SubsetMeasurement
from moevolve.workers.model.resident import ResidentModel

EXPERTS = 6
ALL = ("importance", "pairs", "usage")
SEQUENCES = [tuple(np.random.default_rng(i).integers(3, 97, 5 + i).tolist()) for i in range(8)]
TOKENS = sum(map(len, SEQUENCES))
FAMILIES = ("mixtral", "qwen2_moe")
families = pytest.mark.parametrize("family", FAMILIES)


def subset_measurement(layers: int, **changes: Any) -> SubsetMeasurement:
    groups = tuple(range(layers))
    return replace(SubsetMeasurement(3, 2, groups, logits_space=False, limit=100, sample=10_000), **changes)


@pytest.fixture(scope="module")
def plain(resident: Callable[[str], ResidentModel]) -> Callable[[str], list[list[Token]]]:
    made: dict[str, list[list[Token]]] = {}

    def get(family: str) -> list[list[Token]]:
        if family not in made:
            model = resident(family)
            made[family] = [plain_tokens(model, layer, SEQUENCES) for layer in model.layers]
        return made[family]

    return get


def measured(model: ResidentModel, subsets: SubsetMeasurement | None = None) -> dict[str, Any]:
    with torch.inference_mode():
        return dict(calibrate_experts(model, SEQUENCES, ExpertsMeasurement(ALL, subsets, 1000)).arrays)


@families
def test_the_stream_agrees_with_the_definitions(family: str, resident: Any, plain: Any) -> None:
    found = measured(resident(family))
    for layer, tokens in enumerate(plain(family)):
        assert len(tokens) == TOKENS
        counts, soft = np.zeros(EXPERTS), np.zeros(EXPERTS)
        importance, powers = np.zeros((EXPERTS, 3, 3)), np.arange(3)
        norms = np.zeros((EXPERTS, EXPERTS))
        for token in tokens:
            weighted = np.zeros((EXPERTS, token.outputs.shape[1]))
            for expert in token.chosen:
                weighted[expert] = float(token.gates[expert]) * token.outputs[expert].double().numpy()
            norms += np.outer(*[np.linalg.norm(weighted, axis=1)] * 2)
            soft += token.probabilities.numpy()
            for expert in token.chosen:
                counts[expert] += 1
                gate, norm = float(token.gates[expert]), float(token.outputs[expert].norm())
                importance[expert] += gate ** powers[:, None] * norm ** powers[None, :]
        assert found["counts"][layer].tolist() == counts.tolist()
        np.testing.assert_allclose(found["soft_activation"][layer], soft, rtol=1e-5)
        np.testing.assert_allclose(found["importance_sums"][layer], importance, rtol=1e-4)
        np.testing.assert_allclose(found["pair_norms"][layer], norms, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "active", "logits_space", "sample"),
    [("mixtral", 2, False, 30), ("qwen2_moe", 1, True, 10_000), ("qwen2_moe", 2, True, 4)],
)
def test_every_subset_is_compared_with_all_experts(
    family: str, active: int, logits_space: bool, sample: int, resident: Any, plain: Any
) -> None:
    model = resident(family)
    measurement = subset_measurement(len(model.layers), active=active, logits_space=logits_space, sample=sample)
    found = measured(model, measurement)["subset_discrepancy"]
    subsets = list(combinations(range(EXPERTS), 3))
    assert found.shape == (len(model.layers), len(subsets))
    for layer, tokens in enumerate(plain(family)):
        sampled = tokens[:: -(-TOKENS // sample)]
        assert len(sampled) <= sample
        expected = [change(sampled, kept, active, model.layers[layer].renormalise, logits_space) for kept in subsets]
        np.testing.assert_allclose(found[layer], expected, rtol=1e-3)


@pytest.mark.parametrize("family", ["deepseek_v4", "llama4_text"])
def test_subsets_are_compared_as_families_of_their_own_route(family: str, resident: Any) -> None:
    """A subset's discrepancy is that of the first layer's routed experts, whose inputs no edit changes.

    DeepSeek-V4's first layer chooses experts by token ids. Llama-4's experts get inputs that are scaled.
    """
    model, subsets = resident(family), list(combinations(range(EXPERTS), 3))
    layers, first = len(model.layers), model.layers[0]
    found = measured(model, subset_measurement(layers))["subset_discrepancy"][0]

    def outputs(edit: Edit) -> torch.Tensor:
        given: list[torch.Tensor] = []

        def add(module: Any, args: Any, out: Any) -> None:
            given.append(state_of(out).reshape(-1, 32).double())

        hooks = [module.register_forward_hook(add) for module in (first.shared_expert, first.block)]
        with model.edited(edit), torch.inference_mode():
            for tokens in SEQUENCES:
                model.model(torch.tensor([tokens]))
        for hook in hooks:
            hook.remove()
        return torch.cat(given[1::2]) - torch.cat(given[::2])

    whole = outputs(IdentityEdit())
    for kept in (subsets[0], subsets[7], subsets[-1]):
        matrix = np.tile(np.eye(EXPERTS, dtype=np.float32)[list(kept)], (layers, 1, 1))
        change = outputs(EepEdit(matrix, matrix, 2)) - whole
        expected = float(change.square().sum() / whole.square().sum())
        assert found[subsets.index(kept)] == pytest.approx(expected, rel=1e-3)


def test_experts_whose_inputs_are_scaled_are_measured_by_what_they_give(resident: Any) -> None:
    """Saliency (REAP) of Llama-4: the mean norm of what an expert gives for scaled inputs of those that chose it."""
    model = resident("llama4_text")
    found, layer = measured(model), model.layers[0]
    scores, _ = scores_with_errors(found)
    given: list[torch.Tensor] = []
    hook = layer.gate.register_forward_hook(lambda module, args, out: given.append(args[0]))
    with torch.inference_mode():
        for tokens in SEQUENCES:
            model.model(torch.tensor([tokens]))
    hook.remove()
    hidden = torch.cat(given).double()
    logits = hidden @ layer.router_weight.double().t()
    for expert in range(EXPERTS):
        rows = (logits.topk(2).indices == expert).any(dim=1)
        gate, up = (
            hidden[rows] * logits[rows, expert, None].sigmoid() @ layer.experts.gate_up_proj[expert].double()
        ).chunk(2, 1)
        norms = (gate * gate.sigmoid() * up @ layer.experts.down_proj[expert].double()).norm(dim=1)
        assert scores[0, expert] == pytest.approx(float(norms.mean()), rel=1e-4)
        assert found["counts"][0, expert] == int(rows.sum())
    np.testing.assert_allclose(found["soft_activation"][0], logits.sigmoid().sum(0), rtol=1e-4)


@pytest.mark.parametrize(("family", "grouped"), [("qwen2_moe", False), ("mixtral", True)])
def test_above_the_limit_experts_are_dropped_one_by_one(family: str, grouped: bool, resident: Any, plain: Any) -> None:
    model = resident(family)
    layers = len(model.layers)
    owners = (0, *[1] * (layers - 1)) if grouped and layers > 2 else (0,) * layers if grouped else tuple(range(layers))
    found = measured(model, subset_measurement(layers, layer_groups=owners, limit=19))
    assert "subset_discrepancy" not in found
    for group in range(max(owners) + 1):
        members = [tokens for tokens, owner in zip(plain(family), owners, strict=True) if owner == group]
        kept = tuple(range(EXPERTS))
        while len(kept) > 3:
            rests = [tuple(e for e in kept if e != dropped) for dropped in kept]
            costs = [
                sum(change(each, rest, 2, model.layers[0].renormalise, False) for each in members) for rest in rests
            ]
            kept = rests[int(np.argmin(costs))]
        assert found["subset_kept"][group].tolist() == list(kept)


def test_measuring_leaves_the_model_as_it_was(resident: Any) -> None:
    model, ids = resident("mixtral"), torch.tensor([SEQUENCES[3]])
    with torch.inference_mode():
        before = model.model(ids).logits
        measurement = ExpertsMeasurement(("importance",), None, 1000)
        found = calibrate_experts(model, SEQUENCES, measurement)
        assert torch.equal(model.model(ids).logits, before)
    assert set(found.arrays) == {"importance_sums", "importance_tokens", "row_squares"}
    assert Calibration.from_bytes(found.to_bytes()).arrays["row_squares"].dtype == np.float64


def test_a_sample_that_needs_too_much_memory_is_refused(monkeypatch: pytest.MonkeyPatch, resident: Any) -> None:
    monkeypatch.setattr("moevolve.workers.methods.eep.calibrate_experts.MEMORY", 3 * 36 * 4 * 20)
    with pytest.raises(UserError, match=r"genome.naee_tokens: .*; use 20 at most"):
        measured(resident("mixtral"), subset_measurement(3))
    measured(resident("mixtral"), subset_measurement(3, sample=20))
