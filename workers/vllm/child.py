"""Runs vLLM for a worker, as a child process with the Python of the environment that vLLM is installed in.

vLLM and moevolve need different versions of the same libraries, so this file imports nothing of moevolve. Requests are
lines of JSON on the standard input, `[name, arguments]`; each gets a line of JSON, `{"result": ...}` or
`{"error": ...}`, on what was the standard output when the process started. The process ends with its input.
"""

import json
import os
import queue
import sys
import threading
from typing import Any


class Server:
    """One model in vLLM; its methods are the requests. See `moevolve.workers.vllm.process.VllmProcess`."""

    def __init__(self) -> None:
        self._llm: Any = None

    def start(self, folder: str, options: dict[str, Any]) -> None:
        from vllm import LLM

        self._llm = LLM(model=folder, **options)

    def reload(self, folder: str) -> None:
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})

    def forget(self) -> None:
        # Cached keys and values are those of earlier weights, and what is cached changes how prompts are batched.
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM could not reset its prefix cache")

    def generate(
        self, prompts: list[list[int]], limits: list[int], stop: list[str], ends: list[int]
    ) -> list[list[int]]:
        from vllm import SamplingParams

        params = [SamplingParams(temperature=0, max_tokens=limit, stop=stop, stop_token_ids=ends) for limit in limits]
        return [list(output.outputs[0].token_ids) for output in self._run(prompts, params)]

    def logprobs(self, texts: list[list[int]], counts: list[int]) -> list[list[float]]:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        found = []
        for text, count, output in zip(texts, counts, self._run(texts, params), strict=True):
            last = list(zip(text, output.prompt_logprobs, strict=True))[len(text) - count :]
            found.append([float(entry[token].logprob) for token, entry in last])
        return found

    def _run(self, prompts: list[list[int]], params: Any) -> Any:
        if not prompts:
            return []
        return self._llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)


def _read(requests: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        requests.put(line)
    os._exit(0)  # the worker is gone; whatever runs is for nobody


def main() -> None:
    """Answer requests until the input ends."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # vLLM logs to the standard output
    # Scheduling is deterministic only in one process (https://docs.vllm.ai/en/latest/usage/reproducibility/).
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    requests: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    server = Server()
    while True:
        name, arguments = json.loads(requests.get())
        try:
            reply = {"result": getattr(server, name)(*arguments)}
        except Exception as error:  # noqa: BLE001 - the worker decides what an error means
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
