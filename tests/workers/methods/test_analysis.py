"""Counts of what routers choose, against the same counts from plain definitions, for every kind of edit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from moevolve.evaluators.errors import UserError
from moevolve.workers.engine.measuring import analyse_usage
from moevolve.workers.methods.base import IdentityEdit
from moevolve.workers.methods.eep.edit import EepEdit
from moevolve.workers.methods.factorllm.edit import FactorLlmEdit
from moevolve.workers.methods.nanomoe.edit import BlockForm, NanoMoeEdit
from moevolve.workers.methods.tomoe.edit import ToMoeEdit
from moevolve.workers.methods.usage import RoutedLayer
from moevolve.workers.model.resident import ResidentModel

SEQUENCES = [tuple(np.random.default_rng(i).integers(3, 97, 4 + 3 * i).tolist()) for i in range(6)]
TOKENS = sum(map(len, SEQUENCES))


def inputs_of(model: ResidentModel, edit: Any) -> dict[int, torch.Tensor]:
    """What goes into every layer's feed-forward block, float64 [tokens, hidden]."""
    seen: dict[int, list[torch.Tensor]] = {}
    with model.edited(edit), torch.inference_mode():
        handles = []
        for index, layer in enumerate(model.model.get_decoder().layers):

            def keep(_: Any, args: Any, index: int = index) -> None:
                seen.setdefault(index, []).append(args[0].flatten(0, -2).double())

            handles.append(layer.mlp.register_forward_pre_hook(keep))
        for sequence in SEQUENCES:
            model.model.model(torch.tensor([sequence]), use_cache=False)
        for handle in handles:
            handle.remove()
    return {index: torch.cat(rows) for index, rows in seen.items()}


