"""The metadata of a model card, with which the hub lists, filters and links models."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import yaml

from moevolve.evaluators.scales import SCALES
from moevolve.workers.checkpoints.files import read_json
from moevolve.workers.contract.card import CardFacts, ExportCard, ExportScore

_LICENSE_KEYS = ("license", "license_name", "license_link")


def metadata_of(card: ExportCard, facts: CardFacts, source: Path) -> str:
    """Return the YAML of a card's metadata, by the hub's specification of model cards.

    Args:
        card: Only its scores on `test` become results, as no search has seen that split.
        facts: What was exported.
        source: Folder of the unedited checkpoint, whose card or config may state a licence.
    """
    tags = ["mixture-of-experts"] if facts.summary.experts > 1 else []
    metadata: dict[str, object] = {}
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", card.base_model) and not Path(card.base_model).exists():  # a hub id
        metadata["base_model"] = card.base_model
    metadata |= source_license(source)
    metadata |= {"library_name": "transformers", "pipeline_tag": "text-generation"}
    metadata["tags"] = [*tags, facts.summary.tag, "moevolve"]
    results = [_result(score) for score in card.scores if score.split == "test"]
    if results:
        metadata["model-index"] = [{"name": card.title, "results": results}]
    return yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)


def source_license(folder: Path) -> dict[str, object]:
    """Return the licence that a checkpoint's model card states, or else its config, by the hub's keys; often empty."""
    card, config = folder / "README.md", folder / "config.json"
    found: object = None
    if card.is_file():
        head = re.match(r"---\s*\n(.*?)\n---", card.read_text(encoding="utf-8", errors="replace"), re.DOTALL)
        with suppress(yaml.YAMLError):  # a card isn't needed to export
            found = yaml.safe_load(head[1]) if head else None
    if (not isinstance(found, dict) or "license" not in found) and config.is_file():
        found = read_json(config)
    return {key: found[key] for key in _LICENSE_KEYS if isinstance(found, dict) and found.get(key)}


def _result(score: ExportScore) -> dict[str, object]:
    scale = SCALES[score.scale]
    kind = "perplexity" if scale.is_reciprocal else score.metric or "score"
    metric = {"type": kind, "name": scale.title, "value": round(scale.value(score.score), 4)}
    return {
        "task": {"type": "text-generation"},
        "dataset": {"type": score.task, "name": score.task, "split": score.split},
        "metrics": [metric],
    }
