"""Dynamic skipping: thresholds of the edited model, and the experts skipped, against loops in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from edit_checks import Residents, assert_close, logits
from families import family_edit, sample_rows
from hypothesis import given
from hypothesis import strategies as st
from plain_families import plain_thresholds
from torch import Tensor

from moevolve.evaluators.errors import CandidateError, UserError
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.methods.eep.edit import EepEdit
from moevolve.workers.methods.eep.router import EditableRouter, RatioHistogram
from moevolve.workers.model.resident import ResidentModel

ROWS = sample_rows(lengths=(9, 14, 6))
WITHIN = 2**-17 + 1e-5
"""Tolerance of a median: half a bin, and rounding to float32."""


def thresholds_of(model: ResidentModel, edit: EepEdit) -> list[float]:
    with model.edited(edit):
        plans = [router.plan for layer in model.layers if isinstance(router := layer.gate, EditableRouter)]
        found = [plan.skip_below for plan in plans if plan is not None and plan.skip_below is not None]
    assert len(found) == len(model.layers)
    return found


@pytest.mark.parametrize(
    ("family", "kind", "space"),
    [("mixtral", "prune", "logits"), ("mixtral", "both", "probs"), ("qwen2_moe", "both", "logits")],
)
def test_thresholds_are_medians_of_the_edited_model(
    family: str,
    kind: str,
    space: str,
    resident: Residents,
    plain_logits: Callable[..., Tensor],
    checkpoint: Callable[[str], Path],
    tokens: Tensor,
) -> None:
    edit = family_edit(family, kind, space=space)
    skipping, model, tokens = replace(edit, skip_rows=ROWS), resident(family), tokens[:1, :7]
    thresholds = thresholds_of(model, skipping)
    np.testing.assert_allclose(thresholds, plain_thresholds(checkpoint(family), skipping), atol=WITHIN)
    whole = replace(family_edit(family, kind, retained=6, space=space), skip_rows=ROWS)
    assert max(abs(a - b) for a, b in zip(thresholds, thresholds_of(model, whole), strict=True)) > 0.01
    found, all_used = logits(model, skipping, tokens), logits(model, edit, tokens)
    assert_close(found, plain_logits(checkpoint(family), skipping, tokens, thresholds))
    assert float((found - all_used).abs().max()) > 1e-3, "something was skipped"


def test_what_ran_before_changes_no_threshold(resident: Residents, model_config: Callable[..., ModelConfig]) -> None:
    model = resident("mixtral")
    edits = [replace(family_edit("mixtral", kind), skip_rows=sample_rows()) for kind in ("prune", "both", "prune")]
    found = [thresholds_of(model, edit) for edit in edits]
    model.apply(edits[1])
    assert thresholds_of(model, edits[0]) == found[0] == found[2] != found[1]
    hosted = ResidentModel.load(model_config("mixtral", expert_offload="host"))
    np.testing.assert_allclose(thresholds_of(hosted, edits[1]), found[1], atol=WITHIN)


def test_rows_are_a_part_of_the_phenotype() -> None:
    edit = family_edit("mixtral", "prune")
    one, other = (replace(edit, skip_rows=sample_rows(seed)) for seed in (0, 1))
    assert len({edit.phenotype_hash, one.phenotype_hash, other.phenotype_hash}) == 3
    assert replace(one, skip_rows=None).phenotype_hash == edit.phenotype_hash
    assert replace(edit, skip_rows=sample_rows(0)).phenotype_hash == one.phenotype_hash
    # A threshold is measured behind the layers before it: those with other ones there aren't alike.
    changed = edit.router_mapping.copy()
    changed[1] = np.roll(changed[1], 1, axis=1)
    shifted = replace(one, router_mapping=changed, expert_merging=changed)
    assert [a == b for a, b in zip(one.layer_hashes, shifted.layer_hashes, strict=True)] == [True, False, False]
    assert not set(one.layer_hashes) & set(edit.layer_hashes)


def test_what_cannot_skip_is_refused(
    resident: Residents,
) -> None:
    edit = family_edit("mixtral", "prune")
    with pytest.raises(UserError, match="defined for 2 active experts, this EEP edit has 1"):
        replace(edit, active=1, skip_rows=sample_rows())
    with pytest.raises(CandidateError, match="routing weight is not finite"):
        RatioHistogram(torch.device("cpu")).add(torch.tensor([[0.5, 0.5], [float("nan"), 0.1]]))


@given(st.lists(st.tuples(st.floats(-1, 1, width=32), st.floats(0, 1, width=32)), min_size=1, max_size=60))
def test_the_median_of_any_weights(pairs: list[tuple[float, float]]) -> None:
    """With continuous mappings, the first weight may be negative, and the second more so."""
    weights = torch.tensor([(first, first - below) for first, below in pairs])
    ratios = RatioHistogram(torch.device("cpu"))
    for part in weights.split(7):
        ratios.add(part)
    expected = [min(max(b / a, 0.0), 1.0) if a > 0 else 0.0 for a, b in weights.double().tolist()]
    assert abs(ratios.median() - np.median(expected)) <= WITHIN
