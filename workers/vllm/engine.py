"""The engine with vLLM as the generator of answers."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.fitness.engine import Decided, Generation
from moevolve.evaluators.fitness.kinds import FITNESSES
from moevolve.evaluators.matching.registry import MATCHERS
from moevolve.evaluators.types import PreparedSplit
from moevolve.workers.contract.edits import Tokens
from moevolve.workers.contract.messages import WorkerFault
from moevolve.workers.contract.settings import ALL_SHORTCUTS, EngineConfig, Shortcuts, VllmConfig
from moevolve.workers.engine.columns import Columns
from moevolve.workers.engine.decoding import DecodedAnswers
from moevolve.workers.engine.engine import GenerationEngine
from moevolve.workers.export.export import write_stock
from moevolve.workers.model.resident import ResidentModel
from moevolve.workers.vllm import child
from moevolve.workers.vllm.process import VllmProcess, check_python

_LOG = logging.getLogger(__name__)
# Number of prompts whose log-probabilities are compared with those of `transformers`.
_PROBES = 4
# Largest accepted difference of a prompt's mean log-probability, in nats per token: 16-bit numbers differ by less.
_TOLERANCE = 0.1


class VllmEngine(GenerationEngine):
    """Generates answers with vLLM, and does everything else with the resident model.

    The edited model is written as a stock checkpoint, which vLLM loads: in place if it has the shapes of the one
    before, else in a new process. Then vLLM's log-probabilities of a few prompts are compared with those of the
    resident model. `generate` raises a UserError if no stock checkpoint computes the edited model, and a `WorkerFault`
    if vLLM fails or computes something else.

    Raises:
        UserError: vLLM isn't installed where the settings say, or the directory for weights is missing.
    """

    def __init__(
        self,
        resident: ResidentModel,
        config: EngineConfig,
        vllm: VllmConfig,
        shortcuts: Shortcuts = ALL_SHORTCUTS,
    ) -> None:
        super().__init__(resident.model, resident.tokenizer, config, shortcuts)
        check_python(vllm.python)
        if vllm.folder is not None and not Path(vllm.folder).is_dir():
            raise UserError(f"engine.vllm.folder: {vllm.folder} is no directory; make it, or leave the setting out")
        self._resident = resident
        self._settings = vllm
        self._options = {"dtype": str(resident.model.dtype).removeprefix("torch."), "seed": 0, **vllm.options}
        self._vllm: VllmProcess | None = None
        self._reloads = True
        self._model_config = ""
        self._served = ""
        self._probes: tuple[NDArray[np.float64], NDArray[np.float64]] | None = None

    def passes(self, split: PreparedSplit) -> Sequence[Columns] | None:
        """Return None for answers, which vLLM generates with the whole edited model."""
        return None if FITNESSES[split.fitness].reads == "generation" else super().passes(split)

    @torch.inference_mode()
    def generate(self, split: PreparedSplit, decided: Decided) -> Generation:
        """Answers and log-probabilities are those of `GenerationEngine`, up to the last digits of vLLM's numbers."""
        tokenized = self.tokens_of(split)
        vllm = self._serve(tokenized.prompts[:_PROBES])
        vllm.call(child.forget)
        most, trims = self._limits(split), MATCHERS[split.matching.kind].trims
        # vLLM would also stop at white space before an answer, which some matchers strip.
        stop = [mark for mark in split.matching.stop if mark and not (trims and mark[0].isspace())]
        answers = DecodedAnswers(most, self._ends, decided, self._text)
        # A stop string may end a part of an answer that `decided` doesn't take for its end; such an answer goes on.
        while unfinished := [i for i, finished in enumerate(answers.finished) if not finished]:
            prompts = [(*tokenized.prompts[i], *answers.tokens[i]) for i in unfinished]
            limits = [most[i] - len(answers.tokens[i]) for i in unfinished]
            parts = vllm.call(child.generate, prompts, limits, stop, sorted(self._ends))
            for i, part in zip(unfinished, parts, strict=True):
                answers.take(i, tuple(part), part)
        golds = tokenized.golds
        logprobs = np.zeros(len(golds), dtype=np.float64)
        rows = [row for row, gold in enumerate(golds) if gold]
        texts = [(*tokenized.prompts[row], *golds[row]) for row in rows]
        logprobs[rows] = vllm.logprobs(texts, [len(golds[row]) for row in rows])
        return Generation(answers.texts(), logprobs)

    def _serve(self, probes: tuple[Tokens, ...]) -> VllmProcess:
        """Load the edited model into vLLM, unless it is there already."""
        wanted = self._resident.applied.phenotype_hash
        if self._vllm is not None and wanted == self._served:
            return self._vllm
        self._served = ""
        texts = [text for text in probes if len(text) > 1]
        ours = self._scorer.logprobs(texts)
        # Weights stay on disk only while they are loaded, since a killed worker can't remove them.
        with tempfile.TemporaryDirectory(prefix="moevolve-vllm-", dir=self._settings.folder) as name:
            folder = Path(name)
            write_stock(self._resident, folder)
            model_config = (folder / "config.json").read_text(encoding="utf-8")
            if model_config != self._model_config or not self._reload(folder, texts, ours):
                self._stop()
                self._vllm = VllmProcess(self._settings.python, folder, self._options)
                problem = self._difference(self._vllm, texts, ours)
                if problem:
                    self._stop()
                    raise WorkerFault(problem)
        assert self._vllm is not None
        self._model_config, self._served = model_config, wanted
        return self._vllm

    def _reload(self, folder: Path, texts: list[Tokens], ours: NDArray[np.float64]) -> bool:
        """Load weights in place; returns whether vLLM computes what the resident model does with them."""
        if self._vllm is None or not self._reloads:
            return False
        try:
            self._vllm.call(child.reload, str(folder))
            self._vllm.call(child.forget)
            problem = self._difference(self._vllm, texts, ours)
        except WorkerFault as fault:
            problem = str(fault)
        if problem:
            _LOG.warning("vLLM is started anew for every candidate, since loading in place failed: %s", problem)
            self._reloads = False
        return self._reloads

    def _stop(self) -> None:
        """End vLLM, whose memory the next process needs."""
        if self._vllm is not None:
            self._vllm.close()
        self._vllm = self._probes = None

    def _difference(self, vllm: VllmProcess, texts: list[Tokens], ours: NDArray[np.float64]) -> str:
        """Say in what vLLM's model differs from the resident one, given its mean log-probabilities of texts."""
        theirs = vllm.logprobs(texts, [len(text) - 1 for text in texts])
        before, self._probes = self._probes, (theirs, ours)
        off = float(np.abs(theirs - ours).max(initial=0.0))
        if not off <= _TOLERANCE:
            return (
                f"vLLM's log-probabilities of prompts differ by up to {off:.3g} nats per token from those of "
                f"transformers, and {_TOLERANCE:g} are accepted"
            )
        if before is not None and np.array_equal(theirs, before[0]) and not np.array_equal(ours, before[1]):
            return "vLLM's log-probabilities of prompts are those of the candidate before"
        return ""
