"""Edits of experts: memory, implementations and hashes. Their equations are in test_family_edits."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from edit_checks import Residents, addresses, logits
from families import family_edit
from torch import Tensor

from moevolve.evaluators.errors import UserError
from moevolve.workers.methods.eep.edit import EepEdit, one_hot_layers


def test_pruning_copies_no_weights_and_merging_reuses_its_buffers(
    resident: Residents,
) -> None:
    family, model = "mixtral", resident("mixtral")
    full = addresses(model)
    with model.edited(family_edit(family, "prune")):
        assert addresses(model) == full
    with model.edited(family_edit(family, "merged")):
        merged = addresses(model)
        assert not set(merged) & set(full)
    with model.edited(family_edit(family, "merged", retained=3, seed=5)):
        assert addresses(model) == merged
    with model.edited(family_edit(family, "mixed")):
        assert addresses(model)[:2] == full[:2]
    assert addresses(model) == full


@pytest.mark.filterwarnings("error")
def test_read_only_arrays_are_taken(resident: Residents, tokens: Tensor) -> None:
    """Ray delivers arrays as read-only."""
    edit = family_edit("mixtral", "mixed")
    expected = logits(resident("mixtral"), edit, tokens)
    copies = edit.router_mapping.copy(), edit.expert_merging.copy()
    for array in copies:
        array.flags.writeable = False
    assert torch.equal(logits(resident("mixtral"), EepEdit(*copies, edit.active), tokens), expected)


@pytest.mark.parametrize(
    ("mapping", "merging", "active", "message"),
    [
        ((2, 4, 6), (2, 3, 6), 2, "one shape"),
        ((4, 6), (4, 6), 2, "one shape"),
        ((2, 4, 6), (2, 4, 6), 5, "5 active"),
        ((2, 4, 6), (2, 4, 6), 0, "0 active"),
    ],
)
def test_malformed_edits_are_refused(
    mapping: tuple[int, ...], merging: tuple[int, ...], active: int, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        EepEdit(np.ones(mapping, np.float32), np.ones(merging, np.float32), active)


def test_phenotype_hash_tells_edits_apart() -> None:
    base = np.eye(6, dtype=np.float32)[None, [0, 2, 4]]
    other = np.eye(6, dtype=np.float32)[None, [0, 2, 5]]
    edits = [
        EepEdit(base, base, 2),
        EepEdit(other, base, 2),
        EepEdit(base, other, 2),
        EepEdit(base, base, 1),
        EepEdit(base, base, 2, "logits"),
    ]
    assert len({edit.phenotype_hash for edit in edits}) == len(edits)
    assert EepEdit(base.copy(), base.copy(), 2).phenotype_hash == edits[0].phenotype_hash
    assert EepEdit(base.astype(np.float64), base, 2).phenotype_hash == edits[0].phenotype_hash
    head = b"eep/1 (1, 3, 6) k=2 probs" + 2 * base.astype("<f4").tobytes()
    assert edits[0].phenotype_hash == hashlib.sha256(head).hexdigest()


def test_one_hot_detection() -> None:
    eye = np.eye(4, dtype=np.float32)
    assert one_hot_layers(eye[None, [1, 1, 3]]).tolist() == [True]
    others = (eye * 0.5, np.array([[1, 1, 0, 0]], np.float32), np.zeros((1, 4), np.float32))
    assert not any(one_hot_layers(each[None]).any() for each in others)
    edit = EepEdit(np.stack([eye, eye * 2]), np.stack([eye * 2, eye]), 2)
    assert edit.one_hot_mapping.tolist() == [True, False]
    assert edit.one_hot_merging.tolist() == [False, True]
