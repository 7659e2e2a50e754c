"""A process that can't import moevolve, which loads exported checkpoints as users do."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

_PROGRAM = """
import json, os, sys
sys.modules["moevolve"] = None
import torch
import transformers.dynamic_module_utils as dynamic
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers import MixtralForCausalLM  # what all models need is imported with the first of them

def answer(directories, tokens, prompts, modules):
    dynamic.HF_MODULES_CACHE = modules
    ids = torch.tensor(tokens)
    for directory in directories:
        trust = directory.endswith("native")
        model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=trust).eval()
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=trust)
        with torch.no_grad():
            logits = model(ids).logits
            texts = [
                model.generate(**tokenizer(each, return_tensors="pt"), max_new_tokens=4, do_sample=False)[0].tolist()
                for each in prompts
            ]
        yield [logits.tolist(), texts, type(model).__module__.split(".")[0]]

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        print(json.dumps(list(answer(*json.loads(line)))), flush=True)
        os._exit(0)
    if os.waitpid(child, 0)[1] != 0:
        print("null", flush=True)
os._exit(0)  # taking torch down takes a second
"""


class Outsider:
    """Imports torch and transformers once, and forks for each request.

    Args:
        home: Folder for downloads and errors.
        python: Python of the environment that loads them.
    """

    def __init__(self, home: Path, python: str = sys.executable) -> None:
        self._errors = home / "errors"
        environment = {"HF_HOME": str(home), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
        with self._errors.open("w") as file:
            self._process = subprocess.Popen(
                [python, "-I", "-c", _PROGRAM],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )

    def load(
        self, directories: Sequence[Path], tokens: list[list[int]], prompts: Sequence[str], modules: Path
    ) -> list[Any]:
        """Logits of the tokens, tokens of greedily continued prompts, and the model's top-level module, per checkpoint.

        Args:
            directories: Checkpoints; the code of those whose name ends in `native` is trusted.
            tokens: Token ids, shape (rows, length).
            prompts: Texts to continue by up to 4 tokens.
            modules: Folder for the checkpoints' code.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        request = [[str(each) for each in directories], tokens, prompts, str(modules)]
        print(json.dumps(request), file=self._process.stdin, flush=True)
        found = json.loads(self._process.stdout.readline() or "null")
        assert found is not None, self._errors.read_text()[-2000:]
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.__exit__(None, None, None)
