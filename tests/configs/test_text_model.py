"""The text model as it is shipped."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from text_bed import train as lab
from transformers import AutoModelForCausalLM, AutoTokenizer

from moevolve.evaluators.tasks.installed import DOMAINS, rows_of

SHIPPED = Path(__file__).parents[2] / "configs" / "demo" / "text"


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
