"""Judging a model's answers by lm-evaluation-harness (lm-eval) on a worker."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.harness.files import PREFIX, harness_version, read_config, resolve_path, task_identity
from moevolve.evaluators.tasks.datasets import as_dataset
from moevolve.evaluators.text_files import Row
from moevolve.evaluators.types import HarnessTask, PreparedSplit

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import LM
    from lm_eval.api.task import ConfigurableTask


class HarnessJudge:
    """The requests and the judgement of one split of one lm-eval task, reusable for many models.

    Raises:
        UserError: lm-eval isn't installed, or its version or the task's YAML differs from the driver's.
    """

    def __init__(self, split: PreparedSplit) -> None:
        assert split.harness is not None
        self._place = f"{split.task}/{split.split}"
        self._harness = split.harness
        self._documents = [json.loads(document) for document in split.harness.documents]
        self._task = _rebuild(split.harness, self._documents[0])
        self._requests: list[list[Instance]] = []
        for index, (document, contexts) in enumerate(zip(self._documents, split.harness.contexts, strict=True)):
            made = self._task.construct_requests(
                doc=document,
                ctx=list(contexts) if self._task.multiple_input else contexts[0],
                metadata=(self._task.config.task, index, 1),
            )
            self._requests.append(made if isinstance(made, list) else [made])

    def outcomes(self, model: LM) -> NDArray[np.float64]:
        """Send all requests to a model and judge its answers: float64 [documents], each in [0, 1].

        Raises:
            UserError: The metric of a document isn't a number in [0, 1].
        """
        kinds: defaultdict[str, list[Instance]] = defaultdict(list)
        for requests in self._requests:
            for request in requests:
                request.resps, request.filtered_resps = [], {}
                kinds[request.request_type].append(request)
        for kind, requests in kinds.items():
            for request, answer in zip(requests, getattr(model, kind)(requests), strict=True):
                request.resps.append(answer)
        # lm-eval sets the input of its filters only when it makes the requests of a whole data set itself.
        self._task._instances = [request for requests in self._requests for request in requests]  # noqa: SLF001
        self._task.apply_filters()
        return np.array([self._outcome(index) for index in range(len(self._documents))], dtype=np.float64)

    def gold_requests(self) -> list[Instance | None]:
        """Return each document's log-likelihood request of its (first) right answer; None without one."""
        return [self._gold_request(index) for index in range(len(self._documents))]

    def _gold_request(self, index: int) -> Instance | None:
        requests, document = self._requests[index], self._documents[index]
        if requests[0].request_type != "loglikelihood":
            return None
        if self._task.OUTPUT_TYPE == "loglikelihood":
            return requests[0]
        task = self._task
        gold = task.doc_to_text(document) if task.multiple_input else task.doc_to_target(document)
        gold = gold[0] if isinstance(gold, list) and gold else gold
        if isinstance(gold, str):
            choices = task.doc_to_choice(document)
            gold = choices.index(gold) if gold in choices else None
        return requests[gold] if isinstance(gold, int) and 0 <= gold < len(requests) else None

    def _outcome(self, index: int) -> float:
        answers = [request.filtered_resps[self._harness.filter] for request in self._requests[index]]
        value = self._task.process_results(self._documents[index], answers).get(self._harness.metric)
        if not isinstance(value, int | float | np.number | np.bool_) or not 0 <= float(value) <= 1:
            raise UserError(
                f"{self._place}: metric {self._harness.metric} of example {index} is {value!r}, no number in [0, 1]; "
                f"name another metric behind the task ({PREFIX}TASK#METRIC)"
            )
        return float(value)


def _rebuild(harness: HarnessTask, document: Row) -> ConfigurableTask:
    """Make lm-eval's task from its YAML on this machine; one document replaces its data and shows the fields."""
    own = harness_version()
    if own != harness.version:
        raise UserError(f"lm-eval is {own} on this worker, but {harness.version} on the driver; install that one")
    from lm_eval.api.task import ConfigurableTask

    path = resolve_path(harness.yaml)
    if task_identity(path) != harness.config:
        raise UserError(f"{PREFIX}{path}: isn't the same file as on the driver")
    data = {"test": as_dataset([document], harness.yaml)}
    changes = {
        "custom_dataset": lambda **_: data,
        "dataset_kwargs": {},
        "training_split": None,
        "validation_split": None,
        "test_split": "test",
        "fewshot_split": None,
        "fewshot_config": None,
        "num_fewshot": 0,
        "process_docs": None,
    }
    return ConfigurableTask(config=read_config(path) | changes)
