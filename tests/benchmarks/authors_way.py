"""What the EEP paper describes for evaluating a candidate, done plainly: the yardstick of the search-cost benchmark.

Source: Efficient Expert Pruning (arXiv 2407.00945), Sec. 4 and App. A: every individual is one model, whose experts are
weighted sums of all experts (Eq. 6) and whose routing weights go through the router mapping (Eq. 5); it answers the
prompts by generation with a fixed budget of new tokens, and its answers are matched with a template. Nothing is kept
from one individual to the next.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from itertools import takewhile

import numpy as np
import torch
from torch import Tensor, nn
from transformers import MixtralForCausalLM

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.matching.registry import make_matcher
from moevolve.evaluators.metrics import score
from moevolve.evaluators.types import PreparedSplit, SplitResult
from moevolve.workers.checkpoints.loading import load_model
from moevolve.workers.contract.edits import Tokens
from moevolve.workers.contract.messages import EvaluationReply, EvaluationRequest
from moevolve.workers.contract.settings import EngineConfig, ModelConfig
from moevolve.workers.engine.columns import pad
from moevolve.workers.engine.tokenizing import PromptTokenizer, end_tokens
from moevolve.workers.methods.eep.edit import EepEdit


class MappedRouter(nn.Module):
    """Mixtral's router with the searched mapping behind its softmax (Eq. 5)."""

    def __init__(self, retained: int, experts: int, hidden: int, active: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, hidden), requires_grad=False)
        self.mapping = nn.Parameter(torch.empty(retained, experts), requires_grad=False)
        self._active = active

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = nn.functional.linear(hidden_states.reshape(-1, self.weight.shape[1]), self.weight)
        mapped = logits.float().softmax(dim=-1) @ self.mapping.T
        weights, chosen = mapped.topk(self._active, dim=-1)
        return logits, weights / weights.sum(dim=-1, keepdim=True), chosen


class AuthorsWay:
    """Evaluates one candidate after the other: builds its state dict, loads it, generates, matches.

    Args:
        model: a Mixtral checkpoint.
        engine: truncation of prompts; its other settings are not used.
        rows: prompts per batch, in the order of the data.
    """

    def __init__(self, model: ModelConfig, engine: EngineConfig, rows: int = 64) -> None:
        original, self._tokenizer = load_model(model)
        if not isinstance(original, MixtralForCausalLM):
            raise UserError(
                f"model {model.path}: the authors' way is written for Mixtral, not {type(original).__name__}"
            )
        self._original = original
        self._engine = engine
        self._rows = rows
        self._models: dict[tuple[int, int], MixtralForCausalLM] = {}
        self._prompts: dict[str, tuple[Tokens, ...]] = {}

    def evaluate(self, request: EvaluationRequest, splits: tuple[PreparedSplit, ...]) -> EvaluationReply:
        """Score a candidate; gold log-probabilities are no part of the method and come back as 0."""
        assert isinstance(request.edit, EepEdit)
        started = time.perf_counter()
        model = self.build(request.edit)
        results = {}
        for split in splits:
            since = time.perf_counter()
            outcomes = self._outcomes(model, split)
            seconds = time.perf_counter() - since
            results[split.fingerprint] = SplitResult(
                score(split.metric, outcomes), 0.0, outcomes.astype(np.float32), seconds
            )
        return EvaluationReply(request.ticket, results, None, time.perf_counter() - started, "authors' way")

    def build(self, edit: EepEdit) -> MixtralForCausalLM:
        """The candidate's model: a deep copy of the whole state dict, experts summed tensor by tensor, then loaded."""
        state = copy.deepcopy(self._original.state_dict())
        for layer in range(edit.layers):
            block = f"model.layers.{layer}.mlp"
            merging = torch.from_numpy(edit.expert_merging[layer])
            for name in ("gate_up_proj", "down_proj"):
                experts = state[f"{block}.experts.{name}"]
                merged = [sum(weight * expert for weight, expert in zip(row, experts, strict=True)) for row in merging]
                state[f"{block}.experts.{name}"] = torch.stack(merged).to(experts.dtype)  # type: ignore[arg-type]
            state[f"{block}.gate.mapping"] = torch.from_numpy(edit.router_mapping[layer])
        model = self._model(edit.retained, edit.active)
        model.load_state_dict(state)
        return model

    def _model(self, retained: int, active: int) -> MixtralForCausalLM:
        """An empty model of so many experts, made once."""
        if (retained, active) not in self._models:
            config = copy.deepcopy(self._original.config)
            config.num_local_experts, config.num_experts_per_tok = retained, active
            model = MixtralForCausalLM(config).to(self._original.dtype).eval()
            experts = self._original.config.num_local_experts
            for layer in model.model.layers:
                layer.mlp.gate = MappedRouter(retained, experts, config.hidden_size, active).to(self._original.dtype)
            self._models[retained, active] = model
        return self._models[retained, active]

    @torch.inference_mode()
    def _outcomes(self, model: MixtralForCausalLM, split: PreparedSplit) -> np.ndarray:
        matcher = make_matcher(split.matching)
        texts = [
            text
            for start in range(0, len(split.examples), self._rows)
            for text in self._generate(model, self._tokens(split)[start : start + self._rows], split.max_new_tokens)
        ]
        return np.array([matcher.match(text, example) for text, example in zip(texts, split.examples, strict=True)])

    def _generate(self, model: MixtralForCausalLM, prompts: Sequence[Tokens], budget: int) -> list[str]:
        ids, mask, _ = pad(prompts, model.device, before=True)
        made = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=budget,
            do_sample=False,
            eos_token_id=sorted(end_tokens(self._original, self._tokenizer, EngineConfig(chat_template="none"))),
            pad_token_id=0,
        )
        answers = made[:, ids.shape[1] :].tolist()
        ends = end_tokens(self._original, self._tokenizer, EngineConfig(chat_template="none"))
        cut = [list(takewhile(lambda token: token not in ends, answer)) for answer in answers]
        return list(self._tokenizer.batch_decode(cut, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _tokens(self, split: PreparedSplit) -> tuple[Tokens, ...]:
        """Prompts as tokens, made once."""
        if split.fingerprint not in self._prompts:
            made = PromptTokenizer.of(self._original, self._tokenizer, self._engine).split(split)
            self._prompts[split.fingerprint] = made.prompts
        return self._prompts[split.fingerprint]

    @torch.inference_mode()
    def plain_forward(self, split: PreparedSplit) -> float:
        """Seconds of one plain pass of the full model over a split's prompts: the unit of cost."""
        prompts = self._tokens(split)
        device = self._original.device
        batches = [pad(prompts[i : i + self._rows], device, before=True) for i in range(0, len(prompts), self._rows)]
        started = time.perf_counter()
        for ids, mask, _ in batches:
            self._original(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=1)
        return time.perf_counter() - started
