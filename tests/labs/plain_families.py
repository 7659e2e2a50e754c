"""Edited MoE blocks of all families from their equations.

Nothing here uses the code under test but the edit itself: routing is written out per family, one token at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from moevolve.workers.methods.eep.edit import EepEdit


class PlainBlock(nn.Module):
    """An edited MoE block of one of these families, in float64 and one token at a time."""

    def __init__(
        self,
        block: Any,
        mapping: NDArray[np.float32],
        merging: NDArray[np.float32],
        edit: EepEdit,
        config: Any,
        skip_below: float | None = None,
    ):
        super().__init__()
        self.original, self.edit, self.config, self.skip_below = block, edit, config, skip_below
        self.ratios: list[float] = []
        # Kept rows have some mass, however little; only a continuous mapping can make it vanish.
        self.least = 0.0 if set(np.unique(mapping)) <= {0, 1} else 1e-6
        self.mapping = torch.tensor(mapping, dtype=torch.float64)
        coefficients = torch.tensor(merging, dtype=torch.float64)
        self.tensors = {
            name: torch.einsum("ij,j...->i...", coefficients, tensor.double())
            for name, tensor in block.experts.named_parameters(recurse=False)
        }

    def logits(self, hidden: Tensor) -> Tensor:
        weights = {name.removesuffix("weight"): each for name, each in self.original.named_parameters()}
        names = ("gate.", "router.", "gate.wg.", "router.gate.", "router.proj.", "chooser.")
        found = [weights[name] for name in names if name in weights]
        assert len(found) == 1
        return found[0].double() @ hidden * getattr(getattr(self.original, "gate", None), "output_multiplier", 1.0)

    @property
    def correction(self) -> Tensor | None:
        endings = ("e_score_correction_bias", "expert_bias")
        state = self.original.state_dict().items()
        return next((each.double().reshape(-1) for name, each in state if name.endswith(endings)), None)

    def mapped(self, logits: Tensor, score: Any) -> Tensor:
        return score(self.mapping @ logits) if self.edit.router_space == "logits" else self.mapping @ score(logits)

    def allowed(self, ranks: Tensor, best: int) -> list[int]:
        """Experts in the token's best groups."""
        size = len(ranks) // self.config.n_group
        groups = [range(start, start + size) for start in range(0, len(ranks), size)]
        worth = [float(sum(sorted((float(ranks[i]) for i in group), reverse=True)[:best])) for group in groups]
        order = sorted(range(len(groups)), key=lambda g: worth[g], reverse=True)[: self.config.topk_group]
        return [i for g in order for i in groups[g]]

    def gpt_oss(self, hidden: Tensor) -> list[tuple[int, Tensor]]:
        router = self.original.router
        logits = self.mapping @ (router.weight.double() @ hidden + router.bias.double())
        chosen = torch.argsort(logits, descending=True)[: self.edit.active]
        return list(zip(chosen.tolist(), torch.softmax(logits[chosen], dim=0), strict=True))

    def gemma4_text(self, hidden: Tensor) -> list[tuple[int, Tensor]]:
        router = self.original.router
        normed = hidden / (hidden.square().mean() + self.config.rms_norm_eps).sqrt()
        logits = self.mapping @ self.logits(normed * router.scale.double() / math.sqrt(len(hidden)))
        chosen = torch.argsort(logits, descending=True)[: self.edit.active]
        weights = torch.softmax(logits[chosen], dim=0) * (self.mapping @ router.per_expert_scale.double())[chosen]
        return list(zip(chosen.tolist(), weights, strict=True))

    def phimoe(self, hidden: Tensor) -> list[tuple[int, Tensor]]:
        logits = (self.mapping @ self.logits(hidden)).tolist()
        rest, found = list(range(len(logits))), []
        for _ in range(2):
            best = max(rest, key=lambda i: logits[i])
            bound = [max(abs(logits[i]), logits[best]) * 2 * self.config.router_jitter_noise for i in rest]
            near = [i for i, most in zip(rest, bound, strict=True) if logits[best] - logits[i] <= most]
            total = sum(math.exp(logits[i] - logits[best]) for i in near)
            found.append((best, torch.tensor(1 / total)))
            rest.remove(best)
        return found

    def kolibri1(self, hidden: Tensor) -> list[tuple[int, Tensor]]:
        logits = self.mapping @ self.logits(hidden)
        assert self.correction is not None
        chosen = torch.argsort(logits + self.mapping @ self.correction, descending=True)[: self.edit.active]
        weights = torch.sigmoid(logits[chosen])
        total = weights.sum() if self.config.norm_topk_prob else 1.0
        return list(zip(chosen.tolist(), weights / total, strict=True))

    def llama4_text(self, hidden: Tensor) -> list[tuple[int, Tensor]]:
        logits = self.mapping @ self.logits(hidden)
        chosen = torch.argsort(logits, descending=True)[: self.edit.active].tolist()
        return [(i, torch.sigmoid(logits[i])) for i in chosen]

    def deepseek_v4(self, hidden: Tensor, token: int) -> list[tuple[int, Tensor]]:
        scores = (self.mapping @ self.logits(hidden)).exp().log1p().sqrt()
        active, table = self.edit.active, getattr(self.original.gate, "tid2eid", None)
        if table is None:
            assert self.correction is not None
            chosen = torch.argsort(scores + self.mapping @ self.correction, descending=True)[:active].tolist()
        else:
            experts = table[token].tolist()
            columns = {j: self.mapping[:, j] for j in experts}
            kept = [int(columns[j].argmax()) for j in experts if columns[j].max() > 0]
            kept = kept or [j % len(scores) for j in experts]
            chosen = [kept[place % len(kept)] for place in range(active)]
        total = sum(scores[i] for i in chosen)
        return [(i, scores[i] / total * self.config.routed_scaling_factor) for i in chosen]

    def deepseek_v2(self, hidden: Tensor) -> list[tuple[int, Tensor]]:
        scores = self.mapped(self.logits(hidden), lambda values: torch.softmax(values, dim=0))
        pool = list(range(len(scores)))
        if self.config.topk_method == "group_limited_greedy":
            pool = self.allowed(scores, best=1)
        chosen = sorted(pool, key=lambda i: float(scores[i]), reverse=True)[: self.edit.active]
        return [(i, scores[i] * self.config.routed_scaling_factor) for i in chosen]

    def deepseek_v3(self, hidden: Tensor) -> list[tuple[int, Tensor]]:
        softmax = self.config.model_type in ("mistral4", "mistral_large4_text")
        scores = self.mapped(self.logits(hidden), partial(torch.softmax, dim=0) if softmax else torch.sigmoid)
        assert softmax or self.correction is not None
        ranks = scores if self.correction is None else scores + self.mapping @ self.correction
        config, everyone = self.config, list(range(len(ranks)))
        limited = (getattr(config, "topk_group", 1) or 1) < (getattr(config, "n_group", 1) or 1)
        pool = self.allowed(ranks, best=2) if limited else everyone
        chosen = sorted(pool, key=lambda i: float(ranks[i]), reverse=True)[: self.edit.active]
        rescales = getattr(config, "norm_topk_prob", True)
        total = sum(scores[i] for i in chosen) if rescales else 1.0
        even = rescales and total <= self.least
        weights = [torch.tensor(1 / len(chosen)) if even else scores[i] / total for i in chosen]
        names = ("routed_scaling_factor", "router_scaling_factor", "route_scale")
        scale = next((getattr(config, name) for name in names if hasattr(config, name)), 1.0)
        return [(i, w * scale) for i, w in zip(chosen, weights, strict=True)]

    def sigmoid(self, hidden: Tensor) -> list[tuple[int, Tensor]]:
        """Of Cohere2-MoE: chosen by logits, weighted by sigmoids that are rescaled."""
        scores = self.mapped(self.logits(hidden), torch.sigmoid)
        chosen = torch.argsort(scores, descending=True)[: self.edit.active].tolist()
        return [(i, scores[i] / sum(scores[j] for j in chosen)) for i in chosen]

    def softmax(self, hidden: Tensor) -> list[tuple[int, Tensor]]:
        scores = self.mapped(self.logits(hidden), lambda values: torch.softmax(values, dim=0))
        ranks = scores if self.correction is None else scores + self.mapping @ self.correction
        chosen = self.unskipped(scores, torch.argsort(ranks, descending=True)[: self.edit.active].tolist())
        rescales = getattr(self.config, "norm_topk_prob", self.config.model_type != "jamba")
        total = sum(scores[i] for i in chosen) if rescales else 1.0
        if rescales and total <= self.least:
            return [(i, torch.tensor(1 / len(chosen))) for i in chosen]
        return [(i, scores[i] / total) for i in chosen]

    def unskipped(self, scores: Tensor, chosen: list[int]) -> list[int]:
        """NAEE's dynamic skipping (Sec. 3.3): without the second expert where its score is small beside the first's."""
        if len(chosen) == 2:
            first, second = (float(scores[i]) for i in chosen)
            self.ratios.append(min(max(second / first, 0.0), 1.0) if first > 0 else 0.0)
            if self.skip_below is not None and second < self.skip_below * first:
                return chosen[:1]
        return chosen

    def routed(self, hidden: Tensor, token: int = 0) -> list[tuple[int, Tensor]]:
        """Experts of a token with their weights; `token` is its id."""
        if self.config.model_type == "deepseek_v4":
            return self.deepseek_v4(hidden, token)
        if self.config.model_type in ("deepseek_v2", "gpt_oss", "phimoe", "gemma4_text", "kolibri1", "llama4_text"):
            return getattr(self, self.config.model_type)(hidden)  # type: ignore[no-any-return]
        if self.config.model_type == "flint" or getattr(self.config, "expert_selection_fn", "softmax") == "sigmoid":
            return self.sigmoid(hidden)
        if self.config.model_type in ("mistral4", "mistral_large4_text"):
            return self.deepseek_v3(hidden)
        softmax = self.correction is None or self.config.model_type == "ernie4_5_moe"
        return self.softmax(hidden) if softmax else self.deepseek_v3(hidden)

    def shared(self, hidden_states: Tensor) -> Tensor | float:
        if hasattr(self.original, "shared_expert_gate"):
            return torch.sigmoid(self.original.shared_expert_gate(hidden_states)) * self.original.shared_expert(
                hidden_states
            )
        names = ("shared_expert", "shared_experts", "shared_mlp")
        shared = next((getattr(self.original, name) for name in names if hasattr(self.original, name)), None)
        return 0.0 if shared is None else shared(hidden_states)

    def weighted(self, weight: Tensor, index: int, hidden: Tensor) -> Tensor:
        if self.config.model_type == "llama4_text":
            return self.expert(index, weight * hidden)
        return weight * self.expert(index, hidden)

    def expert(self, index: int, hidden: Tensor) -> Tensor:
        tensors = {name: tensor[index] for name, tensor in self.tensors.items()}
        if "up_proj" in tensors:  # Nemotron-H
            return tensors["down_proj"] @ (tensors["up_proj"] @ hidden).relu().square()
        if self.config.model_type == "llama4_text":
            tensors = {name: tensor.t() for name, tensor in tensors.items()}
        if self.config.model_type != "gpt_oss":
            gate, up = (tensors["gate_up_proj"] @ hidden).chunk(2)
            if self.config.model_type in ("deepseek_v4", "glm5_next_text", "minimax_m3_vl_text"):
                limit = self.config.swiglu_limit
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            if self.config.model_type == "step3p5":
                limit = self.original.experts.limit  # of this layer
                inner = (gate / (1 + torch.exp(-gate))).clamp(max=limit) * up.clamp(-limit, limit)
                return tensors["down_proj"] @ inner
            if self.config.model_type == "minimax_m3_vl_text":
                return tensors["down_proj"] @ ((up + 1) * gate * torch.sigmoid(self.config.swiglu_alpha * gate))
            gelu = self.config.model_type == "gemma4_text"
            active = nn.functional.gelu(gate, approximate="tanh") if gelu else gate / (1 + torch.exp(-gate))
            out = tensors["down_proj"] @ (active * up)
            return getattr(self.original.experts, "post_expert_norm", nn.Identity())(out)  # of Muse Spark
        both = hidden @ tensors["gate_up_proj"] + tensors["gate_up_proj_bias"]
        limit = self.config.swiglu_limit
        gate, up = both[0::2].clamp(max=limit), both[1::2].clamp(-limit, limit)
        inner = (up + 1) * gate / (1 + torch.exp(-1.702 * gate))
        return inner @ tensors["down_proj"] + tensors["down_proj_bias"]

    def forward(self, hidden_states: Tensor, input_ids: Tensor | None = None) -> Any:
        tokens = [0] * hidden_states.shape[:-1].numel() if input_ids is None else input_ids.flatten().tolist()
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        given = flat
        for name in ("fc1_latent_proj", "pre_expert_proj", "pre_expert_norm"):
            given = getattr(self.original, name, nn.Identity())(given)
        rows = [
            sum(self.weighted(weight, index, inputs) for index, weight in self.routed(row, token))
            for row, inputs, token in zip(flat.double(), given.double(), tokens, strict=True)
        ]
        out = torch.stack(rows).to(flat.dtype)
        for name in ("fc2_latent_proj", "post_expert_proj"):
            out = getattr(self.original, name, nn.Identity())(out)
        out = out.reshape(hidden_states.shape)
        if self.config.model_type == "llama4_text":
            return out + self.shared(hidden_states), None
        if self.config.model_type == "gpt_oss":
            return out, None
        names = ("moe_routed_scaling_factor", "moe_router_scaling_factor")
        scale = next((getattr(self.config, name) for name in names if hasattr(self.config, name)), 1.0)
        out = scale * out + self.shared(hidden_states)
        return getattr(self.original, "post_mlp_layernorm", nn.Identity())(out)  # of A.X-K1


