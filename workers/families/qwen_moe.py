"""Qwen's models of experts, and OLMoE, which is built alike.

Their configs say whether the top-k is rescaled (`norm_topk_prob`). Qwen1.5-MoE and Qwen2-MoE have a shared expert with
a gate of its own beside the routed ones; it stays as it is.
"""

from __future__ import annotations

from moevolve.workers.families.base import ExpertFamily

QWEN2_MOE = ExpertFamily("qwen2_moe", "Qwen1.5/2-MoE", casts_weights=True)
QWEN3_MOE = ExpertFamily("qwen3_moe", "Qwen3-MoE", casts_weights=True)
OLMOE = ExpertFamily("olmoe", "OLMoE", casts_weights=True, width_field="intermediate_size")
