"""Repair of divided and masked networks and of masked attentions, with features computed by hand from the weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dense_edits import LAYERS, WIDTH, divided, head_masks, masked
from edit_checks import Residents, assert_close, digest, logits
from families import DENSE, representatives
from repair_samples import Floats, rows_of, sequences_of
from torch import Tensor, nn

from moevolve.evaluators.errors import UserError
from moevolve.workers.contract.card import ExportCard
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.export.export import export_model
from moevolve.workers.methods.factorllm.edit import FactorLlmEdit
from moevolve.workers.methods.repair import fits
from moevolve.workers.methods.repair.apply import RepairApplicator
from moevolve.workers.methods.repair.edit import RepairedEdit, RepairSettings
from moevolve.workers.methods.repair.ridge import FitOutcome
from moevolve.workers.methods.tomoe.edit import HeadMasks, ToMoeEdit
from moevolve.workers.model.resident import ResidentModel

Configs = Callable[..., ModelConfig]
Seen = list[dict[str, Floats]]

EXPERTS = 4
LENGTHS = (40, 17, 50, 3, 44, 31, 28, 39, 60, 52, 1, 47, 40, 17, 50, 33)
SEQUENCES = sequences_of(LENGTHS)
CHECKED = np.repeat([each % 8 == 7 for each in range(len(LENGTHS))], LENGTHS)
KEPT_OUT = SEQUENCES[7::8]
"""The sequences of the tokens that are `CHECKED`."""
UNSEEN = torch.tensor(sequences_of([40] * 6, seed=9))
STRENGTH = 0.1
WIDTHS, HEADS = (20, WIDTH, 33), head_masks((3, 3, 3), (5, 8, 3))


def repaired(base: Any, ridge_lambdas: tuple[float, ...] = (STRENGTH, 1.0)) -> RepairedEdit:
    return RepairedEdit(base, RepairSettings(ridge_lambdas), rows_of(SEQUENCES))


def outcomes_of(model: ResidentModel) -> list[FitOutcome | None]:
    """Results of the fits of the edit on the model."""
    applicator = model._applicators[RepairedEdit]
    assert isinstance(applicator, RepairApplicator)
    return applicator.outcomes


@torch.no_grad()
def streams_of(model: Any, sequences: Sequence[tuple[int, ...]] = SEQUENCES) -> Seen:
    """The stream `between` attention and network, and `behind` every layer; a Llama's output projections' inputs."""
    found: list[dict[str, list[Tensor]]] = [{} for _ in range(LAYERS)]

    def note(layer: int, name: str, given: bool) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            value = args[0] if given else output
            found[layer].setdefault(name, []).append(value.reshape(-1, value.shape[-1]).double())

        return hook

    with ExitStack() as stack:
        for i, layer in enumerate(model.get_decoder().layers):
            modules = [(layer, "behind", False)]
            if hasattr(layer, "post_attention_layernorm"):
                modules.append((layer.post_attention_layernorm, "between", True))
                modules.append((layer.mlp, "into", True))
                if hasattr(layer, "self_attn"):
                    modules.append((layer.self_attn.o_proj, "attended", True))
            if hasattr(layer, "post_feedforward_layernorm"):
                modules += [
                    (layer.post_feedforward_layernorm, name, name == "entering") for name in ("entering", "added")
                ]
            for module, name, given in modules:
                stack.callback(module.register_forward_hook(note(i, name, given)).remove)
        for each in sequences:
            model(torch.tensor([each]))
    return [{name: torch.cat(values).numpy() for name, values in layer.items()} for layer in found]


EDITS: dict[str, tuple[str, Any]] = {
    "divided, parallel": ("phi", divided(3, 2, experts=EXPERTS)),
    "masked, plain": ("opt", masked(WIDTHS)),
    "heads": ("llama", masked(WIDTHS, HEADS)),
    "heads with biases": ("qwen2", masked(WIDTHS, HEADS)),
    **{family: (family, masked(WIDTHS)) for family in DENSE},
}


@pytest.mark.parametrize(
    "name", representatives([each for each in EDITS if each not in DENSE] + ["gemma2", "granite", "phi3"], EDITS)
)
def test_what_is_left_is_told_and_less(name: str, resident: Residents) -> None:
    """Families with a norm behind a network are fitted to what enters it, weighted by how it counts behind it."""
    family, base = EDITS[name]
    model, edit = resident(family), repaired(base)
    before, plain, reference = digest(model), logits(model, None, UNSEEN), streams_of(model.model, KEPT_OUT)
    with model.edited(edit):
        found, now = outcomes_of(model), streams_of(model.model, KEPT_OUT)
    places = [(i, part) for i in range(LAYERS) for part in (("between", "behind") if "heads" in name else ("behind",))]
    assert len(found) == len(places) and sum(each is not None for each in found) > LAYERS / 2
    for (layer, part), outcome in zip(places, found, strict=True):
        if outcome is not None:
            left = reference[layer][part] - now[layer][part]
            if "entering" in reference[layer]:
                entering, added = (reference[layer][each] for each in ("entering", "added"))
                gains = np.linalg.norm(added, axis=1) / np.linalg.norm(entering, axis=1)
                left = gains[:, None] * (entering - now[layer]["entering"])
            assert (left**2).sum() == pytest.approx(outcome.after, rel=2e-3)
            assert outcome.after < outcome.before
    cut, fitted = (logits(model, each, UNSEEN) for each in (base, edit))
    assert float((fitted - plain).square().sum()) < float((cut - plain).square().sum())
    assert torch.equal(logits(model, None, UNSEEN), plain)
    assert digest(model) == before


def activations(layer: Any, hidden: Floats) -> Floats:
    """Activations of a gated network, [tokens, width]."""
    gate, up = (hidden @ part.weight.detach().double().numpy().T for part in (layer.mlp.gate_proj, layer.mlp.up_proj))
    bend = np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))
    return (gate * (1 + bend) / 2 if "Gemma" in type(layer).__name__ else gate / (1 + np.exp(-gate))) * up


def divided_by_hand(edit: FactorLlmEdit, hidden: Floats) -> Floats:
    """Factors on the first layer's activations, with neurons in their loaded order: [tokens, width]."""
    scores = hidden @ edit.router_weight[0, 0].T.astype(np.float64) + edit.router_bias[0, 0]
    factors = np.zeros((len(hidden), WIDTH))
    for token, row in enumerate(scores):
        for expert in np.argsort(-row)[: edit.active]:
            neurons = edit.order[0][expert * WIDTH // EXPERTS : (expert + 1) * WIDTH // EXPERTS]
            factors[token, neurons] = 1.0
    return factors


def masked_by_hand(edit: ToMoeEdit, hidden: Floats) -> Floats:
    scores = hidden @ (edit.router[0].astype(np.float64) @ edit.directions[0]).T
    return edit.kept[0][scores.argmax(axis=1)].astype(np.float64)


def ridge(phi: Floats, residual: Floats) -> Floats:
    fitted = phi[~CHECKED]
    scale = STRENGTH * np.mean(np.sum(fitted**2, axis=0))
    return np.linalg.solve(fitted.T @ fitted + scale * np.eye(phi.shape[1]), fitted.T @ residual[~CHECKED])


@pytest.mark.parametrize(
    ("family", "base"),
    [
        ("llama", divided(experts=EXPERTS)),
        ("llama", masked(WIDTHS)),
        ("granite", divided(experts=EXPERTS)),
        ("gemma2", masked(WIDTHS)),
    ],
    ids=["divided", "masked", "multiplied", "normalised"],
)
def test_a_first_network_is_the_one_fitted_by_hand(family: str, base: Any, resident: Residents) -> None:
    """Where its output is normalised, errors count as they are behind the norm of the unedited model."""
    model = resident(family)
    layer: Any = model.model.get_decoder().layers[0]
    reference, loaded = streams_of(model.model)[0], layer.mlp.down_proj.weight.detach().double().numpy()
    whole = activations(layer, reference["into"])
    factors = (divided_by_hand if isinstance(base, FactorLlmEdit) else masked_by_hand)(base, reference["into"])
    phi = whole * factors
    multiplier, roots = (0.6 if family == "granite" else 1), np.ones((len(phi), 1))
    if family == "gemma2":
        weight, entering = layer.post_feedforward_layernorm.weight.detach().double().numpy(), whole @ loaded.T
        added = entering / np.sqrt((entering**2).mean(axis=1) + 1e-6)[:, None] * (1 + weight)
        roots = np.linalg.norm(added, axis=1, keepdims=True) / np.linalg.norm(entering, axis=1, keepdims=True)
    change = ridge(roots * multiplier * phi, roots * multiplier * (whole - phi) @ loaded.T)
    expected = multiplier * phi @ (loaded.T + change)
    with model.edited(repaired(base, (STRENGTH,))):
        now = streams_of(model.model)[0]
        assert outcomes_of(model)[0] is not None
    found = now["entering"] if family == "gemma2" else now["behind"] - now["between"]
    np.testing.assert_allclose(found, expected, atol=2e-4 * np.abs(expected).max())


def test_a_first_attention_is_the_one_fitted_by_hand(resident: Residents) -> None:
    model, base = resident("llama"), masked(WIDTHS, HEADS)
    layer: Any = model.model.get_decoder().layers[0]
    reference, loaded = streams_of(model.model)[0], layer.self_attn.o_proj.weight.detach().double().numpy()
    with model.edited(base):
        cut = streams_of(model.model)[0]
    change = ridge(cut["attended"], reference["between"] - cut["between"])
    with model.edited(repaired(base, (STRENGTH,))):
        fitted = layer.self_attn.o_proj.weight.detach().double().numpy()
        assert outcomes_of(model)[0] is not None
    np.testing.assert_allclose(fitted - loaded, change.T, atol=2e-4 * np.abs(change).max())


def test_a_stock_form_stays_stock(resident: Residents, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model, edit = resident("llama"), repaired(divided(1, experts=EXPERTS, bias=0))
    assert export_model(model, edit, tmp_path / "out", ExportCard("A model", "someone/base", "f00d")).form == "stock"
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()(UNSEEN).logits
    assert_close(found, logits(model, edit, UNSEEN), 2e-5)


def test_networks_whose_output_is_normalised_are_refused(
    checkpoint: Callable[[str], Path], model_config: Configs, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(checkpoint("opt"), do_layer_norm_before=False)
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(checkpoint("opt")).save_pretrained(tmp_path)
    post_norm = ResidentModel.load(replace(model_config("opt"), path=str(tmp_path)))
    for base in (divided(experts=EXPERTS), masked(WIDTHS)):
        plain = logits(post_norm, None, UNSEEN)
        with pytest.raises(UserError, match=r"do_layer_norm_before: false.* can't be repaired"):
            post_norm.apply(repaired(base))
        assert torch.equal(logits(post_norm, None, UNSEEN), plain)


def test_fits_before_a_norm_serve_candidates_with_the_same_first_layers(
    model_config: Configs, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, fresh = (ResidentModel.load(model_config("gemma2")) for _ in range(2))
    base, counted, fit_ridge = masked(WIDTHS), list[Any](), fits.fit_ridge
    logits(model, repaired(base), UNSEEN)
    other = repaired(replace(base, router=np.concatenate([base.router[:2], base.router[2:] + 1])))
    monkeypatch.setattr(fits, "fit_ridge", lambda *args: counted.append(args) or fit_ridge(*args))
    found = logits(model, other, UNSEEN)
    assert len(counted) == 1
    assert torch.equal(found, logits(fresh, other, UNSEEN))


def test_layers_of_masked_networks_are_told_apart() -> None:
    base = masked(WIDTHS, HEADS)
    assert isinstance(base.heads, HeadMasks)
    changed: Sequence[ToMoeEdit] = [
        replace(base, router=np.concatenate([base.router[:2], base.router[2:] + 1])),
        replace(base, heads=replace(base.heads, active=np.array([5, 8, 2]))),
        replace(base, kept=np.concatenate([base.kept[:2], base.kept[2:, ::-1]])),
    ]
    for other in changed:
        assert other.layer_hashes[:2] == base.layer_hashes[:2] and other.layer_hashes[2] != base.layer_hashes[2]
    assert len({each.layer_hashes[0] for each in (base, replace(base, heads=None))}) == 2