class PlainRouter(nn.Module):
    """The router of a block whose experts are a module of the decoder layer, as Gemma-4's are."""

    def __init__(self, block: PlainBlock):
        super().__init__()
        self.block = block

    def forward(self, hidden: Tensor) -> tuple[None, list[list[tuple[int, Tensor]]], None]:
        return None, [self.block.routed(row) for row in hidden.double()], None


class PlainExperts(nn.Module):
    """The experts of such a block."""

    def __init__(self, block: PlainBlock):
        super().__init__()
        self.block = block

    def forward(self, hidden: Tensor, _: None, routed: list[list[tuple[int, Tensor]]]) -> Tensor:
        rows = zip(hidden.double(), routed, strict=True)
        out = [sum(weight * self.block.expert(index, row) for index, weight in chosen) for row, chosen in rows]
        return torch.stack(out).to(hidden.dtype)


@lru_cache(maxsize=2)
def _plain_family(directory: Any) -> tuple[Any, list[tuple[nn.Module, str, nn.Module]]]:
    """A checkpoint, and of every MoE block its layer, its name there, and the block itself.

    Where a layer has the router and the experts itself, the name is empty, and the block holds the two.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory).eval().requires_grad_(False)
    found: list[tuple[nn.Module, str, nn.Module]] = []
    for layer in model.model.layers:
        if hasattr(layer, "experts"):
            block = nn.Module()
            block.router, block.experts = layer.router, layer.experts
            found.append((layer, "", block))
        found += [(layer, name, block) for name, block in layer.named_children() if hasattr(block, "experts")]
    return model, found


def plain_family(
    directory: Any, edit: EepEdit, thresholds: Sequence[float] | None = None
) -> tuple[Any, list[PlainBlock]]:
    """A checkpoint that computes an edit with `PlainBlock`s until it is asked for again, and the blocks.

    Args:
        directory: Folder of the checkpoint.
        edit: Edit with continuous or one-hot matrices.
        thresholds: Shares of the first expert's score below which the second one is left out, by MoE layer.
    """
    model, sparse = _plain_family(directory)
    blocks = []
    for i, (layer, name, block) in enumerate(sparse):
        skip_below = None if thresholds is None else thresholds[i]
        plain = PlainBlock(block, edit.router_mapping[i], edit.expert_merging[i], edit, model.config, skip_below)
        blocks.append(plain)
        if name:
            setattr(layer, name, plain)
        else:
            layer.router, layer.experts = PlainRouter(plain), PlainExperts(plain)
    return model, blocks


@torch.no_grad()
def plain_family_logits(
    directory: Any, edit: EepEdit, ids: Tensor, thresholds: Sequence[float] | None = None
) -> Tensor:
    """Logits of an edited checkpoint, computed with `PlainBlock`s; see `plain_family`."""
    return plain_family(directory, edit, thresholds)[0](ids).logits


@torch.no_grad()
def plain_thresholds(directory: Any, edit: EepEdit) -> list[float]:
    """NAEE's thresholds, the medians of all ratios of an edited checkpoint on its rows, by MoE layer."""
    assert edit.skip_rows is not None
    model, blocks = plain_family(directory, edit)
    for tokens in edit.skip_rows.sequences:
        model(torch.tensor([tokens]))
    return [float(np.median(block.ratios)) for block in blocks]


@torch.no_grad()
def stock_family_logits(directory: Any, ids: Tensor) -> Tensor:
    """Logits of the same checkpoint with its own blocks."""
    model, sparse = _plain_family(directory)
    for layer, name, block in sparse:
        if name:
            setattr(layer, name, block)
        else:
            layer.router, layer.experts = block.router, block.experts
    return model(ids).logits
