"""Measuring alignments: planted copies are recovered, matches are the best there are."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from edit_checks import logits
from torch import Tensor

from moevolve.evaluators.errors import UserError
from moevolve.workers.config import ModelConfig
from moevolve.workers.methods.base import Calibration
from moevolve.workers.methods.eep.alignment import Alignment, encode, in_place
from moevolve.workers.methods.eep.calibrate_alignment import Neurons, calibrate_alignment, match, match_all
from moevolve.workers.methods.eep.edit import AlignmentRecipe, EepEdit
from moevolve.workers.methods.eep.experts import rearrange
from moevolve.workers.model.loading import load_model
from moevolve.workers.model.resident import ResidentModel

Configs = Callable[..., ModelConfig]
FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3", "glm4_moe")
EXPERTS, WIDTH = 6, 24
RECIPE = AlignmentRecipe(sample=40, rounds=3, tokens=1000)
SEQUENCES = [tuple(np.random.default_rng(i).integers(3, 97, 5 + i).tolist()) for i in range(8)]


def planted(config: ModelConfig) -> tuple[ResidentModel, Alignment]:
    """A model whose expert 4 is expert 1 in every layer with its neurons moved, and how they were moved."""
    model, tokenizer = load_model(config)
    rng = np.random.default_rng(5)
    blocks = [layer.mlp.experts for layer in model.model.layers if hasattr(layer.mlp, "experts")]
    moves = np.stack([in_place(EXPERTS, WIDTH)] * len(blocks))
    for block, codes in zip(blocks, moves, strict=True):
        codes[4] = encode(rng.permutation(WIDTH), rng.random(WIDTH) < 0.5)
        tensors = {"gate_up_proj": block.gate_up_proj.data, "down_proj": block.down_proj.data}
        for tensor in tensors.values():
            tensor[4] = tensor[1]
        rearrange(tensors, codes)
    return ResidentModel(model, tokenizer, config), Alignment(moves)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("settings", [{}, {"originals": "host"}])
def test_a_planted_copy_is_recovered_exactly(
    family: str, settings: dict[str, str], model_config: Configs, tokens: Tensor
) -> None:
    model, _ = planted(model_config(family, **settings))
    layers = len(model.layers)
    found = Alignment(calibrate_alignment(model, SEQUENCES, RECIPE).arrays["alignment"])
    assert found.shape == (layers, EXPERTS, WIDTH)
    for ordinal in range(layers):
        tensors = {name: tensor.clone() for name, tensor in model.original_experts(ordinal).items()}
        rearrange(tensors, found.codes[ordinal])
        for tensor in tensors.values():
            assert torch.equal(tensor[1], tensor[4])
            assert torch.equal(0.5 * tensor[1] + 0.5 * tensor[4], tensor[1])
    mapping = np.stack([np.eye(EXPERTS, dtype=np.float32)[[0, 1, 2]]] * layers)
    average = mapping.copy()
    average[:, 1] = 0.5 * np.eye(EXPERTS)[1] + 0.5 * np.eye(EXPERTS)[4]
    expected = logits(model, EepEdit(mapping, mapping, 2), tokens)
    assert float((logits(model, EepEdit(mapping, average, 2, alignment=found), tokens) - expected).abs().max()) < 1e-4
    assert float((logits(model, EepEdit(mapping, average, 2), tokens) - expected).abs().max()) > 1e-2


def neurons_of(model: ResidentModel, inputs: Tensor, expert: int) -> Neurons:
    gate_up, down = (tensor[expert] for tensor in model.original_experts(0).values())
    return Neurons.of(gate_up, down, inputs, torch.nn.functional.silu)


def alike(one: Neurons, two: Neurons) -> float:
    """Sum of the products, place by place."""
    pairs = ((one.gate, two.gate), *zip(one.rest, two.rest, strict=True))
    return float(sum((a * b).sum() for a, b in pairs))


def test_a_match_is_the_best_of_all() -> None:
    generator = torch.Generator().manual_seed(0)
    width, hidden = 4, 3

    def expert() -> Neurons:
        gate_up, down = (torch.randn(shape, generator=generator) for shape in ((2 * width, hidden), (hidden, width)))
        return Neurons.of(gate_up, down, torch.randn(10, hidden, generator=generator), torch.nn.functional.silu)

    for _ in range(5):
        one, two = expert(), expert()
        best = max(
            alike(one.arranged(encode(np.array(order), np.array(flips))), two)
            for order in itertools.permutations(range(width))
            for flips in itertools.product([False, True], repeat=width)
        )
        assert alike(one.arranged(match(one, two)), two) == pytest.approx(best, abs=1e-5)


def test_rounds_make_experts_more_alike(model_config: Configs) -> None:
    model = ResidentModel.load(model_config("mixtral"))
    neurons = partial(neurons_of, model, torch.randn(20, 32, generator=torch.Generator().manual_seed(1)))

    def total(codes: np.ndarray) -> float:
        placed = [neurons(expert).arranged(codes[expert]) for expert in range(EXPERTS)]
        return sum(alike(one, two) for one, two in itertools.combinations(placed, 2))

    order = [3, 0, 1, 2, 5, 4]
    found = [match_all(order, neurons, rounds) for rounds in (0, 1, 2, 10)]
    totals = [total(codes) for codes in found]
    assert totals == sorted(totals) and totals[0] < totals[-1]
    assert total(in_place(EXPERTS, WIDTH)) < 0.5 * totals[0]
    assert all((codes[3] == np.arange(WIDTH)).all() for codes in found)


def test_the_reference_is_the_most_used_expert(model_config: Configs) -> None:
    model = ResidentModel.load(model_config("mixtral"))
    chosen: list[Tensor] = []
    handle = model.layers[1].block.gate.register_forward_hook(lambda _, args, out: chosen.append(out[2].flatten()))  # type: ignore[union-attr]
    codes = calibrate_alignment(model, SEQUENCES, RECIPE).arrays["alignment"]
    handle.remove()
    most_used = int(torch.cat(chosen).bincount().argmax())
    still = (codes[1] == np.arange(WIDTH)).all(axis=1)
    assert still[most_used] and still.sum() == 1


def test_calibrations_are_repeatable_and_pass_through_bytes(model_config: Configs) -> None:
    model = ResidentModel.load(model_config("olmoe"))
    first = calibrate_alignment(model, SEQUENCES, RECIPE)
    again = calibrate_alignment(model, SEQUENCES, RECIPE)
    stored = Calibration.from_bytes(first.to_bytes())
    for other in (again, stored):
        assert np.array_equal(first.arrays["alignment"], other.arrays["alignment"])
    assert Alignment(stored.arrays["alignment"]).fingerprint == Alignment(first.arrays["alignment"]).fingerprint


def test_models_and_prompts_that_will_not_do_are_refused(model_config: Configs) -> None:
    with pytest.raises(UserError, match=r"genome.align: this model has no experts"):
        calibrate_alignment(ResidentModel.load(model_config("llama")), SEQUENCES, RECIPE)
    model = ResidentModel.load(model_config("mixtral"))
    with pytest.raises(UserError, match=r"genome.align: there are no prompts"):
        calibrate_alignment(model, [], RECIPE)


@pytest.mark.parametrize("change", ["bias", "clamped", "transposed"])
def test_experts_of_other_forms_are_refused(
    change: str, model_config: Configs, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ResidentModel.load(model_config("mixtral"))
    experts = model.layers[2].experts
    if change == "bias":
        experts.register_parameter("down_proj_bias", torch.nn.Parameter(torch.zeros(EXPERTS, 32)))
    elif change == "clamped":
        plain = experts._apply_gate
        monkeypatch.setattr(experts, "_apply_gate", lambda both: plain(both.clamp(max=7.0)), raising=False)
    else:
        monkeypatch.setattr(experts, "is_transposed", True, raising=False)
    with pytest.raises(UserError, match=r"genome.align: experts of mixtral are not plain gated networks"):
        calibrate_alignment(model, SEQUENCES, RECIPE)
