"""Dynamic skipping as a part of EEP edits: the plain definition, on real models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from moevolve.evaluators.errors import UserError
from moevolve.kernels.routing_rule import RoutingRule
from moevolve.workers.config import ModelConfig
from moevolve.workers.methods.eep.edit import EepEdit
from moevolve.workers.methods.eep.export import checkpoint_form
from moevolve.workers.model.resident import ResidentModel


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
@pytest.mark.parametrize("kind", ["prune", "both"])
@pytest.mark.parametrize("space", ["probs", "logits"])
def test_edited_logits_are_the_definition_s(
    family: str,
    kind: str,
    space: str,
    model_config: Callable[..., ModelConfig],
    make_edit: Callable[..., EepEdit],
    plain_logits: Callable[[Path, EepEdit, Tensor], Tensor],
    checkpoint: Callable[[str], Path],
    tokens: Tensor,
) -> None:
    edit = make_edit(family, kind, space=space)
    thresholds = np.linspace(0.4, 0.7, edit.layers, dtype=np.float32)
    skipping = replace(edit, skip_below=thresholds)
    model = ResidentModel.load(model_config(family))
    with torch.inference_mode():
        found = []
        for each in (skipping, edit):
            with model.edited(each):
                found.append(model.model(tokens).logits)
    expected = plain_logits(checkpoint(family), skipping, tokens)
    scale = max(1.0, float(expected.abs().max()))
    assert float((found[0] - expected).abs().max()) <= 1e-5 * scale
    assert float((found[1] - expected).abs().max()) > 1e-3 * scale, "something was skipped"


def test_thresholds_are_a_part_of_the_phenotype(make_edit: Callable[..., EepEdit]) -> None:
    edit = make_edit("mixtral", "prune")
    half = replace(edit, skip_below=np.full(3, 0.5, dtype=np.float32))
    other = replace(edit, skip_below=np.full(3, 0.25, dtype=np.float32))
    assert len({edit.phenotype_hash, half.phenotype_hash, other.phenotype_hash}) == 3
    assert replace(half, skip_below=None).phenotype_hash == edit.phenotype_hash


def test_what_cannot_skip_is_refused(make_edit: Callable[..., EepEdit]) -> None:
    edit = make_edit("mixtral", "prune")
    for wrong in (np.full(2, 0.5), np.full(3, 1.5), np.full(3, np.nan)):
        with pytest.raises(UserError, match="as many skipping thresholds"):
            replace(edit, skip_below=wrong.astype(np.float32))
    with pytest.raises(UserError, match="defined for 2 active experts, this EEP edit has 1"):
        replace(edit, active=1, skip_below=np.full(3, 0.5, dtype=np.float32))
    with pytest.raises(UserError, match="has no checkpoint form"):
        checkpoint_form(replace(edit, skip_below=np.full(3, 0.5, dtype=np.float32)), RoutingRule(True))
