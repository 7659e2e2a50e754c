"""What moevolve uses of vLLM 0.32, with a Mixtral in NumPy inside: the same names, arguments, checks and results.

The environment variable FAKE_VLLM_FAULT makes it fail: weights that are loaded in place have no effect (`stale`) or
raise an error (`raises`), all weights are loaded wrongly (`wrong`), or the process `dies`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from plain_mixtral import PlainMixtral

FAULT = os.environ.get("FAKE_VLLM_FAULT", "")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    temperature: float = 1.0
    max_tokens: int = 16
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    prompt_logprobs: int | None = None
    detokenize: bool = True

    def __post_init__(self) -> None:
        assert self.temperature == 0 and self.max_tokens >= 1 and self.prompt_logprobs in (None, 0)
        assert not self.stop or (self.detokenize and all(self.stop))


@dataclass(frozen=True)
class Logprob:
    logprob: float


@dataclass(frozen=True)
class CompletionOutput:
    token_ids: Sequence[int]


@dataclass(frozen=True)
class RequestOutput:
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]


class LLM:
    def __init__(self, model: str, *, dtype: str, seed: int, enforce_eager: bool = False) -> None:
        if FAULT == "dies":
            os._exit(7)
        print(f"fake vLLM: loads {model}, {enforce_eager=}")  # as vLLM logs to the standard output
        assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0" and seed == 0 and dtype == "float32"
        self._model = PlainMixtral(model)
        self._cached: dict[tuple[Any, ...], RequestOutput] = {}
        if FAULT == "wrong":
            self._model.weights["lm_head.weight"] *= 3

    def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[()] = (), kwargs: dict[str, Any] | None = None
    ) -> list[None]:
        assert method == "reload_weights" and kwargs is not None and list(kwargs) == ["weights_path"]
        if FAULT == "raises":
            raise KeyError("layers.0.experts")
        if FAULT != "stale":
            self._model.load(kwargs["weights_path"])
        return [None]

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        self._cached.clear()
        return True

    def generate(
        self,
        prompts: Sequence[dict[str, list[int]]],
        sampling_params: SamplingParams | Sequence[SamplingParams],
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        many = [sampling_params] * len(prompts) if isinstance(sampling_params, SamplingParams) else sampling_params
        assert len(many) == len(prompts)
        return [
            self._answer(tuple(prompt["prompt_token_ids"]), params)
            for prompt, params in zip(prompts, many, strict=True)
        ]

    def _answer(self, prompt: tuple[int, ...], params: SamplingParams) -> RequestOutput:
        key = (prompt, params.max_tokens, params.prompt_logprobs)
        if key not in self._cached:
            self._cached[key] = RequestOutput(
                None if params.prompt_logprobs is None else self._logprobs(prompt),
                [CompletionOutput(self._decoded(prompt, params))],
            )
        return self._cached[key]

    def _logprobs(self, prompt: tuple[int, ...]) -> list[dict[int, Logprob] | None]:
        found = self._model.logprobs(prompt)
        rest = [{token: Logprob(float(found[place, token]))} for place, token in enumerate(prompt[1:])]
        return [None, *rest]

    def _decoded(self, prompt: tuple[int, ...], params: SamplingParams) -> list[int]:
        answer: list[int] = []
        while len(answer) < params.max_tokens:
            answer.append(int(self._model.logprobs([*prompt, *answer])[-1].argmax()))
            text = self._model.text(answer)
            if answer[-1] in params.stop_token_ids or any(mark in text for mark in params.stop):
                break
        return answer