def counted(choices: list[dict[int, float]], experts: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Counts, weights and pairs of per-token choices {expert: weight}."""
    pairs = Counter((one, two) for choice in choices for one in choice for two in choice)
    together = np.array([[pairs[i, j] for j in range(experts)] for i in range(experts)])
    weights = np.array([sum(choice.get(i, 0.0) for choice in choices) for i in range(experts)])
    return np.diag(together), weights, together


def check(layer: RoutedLayer, choices: list[dict[int, float]]) -> None:
    counts, weights, together = counted(choices, layer.experts)
    assert layer.counts.tolist() == counts.tolist()
    assert layer.together.tolist() == together.tolist()
    assert layer.weights == pytest.approx(weights, rel=1e-4)


def plain_routing(edit: EepEdit | None, gate: NDArray[np.float64], layer: int, rescale: bool) -> Any:
    """The paper's routing of one token, Eq. 5: {new expert: weight}."""

    def route(hidden: NDArray[np.float64]) -> dict[int, float]:
        logits = gate @ hidden
        if edit is not None and edit.router_space == "logits":
            logits = edit.router_mapping[layer] @ logits
        scores = np.exp(logits - logits.max())
        scores /= scores.sum()
        if edit is not None and edit.router_space == "probs":
            scores = edit.router_mapping[layer] @ scores
        chosen = np.argsort(-scores)[: edit.active if edit else 2]
        total = scores[chosen].sum() if rescale else 1.0
        return {int(i): float(scores[i] / total) for i in chosen}

    return route


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
@pytest.mark.parametrize("kind", ["full", "prune", "crossed", "mapped", "both"])
@pytest.mark.parametrize("space", ["probs", "logits"])
def test_experts_of_moe_layers_are_counted(
    resident: Callable[[str], ResidentModel], make_edit: Callable[..., EepEdit], family: str, kind: str, space: str
) -> None:
    model = resident(family)
    edit = None if kind == "full" else make_edit(family, kind, 4, 2, space)
    found = analyse_usage(model, edit or IdentityEdit(), SEQUENCES)
    assert found.tokens == TOKENS and not found.mixed
    inputs = inputs_of(model, edit or IdentityEdit())
    assert [layer.layer for layer in found.routed] == [layer.index for layer in model.layers]
    for position, (handle, layer) in enumerate(zip(model.layers, found.routed, strict=True)):
        route = plain_routing(edit, handle.router_weight.double().numpy(), position, handle.renormalise)
        check(layer, [route(token) for token in inputs[handle.index].numpy()])
        assert layer.experts == (6 if edit is None else 4)
        expected = () if edit is None else tuple(np.abs(edit.expert_merging[position]).argmax(axis=1))
        assert layer.origins == expected
    assert isinstance(model.applied, IdentityEdit)


def test_new_experts_with_the_same_weights_are_told_apart(resident: Callable[[str], ResidentModel]) -> None:
    eye = np.eye(6, dtype=np.float32)
    edit = EepEdit(np.stack([eye[[0, 1, 2]]] * 3), np.stack([eye[[4, 4, 5]]] * 3), 2)
    model = resident("mixtral")
    found = analyse_usage(model, edit, SEQUENCES)
    inputs = inputs_of(model, edit)
    for position, layer in enumerate(found.routed):
        route = plain_routing(edit, model.layers[position].router_weight.double().numpy(), position, True)
        check(layer, [route(token) for token in inputs[position].numpy()])
        assert layer.origins == (4, 4, 5) and layer.counts.sum() == 2 * TOKENS


@pytest.mark.parametrize("kind", ["prune", "mapped"])
def test_a_skipped_second_expert_is_not_counted(
    resident: Callable[[str], ResidentModel], make_edit: Callable[..., EepEdit], kind: str
) -> None:
    model, thresholds = resident("mixtral"), np.array([0.0, 0.6, 1.0], dtype=np.float32)
    edit = replace(make_edit("mixtral", kind, 4, 2, "logits"), skip_below=thresholds)
    found = analyse_usage(model, edit, SEQUENCES)
    inputs = inputs_of(model, edit)
    for position, (handle, layer) in enumerate(zip(model.layers, found.routed, strict=True)):
        route = plain_routing(edit, handle.router_weight.double().numpy(), position, True)
        choices = []
        for token in inputs[handle.index].numpy():
            (first, large), (second, small) = route(token).items()
            kept = small >= thresholds[position] * large
            choices.append({first: large, second: small} if kept else {first: 1.0})
        check(layer, choices)
    counted = [layer.counts.sum() for layer in found.routed]
    assert counted[0] == 2 * TOKENS > counted[1] > counted[2] == TOKENS


def test_experts_of_divided_networks_are_counted(resident: Callable[[str], ResidentModel]) -> None:
    rng, model = np.random.default_rng(1), resident("llama")
    order = np.stack([rng.permutation(48) for _ in range(3)])
    weight, bias = rng.standard_normal((3, 1, 4, 32)), rng.standard_normal((3, 1, 4))
    edit = FactorLlmEdit(order, weight, bias, 2, output_scale=2.0)
    found = analyse_usage(model, edit, SEQUENCES)
    # The stand-in takes the network's place, so that its inputs are seen in front of it.
    for index, layer in enumerate(found.routed):
        rows = inputs_of(model, edit)[index].numpy()
        logits = rows @ edit.router_weight[index, 0].T.astype(np.float64) + edit.router_bias[index, 0]
        check(layer, [dict.fromkeys(np.argsort(-token)[:2].tolist(), 2.0) for token in logits])
        assert layer.neurons == (12, 48, 48) and layer.layer == index
    assert found.tokens == TOKENS


def test_experts_of_masked_networks_are_counted(resident: Callable[[str], ResidentModel]) -> None:
    rng, model = np.random.default_rng(2), resident("llama")
    kept = np.zeros((3, 4, 48), dtype=bool)
    for layer, width in enumerate((10, 20, 48)):
        for expert in range(4):
            kept[layer, expert, rng.permutation(48)[:width]] = True
    directions = rng.standard_normal((3, 3, 32))
    edit = ToMoeEdit(kept, rng.standard_normal((3, 4, 3)), directions)
    for _ in range(2):  # a second analysis begins at zero again
        found = analyse_usage(model, edit, SEQUENCES)
    inputs = inputs_of(model, edit)
    assert [layer.layer for layer in found.routed] == [0, 1], "a layer that keeps all isn't routed"
    for index, layer in enumerate(found.routed):
        logits = inputs[index].numpy() @ (edit.router[index].astype(np.float64) @ edit.directions[index]).T
        assert layer.counts.tolist() == np.bincount(logits.argmax(axis=1), minlength=4).tolist()
        softmax = np.exp(logits - logits.max(axis=1, keepdims=True))
        assert layer.weights == pytest.approx((softmax / softmax.sum(axis=1, keepdims=True)).sum(axis=0), rel=1e-4)
        assert layer.together.tolist() == np.diag(layer.counts).tolist()
        assert layer.neurons == ((10, 20)[index], int(kept[index].any(axis=0).sum()), 48)


def test_mixing_matrices_are_read_as_the_model_runs_on_them(resident: Callable[[str], ResidentModel]) -> None:
    rng, model = np.random.default_rng(3), resident("llama")
    names = ("layers.0.mlp.up_proj", "layers.2.mlp.down_proj")
    for variant in ("I", "II", "III"):
        form = BlockForm(variant, 4, 3)
        mixing = rng.standard_normal((2, *form.mixing_shape)).astype(np.float32)
        found = analyse_usage(model, NanoMoeEdit(form, names, mixing), SEQUENCES)
        assert [layer.name for layer in found.mixed] == list(names) and not found.routed
        for layer, parameters in zip(found.mixed, mixing.astype(np.float64), strict=True):
            expected = {
                "I": lambda p, i, j: p[i, j],
                "II": lambda p, i, j: np.linalg.norm(np.diag(p[i, j])) / np.sqrt(3),
                "III": lambda p, i, j: (
                    np.linalg.norm(np.diag(p[0, i, j]) + np.outer(p[1, i, j], p[2, i, j])) / np.sqrt(3)
                ),
            }[variant]
            wanted = [[expected(parameters, i, j) for j in range(4)] for i in range(4)]
            assert layer.blocks == pytest.approx(np.array(wanted), rel=1e-5)
            assert layer.variant == variant


def test_a_dense_model_by_itself_has_no_experts(resident: Callable[[str], ResidentModel]) -> None:
    found = analyse_usage(resident("opt"), IdentityEdit(), SEQUENCES)
    assert found.tokens == TOKENS and not found.routed and not found.mixed


def test_an_inlined_network_is_watched_too(resident: Callable[[str], ResidentModel]) -> None:
    rng = np.random.default_rng(4)
    order = np.stack([rng.permutation(48) for _ in range(3)])
    edit = FactorLlmEdit(order, rng.standard_normal((3, 2, 4, 32)), rng.standard_normal((3, 2, 4)), 3)
    found = analyse_usage(resident("opt"), edit, SEQUENCES)
    assert [layer.layer for layer in found.routed] == [0, 1, 2]
    # Two routers of three experts each agree on two or three.
    assert all(2 * TOKENS <= layer.counts.sum() <= 3 * TOKENS for layer in found.routed)


def test_effective_experts_are_those_of_even_use() -> None:
    even = RoutedLayer(0, np.array([5, 5, 0, 5]), np.zeros(4), np.zeros((4, 4)))
    assert even.effective == pytest.approx(3)
    assert RoutedLayer(0, np.array([0, 7]), np.zeros(2), np.zeros((2, 2))).effective == pytest.approx(1)


def test_no_prompts_are_refused(resident: Callable[[str], ResidentModel]) -> None:
    with pytest.raises(UserError, match="no prompts"):
        analyse_usage(resident("mixtral"), IdentityEdit(), [])
