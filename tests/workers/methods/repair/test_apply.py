"""Repaired edits on tiny models, against plain models fitted by hand and against runs one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from edit_checks import Residents, assert_close, logits
from families import edit_of_kind
from repair_samples import repaired_by_hand, rows_of, seen_at, sequences_of
from torch import Tensor

from moevolve.evaluators.errors import UserError
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.methods.eep.edit import EepEdit
from moevolve.workers.methods.nanomoe.edit import BlockForm, NanoMoeEdit
from moevolve.workers.methods.repair import fits
from moevolve.workers.methods.repair.apply import RepairApplicator
from moevolve.workers.methods.repair.edit import RepairedEdit, RepairSettings
from moevolve.workers.methods.repair.ridge import FitOutcome
from moevolve.workers.model.resident import ResidentModel

Checkpoints = Callable[[str], Path]

LENGTHS = (25, 3, 40, 11, 25, 1, 33, 18, 30, 30, 7, 60, 22, 41, 5, 29, 12)
SEQUENCES = sequences_of(LENGTHS)
CHECKED = np.repeat([each % 8 == 7 for each in range(len(LENGTHS))], LENGTHS)
UNSEEN = torch.tensor(sequences_of([40] * 6, seed=9))
KEPT = ((0, 3, 5), (4, 1, 2), (2, 0, 4))


def pruned(kept: Sequence[Sequence[int]] = KEPT) -> EepEdit:
    matrices = np.eye(6, dtype=np.float32)[np.array(kept)]
    return EepEdit(matrices, matrices, 2)


def repaired(base: Any, ridge_lambdas: tuple[float, ...] = (0.01,)) -> RepairedEdit:
    return RepairedEdit(base, RepairSettings(ridge_lambdas), rows_of(SEQUENCES))


def outcomes_of(model: ResidentModel, edit: RepairedEdit) -> list[FitOutcome | None]:
    with model.edited(edit):
        applicator = model._applicators[RepairedEdit]
        assert isinstance(applicator, RepairApplicator)
        return applicator.outcomes


def distance(found: Tensor, expected: Tensor) -> float:
    """Squared error of logits."""
    return float((found - expected).double().square().sum())


@pytest.mark.parametrize(("answer", "ridge_lambda"), [(0, 0.01), (1, 1.0)])
def test_a_repaired_model_is_the_one_fitted_by_hand(
    answer: int, ridge_lambda: float, resident: Residents, checkpoint: Checkpoints
) -> None:
    answering = np.concatenate([np.arange(length) >= length - 2 * answer for length in LENGTHS])
    expected, changed = repaired_by_hand(checkpoint("mixtral"), KEPT, SEQUENCES, CHECKED, ridge_lambda, answering)
    assert any(changed)
    edit = replace(repaired(pruned(), (ridge_lambda,)), rows=rows_of(SEQUENCES, answer))
    assert [each is not None for each in outcomes_of(resident("mixtral"), edit)] == changed
    with torch.no_grad():
        assert_close(logits(resident("mixtral"), edit, UNSEEN), expected(UNSEEN).logits, 1e-4)


@pytest.mark.parametrize("kind", ["merged", "both"])
def test_what_is_said_to_be_left_is_left(kind: str, resident: Residents, checkpoint: Checkpoints) -> None:
    """The error on held-out tokens, from running the edited model prompt by prompt."""
    from transformers import AutoModelForCausalLM

    model, edit = resident("mixtral"), repaired(edit_of_kind(3, 6, kind), (0.1, 1.0))
    found = outcomes_of(model, edit)
    plain = AutoModelForCausalLM.from_pretrained(checkpoint("mixtral")).eval()
    reference = seen_at(plain, SEQUENCES)
    with model.edited(edit):
        now = seen_at(model.model, SEQUENCES)
    assert sum(each is not None for each in found) >= 2
    for layer, outcome in enumerate(found):
        if outcome is None:
            continue
        left = ((reference[layer]["behind"] - now[layer]["behind"])[CHECKED] ** 2).sum()
        assert left == pytest.approx(outcome.after, rel=1e-3)
        assert outcome.after < outcome.before


def test_an_edit_that_changes_nothing_is_not_changed_either(resident: Residents) -> None:
    model = resident("mixtral")
    same = edit_of_kind(3, 6, "prune", retained=6)
    edit = repaired(replace(same, router_mapping=np.stack([np.eye(6)] * 3), expert_merging=np.stack([np.eye(6)] * 3)))
    assert torch.equal(logits(model, edit, UNSEEN), logits(model, edit.base, UNSEEN))
    assert outcomes_of(model, edit) == [None] * 3
    assert dict(in_report(model, edit))["repaired outputs"] == "0 of 3"


def in_report(model: ResidentModel, edit: RepairedEdit) -> tuple[tuple[str, str], ...]:
    with model.edited(edit):
        return model.report(edit)


@pytest.mark.parametrize("place", ["device", "host"])
def test_kept_layers_are_what_a_fresh_worker_gives(
    place: Literal["device", "host"], model_config: Callable[..., ModelConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the states after layers, and without."""
    model = ResidentModel.load(replace(model_config("mixtral"), expert_offload=place))
    counted: list[Any] = []
    fit_ridge = fits.fit_ridge
    monkeypatch.setattr(fits, "fit_ridge", lambda *args: counted.append(args) or fit_ridge(*args))
    outcomes = outcomes_of(model, repaired(pruned()))
    assert outcomes_of(model, repaired(pruned())) == outcomes and len(counted) == len(KEPT)
    first, second = repaired(pruned(), (0.1, 1.0)), repaired(pruned((*KEPT[:2], (1, 3, 5))), (0.1, 1.0))
    assert first.layer_hashes[:2] == second.layer_hashes[:2] and first.layer_hashes[2] != second.layer_hashes[2]
    logits(model, first, UNSEEN)
    found = [logits(model, each, UNSEEN) for each in (second, first)]
    fresh = ResidentModel.load(model_config("mixtral"))
    assert torch.equal(logits(fresh, second, UNSEEN), found[0]) and outcomes_of(fresh, second) == outcomes_of(
        model, second
    )
    assert torch.equal(logits(fresh, first, UNSEEN), found[1])


