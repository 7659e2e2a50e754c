"""The resident model as a model of lm-evaluation-harness. Imported only when a task of lm-eval is evaluated."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from numpy.typing import NDArray

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.fitness.engine import Decided, Generation
from moevolve.evaluators.harness.judge import HarnessJudge
from moevolve.evaluators.types import PreparedSplit
from moevolve.workers.contract.edits import Tokens
from moevolve.workers.engine.forward import Forward
from moevolve.workers.engine.texts import score_choices
from moevolve.workers.engine.tokenizing import PromptTokenizer

TokenRequest = tuple[tuple[str, str], list[int], list[int]]


class ResidentLM(TemplateLM):
    """Implements lm-eval's model interface with the engine's parts; batches and checks are those of other tasks.

    Prompts get a beginning-of-sequence token and are truncated as by the engine; answers are greedy. lm-eval's other
    features (chat templates, several devices, caches) aren't supported.

    Args:
        forward, prompts, generate: The engine's forward passes, tokenizer, and method `generate`.
        split: Split with fitness `lm_eval`.

    Raises:
        UserError: lm-eval can't evaluate the split; see `HarnessJudge`.
    """

    def __init__(
        self,
        forward: Forward,
        prompts: PromptTokenizer,
        generate: Callable[[PreparedSplit, Decided], Generation],
        split: PreparedSplit,
    ) -> None:
        super().__init__()
        self._forward, self._prompts, self._generate = forward, prompts, generate
        self._split = split
        self._judge = HarnessJudge(split)
        self._gold = self._judge.gold_requests()
        self._tokens: dict[tuple[str, bool], list[int]] = {}
        self._answered: dict[tuple[str, str], float] = {}
        self._gold_logprobs: NDArray[np.float64] | None = None

    def evaluate(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Evaluate the split with the current edit; see `moevolve.evaluators.fitness.engine.Engine.judged`."""
        outcomes = self._judge.outcomes(self)
        gold = self._gold_logprobs
        if gold is None:
            gold = np.array([0.0 if request is None else self._answered[request.args] for request in self._gold])
        return outcomes, gold

    @property
    def eot_token_id(self) -> int:
        """Token before a text without a prompt: the beginning-of-sequence token, or else the end token."""
        tokenizer = self._prompts.tokenizer
        for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
            if token is not None:
                return int(token)
        raise UserError("the tokenizer has neither a beginning nor an end token to open an empty prompt with")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: object) -> list[int]:
        """Return the token ids of a text, from a cache."""
        key = (string, add_special_tokens is not False)
        if key not in self._tokens:
            self._tokens[key] = list(self._prompts.text(string, special=key[1]))
        return self._tokens[key]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Return every continuation's summed log-probability, and whether it is greedy, without a progress bar."""
        scored: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        return scored

    def _loglikelihood_tokens(self, requests: Sequence[TokenRequest], **kwargs: object) -> list[tuple[float, bool]]:
        contexts: dict[Tokens, list[int]] = {}
        for place, (texts, context, continuation) in enumerate(requests):
            if not continuation:
                raise UserError(f"{self._split.task}/{self._split.split}: {texts[1]!r} has no tokens of its own")
            tokens, positions = self._prompts.truncated(tuple(context)), self._prompts.context
            if positions is not None:
                if len(continuation) >= positions:
                    raise UserError(
                        f"{self._split.task}/{self._split.split}: the {len(continuation)} tokens of {texts[1]!r:.60} "
                        f"leave no room for a prompt in the model's context of {positions}; leave the row out"
                    )
                tokens = tokens[len(continuation) - positions :]
            contexts.setdefault(tokens, []).append(place)
        choices = [[tuple(requests[place][2]) for place in places] for places in contexts.values()]
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        scored = score_choices(self._forward, list(contexts), choices)
        for places, (sums, greedy) in zip(contexts.values(), scored, strict=True):
            for place, total, same in zip(places, sums, greedy, strict=True):
                answers[place] = (float(total), bool(same))
                self._answered[requests[place][0]] = float(total) / len(requests[place][2])
        return answers

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        raise UserError(f"{self._split.task}: likelihoods of whole texts aren't lm-eval's to measure here")

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Return greedy answers to the split's prompts, cut at the first stop string."""
        prompts = [example.prompt for example in self._split.examples]
        if [request.args[0] for request in requests] != prompts:
            raise ValueError(f"{self._split.task}/{self._split.split}: lm-eval requests other prompts than the split's")
        stops = self._split.matching.stop
        made = self._generate(self._split, lambda _, text: any(stop in text for stop in stops))
        self._gold_logprobs = made.gold_logprobs
        texts = list(made.texts)
        for stop in stops:
            texts = [text.split(stop, maxsplit=1)[0] for text in texts]
        return texts
