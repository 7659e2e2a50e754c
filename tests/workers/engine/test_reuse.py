"""Reuse of hidden states changes no result, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from dense_edits import divided, head_masks, masked
from edit_checks import Residents
from engine_samples import answers, edit_of_family, others, words_split
from families import family_edit
from repair_samples import rows_of, sequences_of

from moevolve.evaluators.types import PreparedSplit
from moevolve.workers.contract.edits import Edit, IdentityEdit
from moevolve.workers.contract.methods import Method, ModelParts
from moevolve.workers.contract.settings import EngineConfig
from moevolve.workers.engine.engine import GenerationEngine
from moevolve.workers.engine.reuse import LayerReuse
from moevolve.workers.methods.eep.edit import EepEdit
from moevolve.workers.methods.registry import METHODS
from moevolve.workers.methods.repair.edit import RepairedEdit, RepairSettings
from moevolve.workers.model.resident import ResidentModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FAMILIES = ("mixtral", "qwen2_moe")
"""Families of which all layers have experts, or not all."""
ENDS = [2, *range(60, 76)]
PLENTY = 1 << 24


def split_of() -> PreparedSplit:
    """Five prompts of 2 to 19 tokens with gold answers of 1 to 3 and choices of 1 to 2 tokens."""
    return words_split((19, 2, 12, 7, 16), 0, (), ("w30", "w31 w32", "w36"), 3)


def offspring(parent: EepEdit, other: EepEdit) -> list[Edit]:
    """A parent, the full model, a child per layer that takes this layer from another edit, and the parent again."""
    children: list[Edit] = [parent, IdentityEdit()]
    for layer in reversed(range(parent.layers)):
        mapping, merging = parent.router_mapping.copy(), parent.expert_merging.copy()
        mapping[layer], merging[layer] = other.router_mapping[layer], other.expert_merging[layer]
        children.append(EepEdit(mapping, merging, parent.active, parent.router_space))
    return [*children, parent]


class Pair:
    """One resident model with two engines, one of which reuses hidden states."""

    def __init__(self, resident: ResidentModel, tokenizer: PreTrainedTokenizerFast, limit: int = PLENTY) -> None:
        """Five prompts take two batches or more."""
        self.resident = resident
        resident.model.generation_config.eos_token_id = ENDS
        self.reuse = LayerReuse(resident.model, resident.layer_keys, limit)
        config = EngineConfig(batch_tokens=40)
        self.plain = GenerationEngine(resident.model, tokenizer, config)
        self.reusing = GenerationEngine(resident.model, tokenizer, config, reuse=self.reuse)

    def compare(self, edits: list[Edit], split: PreparedSplit, all_numbers: bool = False) -> list[float]:
        """Compare the engines on every edit; returns the share of work on answers that was saved."""
        shares = []
        for engine in (self.plain, self.reusing):
            if all_numbers:
                engine.remember(split)
        for edit in edits:
            with self.resident.edited(edit):
                self.reuse.work = self.reuse.saved = 0
                assert answers(self.reusing, split) == answers(self.plain, split)
                shares.append(self.reuse.saved / self.reuse.work)
                if all_numbers:
                    assert others(self.reusing, split) == others(self.plain, split)
        return shares


@pytest.mark.parametrize("family", FAMILIES)
def test_all_numbers_are_the_same(resident: Residents, tiny_tokenizer: PreTrainedTokenizerFast, family: str) -> None:
    """Candidates have layers with one-hot matrices and layers that merge."""
    pair = Pair(resident(family), tiny_tokenizer)
    edits = offspring(edit_of_family(family, "mixed", 0), edit_of_family(family, "mixed", 1))
    shares = pair.compare(edits, split_of(), all_numbers=family == "mixtral")
    assert shares[1] == 0, "the full model has no layer in common with an edit"
    layers = len(pair.resident.model.get_decoder().layers)
    changed = [layer.index for layer in reversed(pair.resident.layers)]
    np.testing.assert_allclose(shares[2 : 2 + len(changed)], [index / layers for index in changed])
    assert shares[-1] >= max(shares[2:-1])


def test_little_room_changes_nothing_either(resident: Residents, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    pair = Pair(resident("mixtral"), tiny_tokenizer, limit=8_000)
    edits = offspring(edit_of_family("mixtral", "both", 0), edit_of_family("mixtral", "prune", 1))
    shares = pair.compare(edits, split_of())
    assert 0 < sum(shares) < 2 / 3 + 1 / 3 + 2 / 3, "less than with plenty of room"


def test_an_unfinished_answer_gets_the_layers_that_were_left_out(
    resident: Residents, tiny_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(resident("mixtral"), tiny_tokenizer)
    forward = pair.reusing.forward
    completed, complete = [], forward.complete

    def watched(columns: Any, cache: Any) -> None:
        before = [layer.is_initialized for layer in cache.layers]
        complete(columns, cache)
        completed.append((before.count(False), len({layer.keys.shape for layer in cache.layers})))

    monkeypatch.setattr(forward, "complete", watched)
    pair.compare(offspring(edit_of_family("mixtral", "prune", 0), edit_of_family("mixtral", "prune", 1)), split_of())
    assert {missing for missing, _ in completed} == {0, 1, 2}
    assert {shapes for _, shapes in completed} == {1}


def test_dense_and_masked_networks_and_heads_that_say_what_their_layers_are(
    resident: Residents, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    pair, heads = Pair(resident("llama"), tiny_tokenizer), head_masks()
    first, other = divided(), masked((24, 24, 24), heads)
    weights = first.router_weight.copy()
    weights[2] += 1
    changed = replace(first, router_weight=weights)
    more = replace(other, heads=replace(heads, active=np.array([5, 8, 2])))
    shares = pair.compare([first, changed, other, more], split_of(), all_numbers=True)
    assert shares == [0, pytest.approx(2 / 3), 0, pytest.approx(2 / 3)]


def test_layers_that_are_repaired_or_skip_experts_are_those_of_equal_beginnings(
    resident: Residents, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    """What a layer is repaired to, and the threshold of one that skips experts, depend on the layers before it."""
    pair, rows = Pair(resident("mixtral"), tiny_tokenizer), rows_of(sequences_of([30] * 4))
    bases = offspring(edit_of_family("mixtral", "prune", 0), edit_of_family("mixtral", "prune", 1))
    bases = [base for base in bases if isinstance(base, EepEdit)][:4]
    # The children change the last layer, the middle one and the first.
    for edits in (
        [RepairedEdit(base, RepairSettings((0.1,)), rows) for base in bases],
        [replace(base, skip_rows=rows) for base in bases],
    ):
        np.testing.assert_allclose(pair.compare(edits, split_of()), [0, 2 / 3, 1 / 3, 0])


def test_layers_are_told_apart_by_all_that_they_compute(resident: Residents) -> None:
    model = resident("qwen2_moe")
    edit = family_edit("qwen2_moe", "both", seed=3)
    with model.edited(edit):
        keys = model.layer_keys()
    assert keys is not None and keys[1] == "", "the dense layer in the middle is not edited"
    assert model.layer_keys() == ("", "", "")
    skipping = replace(edit, skip_rows=rows_of(sequences_of([5, 6])))
    changed = [replace(edit, active=1), replace(edit, router_space="logits"), skipping]
    hashes = [edit.layer_hashes, *(other.layer_hashes for other in changed)]
    assert len({one for group in hashes for one in group}) == 8
    same = EepEdit(edit.router_mapping[[0, 0]], edit.expert_merging[[0, 0]], edit.active)
    assert len(set(same.layer_hashes)) == 1


class Opaque:
    """An edit without hashes of its layers."""

    phenotype_hash = "opaque"


class Nothing:
    """An applicator that does nothing."""

    def __init__(self, parts: ModelParts) -> None:
        pass

    def apply(self, edit: Edit) -> None:
        pass

    def revert(self) -> None:
        pass


def test_what_does_not_tell_its_layers_apart_runs_whole(
    resident: Residents, tiny_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = resident("mixtral")
    monkeypatch.setitem(METHODS, Opaque, Method(edit=Opaque, applicator=Nothing))
    pair = Pair(model, tiny_tokenizer)
    split = split_of()
    with model.edited(Opaque()):
        assert model.layer_keys() is None
        expected = pair.plain.text_logprobs(split)
        for _ in range(2):
            np.testing.assert_array_equal(pair.reusing.text_logprobs(split), expected)
    assert pair.reuse.work == 0


def test_layers_run_again_after_a_pass_that_failed(
    resident: Residents, tiny_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(resident("mixtral"), tiny_tokenizer)
    edit = edit_of_family("mixtral", "prune", 0)
    with pair.resident.edited(edit):
        pair.reusing.text_logprobs(split_of())
        last = pair.resident.model.get_decoder().layers[-1]
        with monkeypatch.context() as patch:
            patch.setattr(last.self_attn, "forward", out_of_memory)
            with pytest.raises(torch.OutOfMemoryError):
                pair.reusing.text_logprobs(split_of())
    assert not any("forward" in layer.__dict__ for layer in pair.resident.model.get_decoder().layers)
    assert not any(layer._forward_pre_hooks for layer in pair.resident.model.get_decoder().layers)


def out_of_memory(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError("no more")
