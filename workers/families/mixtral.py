"""Mixtral: softmax over all experts, top-k, rescaled; the experts see float32 weights whatever the model's dtype."""

from __future__ import annotations

from moevolve.workers.families.base import ExpertFamily

MIXTRAL = ExpertFamily("mixtral", "Mixtral", casts_weights=False, width_field="intermediate_size")
