"""Groups of experts against all possible groupings, rows against least squares in numpy, and both on tiny models."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from edit_checks import digest, logits
from family_samples import edit_of_kind
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from repair_samples import rows_of, seen_at, sequences_of
from torch import Tensor

from moevolve.workers.contract.card import ExportCard
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.export.export import export_model
from moevolve.workers.methods.eep.edit import EepEdit
from moevolve.workers.methods.eep.outputs import fit_rows, group_experts
from moevolve.workers.methods.repair.apply import RepairApplicator
from moevolve.workers.methods.repair.edit import RepairedEdit, RepairSettings
from moevolve.workers.model.resident import ResidentModel

Configs = Callable[..., ModelConfig]
Floats = NDArray[np.float64]
TOKENS, HIDDEN, EXPERTS = 300, 12, 6
GROUPS = np.array([0, 2, 1, 0, 1, 0])
SEQUENCES = sequences_of([40] * 6)
UNSEEN = torch.tensor(sequences_of([30] * 4, seed=9))


def within(together: Floats, groups: NDArray[np.int64]) -> float:
    """The sum of `together` over pairs of experts within a group, each pair once."""
    pairs = itertools.combinations(range(len(groups)), 2)
    return sum(together[one, other] for one, other in pairs if groups[one] == groups[other])


@st.composite
def layers(draw: st.DrawFn) -> tuple[Floats, list[int]]:
    count = draw(st.integers(2, 9))
    shares = np.random.default_rng(draw(st.integers(0, 999))).random((20, count)) ** draw(st.sampled_from([1, 8]))
    kept = draw(st.permutations(range(count)))[: draw(st.integers(1, count))]
    return shares.T @ shares, list(kept)


@settings(max_examples=30, deadline=None)
@given(layer=layers())
def test_no_move_leaves_less_in_common_within_groups(layer: tuple[Floats, list[int]]) -> None:
    together, kept = layer
    given_before = together.copy()
    groups = group_experts(together, kept)
    assert groups[kept].tolist() == list(range(len(kept))) and groups.min() >= 0
    found = within(together, groups)
    for expert in set(range(len(together))) - set(kept):
        for group in range(len(kept)):
            moved = groups.copy()
            moved[expert] = group
            assert within(together, moved) >= found - 1e-6 * together.sum()
    assert (together == given_before).all() and (group_experts(together, kept) == groups).all()


def inputs(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs of a router, its rows, their biases, and the logits."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator) + 0.5
    weight, bias = torch.randn(EXPERTS, HIDDEN, generator=generator), torch.randn(EXPERTS, generator=generator)
    return hidden, weight, bias, hidden @ weight.t()


def rows_by_hand(hidden: Floats, scores: Floats, start: Floats) -> Floats:
    """Ridge regression as least squares with additional rows: [n', inputs]."""
    chances = np.exp(scores - scores.max(axis=1, keepdims=True))
    chances /= chances.sum(axis=1, keepdims=True)
    mass = np.stack([chances[:, group == GROUPS].sum(axis=1) for group in range(3)], axis=1)
    target = np.log(np.maximum(mass, 1e-6))
    target -= target.mean(axis=1, keepdims=True)
    start = start - start.mean(axis=0)
    weigh = np.sqrt(1e-3 * (hidden**2).sum() / hidden.shape[1])
    features = np.concatenate([hidden, weigh * np.eye(hidden.shape[1])])
    wanted = np.concatenate([target - hidden @ start.T, np.zeros((hidden.shape[1], 3))])
    return start + np.linalg.lstsq(features, wanted, rcond=None)[0].T


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_rows_are_those_of_least_squares(scale: float, biased: bool) -> None:
    hidden, weight, bias, scores = inputs()
    weight, scores = scale * weight, scale * scores + (bias if biased else 0)
    kept = [0, 2, 1]
    found, shift = fit_rows(hidden, scores, GROUPS, weight[kept], bias[kept] if biased else None) or (None, None)
    assert found is not None and (shift is not None) == biased
    features, start = hidden.double().numpy(), weight[kept].double().numpy()
    if biased:
        features = np.concatenate([features, np.ones((TOKENS, 1))], axis=1)
        start = np.concatenate([start, bias[kept].double().numpy()[:, None]], axis=1)
    expected = rows_by_hand(features, scores.double().numpy(), start)
    np.testing.assert_allclose(found, expected[:, :HIDDEN], atol=2e-5 * scale, rtol=1e-4)
    if shift is not None:
        np.testing.assert_allclose(shift, expected[:, HIDDEN], atol=2e-5 * scale, rtol=1e-4)


def filled(base: EepEdit) -> RepairedEdit:
    return RepairedEdit(base, RepairSettings((0.1,), neurons=True), rows_of(SEQUENCES))


def rows_of_repair(model: ResidentModel, edit: RepairedEdit) -> list[tuple[Tensor, Tensor | None] | None]:
    with model.edited(edit):
        applicator = model._applicators[RepairedEdit]
        assert isinstance(applicator, RepairApplicator)
        return [each.rows for each in applicator.selections.values()]


@pytest.mark.parametrize(
    ("family", "kind", "space", "fitted"),
    [
        ("mixtral", "merged", "probs", True),
        ("mixtral", "both", "logits", False),
        ("olmoe", "prune", "probs", False),
        ("gpt_oss", "prune", "logits", True),
        ("deepseek_v3", "prune", "probs", False),
    ],
)
def test_rows_are_fitted_where_a_stock_router_has_them(
    family: str, kind: str, space: Any, fitted: bool, model_config: Configs, tmp_path: Path
) -> None:
    model = ResidentModel.load(model_config(family))
    count = model.layers[0].count
    base = edit_of_kind(len(model.layers), count, kind, 4, space=space)
    before, plain = digest(model), logits(model, None, UNSEEN)
    found = rows_of_repair(model, filled(base))
    assert [each is not None for each in found] == [fitted] * len(model.layers)
    edited = logits(model, filled(base), UNSEEN)
    # Once more what was kept of the first time; and nothing of it stays.
    assert torch.equal(logits(model, filled(base), UNSEEN), edited)
    assert torch.equal(logits(model, None, UNSEEN), plain)
    with model.edited(filled(base)):
        assert dict(model.report()).get("router rows") == (
            f"fitted to the routing of groups of experts, in {len(found)} of {len(found)} layers" if fitted else None
        )
    if family == "gpt_oss":
        report = export_model(model, filled(base), tmp_path / "out", ExportCard("A model", "someone/base", "f00d"))
        assert report.agreement.holds
    assert digest(model) == before


def test_a_layer_is_routed_by_rows_fitted_to_what_it_is_given(model_config: Configs, tmp_path: Path) -> None:
    """Layer by layer: inputs of the repaired model, groups from the unedited router's weights on them."""
    from transformers import AutoModelForCausalLM

    config, base = model_config("mixtral"), edit_of_kind(3, EXPERTS, "prune", 3)
    export_model(config, filled(base), tmp_path / "out", ExportCard("A model", "someone/base", "f00d"))
    small = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    whole = AutoModelForCausalLM.from_pretrained(config.path).eval()
    for index, seen in enumerate(seen_at(small, SEQUENCES)):
        gate = whole.model.layers[index].mlp.gate.weight.data
        kept = base.router_mapping[index].argmax(axis=1).tolist()
        hidden = torch.tensor(seen["into"], dtype=torch.float32)
        chances = torch.softmax(hidden @ gate.t(), dim=1)
        best = chances.topk(2, dim=1)
        shares = torch.zeros_like(chances).scatter_(1, best.indices, best.values / best.values.sum(dim=1, keepdim=True))
        groups = group_experts((shares.t() @ shares).double().numpy(), kept)
        expected = fit_rows(hidden, hidden @ gate.t(), groups, gate[kept], None)
        assert expected is not None
        torch.testing.assert_close(small.model.layers[index].mlp.gate.weight.data, expected[0], atol=1e-4, rtol=1e-3)
