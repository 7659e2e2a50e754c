"""Block-mixed layers fitted to their outputs on tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from edit_checks import Residents, digest, logits
from repair_samples import rows_of, sequences_of
from torch import Tensor

from moevolve.workers.families.layers import find_linears
from moevolve.workers.methods.nanomoe.edit import BlockForm, NanoMoeEdit, Variant
from moevolve.workers.methods.nanomoe.method import input_moments
from moevolve.workers.methods.shared import input_statistics

SEQUENCES = sequences_of((30, 3, 41, 12, 55, 20))
ROWS = rows_of(SEQUENCES)
UNSEEN = torch.tensor(sequences_of([40] * 6, seed=9))
NAMES = ("layers.0.mlp.up_proj", "layers.0.mlp.down_proj", "layers.1.self_attn.o_proj", "layers.2.mlp.gate_proj")


def edit_of(variant: Variant = "II", noise: float = 0.1, **changes: Any) -> NanoMoeEdit:
    form = BlockForm(variant, 1 if variant == "low_rank" else 4, 8)
    steps = np.random.default_rng(0).normal(0, noise, (len(NAMES), *form.mixing_shape))
    return NanoMoeEdit(form, NAMES, (form.unmixed + steps).astype(np.float32), rows=ROWS, **changes)


@torch.no_grad()
def inputs_by_hand(directory: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A plain model's linear layers, and the inputs of those that are edited: [tokens, d1]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    linears, seen = find_linears(model), dict[str, list[Tensor]]()
    for name in NAMES:
        linears[name].register_forward_pre_hook(
            lambda _m, args, name=name: seen.setdefault(name, []).append(args[0][0])
        )
    for each in SEQUENCES:
        model(torch.tensor([each]))
    return linears, {name: torch.cat(parts).double() for name, parts in seen.items()}


def test_moments_are_those_of_the_layers_inputs(
    resident: Residents, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, seen = inputs_by_hand(checkpoint("llama"))
    model = resident("llama").model
    linears = {name: find_linears(model)[name] for name in NAMES}
    for memory in (1 << 30, 8 * 32 * 32 + 1):  # in one pass, and in several
        monkeypatch.setattr(input_statistics, "STATISTICS_MEMORY", memory)
        found = dict(input_moments(model.get_decoder(), linears, ROWS))
        assert tuple(found) == NAMES
        for name, inputs in seen.items():
            torch.testing.assert_close(found[name], (inputs.t() @ inputs / len(inputs)).float(), rtol=1e-4, atol=1e-5)


def test_low_rank_is_the_best_for_the_layers_outputs(resident: Residents, checkpoint: Callable[[str], Path]) -> None:
    linears, seen = inputs_by_hand(checkpoint("llama"))
    model = resident("llama")
    for to_outputs in (True, False):
        edit = edit_of("low_rank")
        with model.edited(edit if to_outputs else replace(edit, rows=None)):
            shown = {name: model.model.get_decoder().get_submodule(name) for name in NAMES}
        for name, inputs in seen.items():
            weight, module = linears[name].weight.detach().double(), shown[name]
            assert isinstance(module.u, Tensor) and isinstance(module.v, Tensor)
            missing = inputs @ (weight - module.u[0].double() @ module.v[0].double()).t()
            # The best outputs of a rank are those of their own singular value decomposition.
            best = float(torch.linalg.svdvals(inputs @ weight.t())[8:].square().sum())
            assert (float(missing.square().sum()) < best * 1.01 + 1e-6) == to_outputs


def test_outputs_are_kept_better_than_by_the_weights(resident: Residents) -> None:
    model, edit = resident("llama"), edit_of("III", fit=2)
    before, plain = digest(model), logits(model, None, UNSEEN)
    first = logits(model, edit, UNSEEN)
    by_weights = logits(model, replace(edit, rows=None), UNSEEN)
    assert float((first - plain).square().sum()) < float((by_weights - plain).square().sum())
    assert torch.equal(logits(model, edit, UNSEEN), first), "what ran before leaves no trace"
    other = replace(edit, rows=rows_of(SEQUENCES[1:]))
    assert not torch.equal(logits(model, other, UNSEEN), first) and torch.equal(logits(model, edit, UNSEEN), first)
    assert len({each.phenotype_hash for each in (edit, other, replace(edit, rows=None))}) == 3
    assert digest(model) == before
