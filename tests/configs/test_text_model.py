"""The text model as it is shipped, and how it is trained."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from text_bed import train as lab
from text_bed.network import build_model, build_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from moevolve.evaluators.tasks.installed import DOMAINS, rows_of

SHIPPED = Path(__file__).parents[2] / "configs" / "demo" / "text"
TINY = lab.TextTraining(steps=4, batch_rows=4, length=16, vocabulary=300, layers=1, hidden=16, ffn=8)
TEXTS = {"a": ["one text of some words"] * 9, "b": ["another text of other words"] * 40}


@torch.no_grad()
def test_every_domain_is_predicted_and_has_experts_of_its_own() -> None:
    tokenizer, model = AutoTokenizer.from_pretrained(SHIPPED), AutoModelForCausalLM.from_pretrained(SHIPPED)
    model = model.float()
    # Other versions of Python, NumPy and torch have other rows.
    record = json.loads((SHIPPED / "training.json").read_text(encoding="utf-8"))
    found = lab.perplexities(model, tokenizer, "test", 12)
    assert all(found[domain] < 1.7 * known for domain, known in record["perplexity on test"].items())
    loads = []
    for domain in DOMAINS:
        ids = tokenizer([row["text"] for row in rows_of(domain, "test")[:12]])["input_ids"]
        routed = [model(torch.tensor([row]), output_router_logits=True).router_logits[-1] for row in ids]
        chosen = torch.cat(routed).topk(4).indices
        loads.append(torch.bincount(chosen.flatten(), minlength=32) / chosen.numel())
    shared = torch.minimum(loads[0], loads[-1]).sum().item()
    assert shared < 0.8, "manual and headers use the same experts"


def test_a_run_goes_on_where_it_was_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any) -> dict[str, float]:
        raise KeyboardInterrupt

    tokenizer = build_tokenizer((text for texts in TEXTS.values() for text in texts), TINY.vocabulary)
    ids = tokenizer("other words")["input_ids"]
    assert ids[0] == tokenizer.bos_token_id and tokenizer.decode(ids[1:]) == "other words"

    def trained(state: Path) -> torch.Tensor:
        torch.manual_seed(0)
        model = build_model(len(tokenizer), TINY.layers, TINY.hidden, TINY.ffn, TINY.balance)
        lab.train(model, tokenizer, TEXTS, TINY, state)
        return model.lm_head.weight

    monkeypatch.setattr(lab, "REPORT_EVERY", 2)
    monkeypatch.setattr(lab, "perplexities", lambda *_: {})
    whole = trained(tmp_path / "whole.pt")
    monkeypatch.setattr(lab, "perplexities", stop)
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "state.pt")
    monkeypatch.setattr(lab, "perplexities", lambda *_: {})
    assert torch.equal(trained(tmp_path / "state.pt"), whole)


def test_rows_of_a_batch_begin_with_texts_and_depend_on_seed_and_step() -> None:
    tokenizer = build_tokenizer((text for texts in TEXTS.values() for text in texts), TINY.vocabulary)
    batches = lab.Batches(TEXTS, tokenizer, TINY)
    ids = batches.of(0)
    assert ids.shape == (TINY.batch_rows, TINY.length)
    assert torch.equal(ids, lab.Batches(TEXTS, tokenizer, TINY).of(0))
    assert not torch.equal(ids, batches.of(1))
    assert not torch.equal(ids, lab.Batches(TEXTS, tokenizer, replace(TINY, seed=1)).of(0))
    for row in ids:
        assert row[0] == tokenizer.bos_token_id
        assert tokenizer.decode(row[1:]).startswith(("one text", "another text"))