def test_what_one_worker_has_fitted_another_takes_from_their_folder(
    model_config: Callable[..., ModelConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit, config = repaired(pruned()), model_config("mixtral")
    first, second = (ResidentModel.load(config, fits=tmp_path) for _ in range(2))
    found, outcomes = logits(first, edit, UNSEEN), outcomes_of(first, edit)
    monkeypatch.setattr(fits, "fit_ridge", None)
    assert torch.equal(logits(second, edit, UNSEEN), found) and outcomes_of(second, edit) == outcomes
    assert len(list(tmp_path.iterdir())) == len(KEPT)


def test_layers_behind_another_are_not_taken_over(resident: Residents) -> None:
    edits = [repaired(pruned((first, *KEPT[1:]))) for first in (KEPT[0], (1, 3, 5))]
    assert not set(edits[0].layer_hashes) & set(edits[1].layer_hashes)
    others = [repaired(pruned(), (0.02,))]
    others.append(replace(edits[0], rows=rows_of(SEQUENCES[1:])))
    others.append(replace(edits[0], settings=replace(edits[0].settings, tokens=300)))
    hashes = {each.phenotype_hash for each in (*edits, *others, edits[0].base)}
    assert len(hashes) == 6
    assert all(not set(edits[0].layer_hashes) & set(other.layer_hashes) for other in others)


def test_bfloat16_is_fitted_in_float32_and_rounded_once(
    model_config: Callable[..., ModelConfig], resident: Residents
) -> None:
    model = ResidentModel.load(model_config("mixtral", dtype="bfloat16"))
    before, plain, cut = digest_of_halves(model), logits(model, None, UNSEEN), logits(model, pruned(), UNSEEN)
    edit = repaired(pruned(), (0.1, 1.0))
    assert distance(logits(model, edit, UNSEEN), plain) < 0.9 * distance(cut, plain)
    whole_model = resident("mixtral")
    with model.edited(edit), whole_model.edited(edit):
        halves, whole = (each.layers[0].expert_tensors()["down_proj"] for each in (model, whole_model))
    assert halves.dtype == torch.bfloat16
    # Inputs, and so what is fitted, differ by a half's precision; rounding alone is 0.4 %.
    assert float((halves.float() - whole).norm() / whole.norm()) < 0.03
    assert digest_of_halves(model) == before


def digest_of_halves(model: ResidentModel) -> int:
    return hash(tuple(tensor.view(torch.int16).sum().item() for tensor in model.model.state_dict().values()))


def test_refusals(resident: Residents) -> None:
    model = resident("mixtral")
    form = BlockForm("II", 4, 3)
    unlike = NanoMoeEdit(form, ("layers.0.self_attn.q_proj",), form.unmixed[None])
    with pytest.raises(UserError, match="NanoMoeEdit can't be repaired"):
        model.apply(repaired(unlike))
    with pytest.raises(UserError, match="RepairedEdit can't be repaired"):
        model.apply(repaired(repaired(pruned())))
