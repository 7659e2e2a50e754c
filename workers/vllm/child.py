"""What runs in the Python environment that vLLM is installed in: one model, and functions that a worker calls.

vLLM and moevolve need different versions of the same libraries, so this file imports nothing of moevolve.
"""

import os
from collections.abc import Sequence
from typing import Any

# The model, once there is one.
_LOADED: list[Any] = []


def start(folder: str, options: dict[str, object]) -> None:
    """Load a checkpoint."""
    # Scheduling is deterministic only in one process (https://docs.vllm.ai/en/latest/usage/reproducibility/).
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    _LOADED.append(LLM(model=folder, **options))


def reload(folder: str) -> None:
    """Load other weights of the same shapes in place."""
    _LOADED[0].collective_rpc("reload_weights", kwargs={"weights_path": folder})


def forget() -> None:
    """Drop cached keys and values, which are those of earlier weights and change how prompts are batched."""
    if not _LOADED[0].reset_prefix_cache():
        raise RuntimeError("vLLM could not reset its prefix cache")


def generate(
    prompts: Sequence[Sequence[int]], limits: Sequence[int], stop: Sequence[str], ends: Sequence[int]
) -> list[list[int]]:
    """Decode greedy answers up to an end token, a stop string or as many tokens as `limits` say.

    End tokens are part of an answer, as is the token that completes a stop string.
    """
    from vllm import SamplingParams

    params = [SamplingParams(temperature=0, max_tokens=limit, stop=stop, stop_token_ids=ends) for limit in limits]
    return [list(output.outputs[0].token_ids) for output in _run(prompts, params)]


def logprobs(texts: Sequence[Sequence[int]], counts: Sequence[int]) -> list[list[float]]:
    """Return the log-probabilities, in nats, of the last `counts` tokens of texts.

    Counts are at least 1, and less than the number of a text's tokens.
    """
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    found = []
    for text, count, output in zip(texts, counts, _run(texts, params), strict=True):
        last = list(zip(text, output.prompt_logprobs, strict=True))[len(text) - count :]
        found.append([float(entry[token].logprob) for token, entry in last])
    return found


def _run(prompts: Sequence[Sequence[int]], params: Any) -> Any:
    if not prompts:
        return []
    return _LOADED[0].generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
