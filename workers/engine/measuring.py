"""Measurements on the prompts of splits: calibrations of the unedited model, and expert usage under an edit."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.types import PreparedSplit
from moevolve.workers.contract.edits import (
    Calibration,
    CombinedMeasurement,
    Edit,
    GrowingMeasurement,
    IdentityEdit,
    Measurement,
    Tokens,
    underlying,
)
from moevolve.workers.contract.fitting import RowsMeasurement
from moevolve.workers.contract.methods import RoutingReader
from moevolve.workers.contract.usage import WORDS, RoutedLayer, Usage
from moevolve.workers.engine.engine import GenerationEngine
from moevolve.workers.families.decoder import decoder_of
from moevolve.workers.methods.registry import calibrator_of, method_of, routing_reader
from moevolve.workers.model.resident import ResidentModel

# Tokens of the shortest answers and texts that the model writes anew: of shorter ones it would repeat most.
_FEWEST_WRITTEN = 16

_LAYER = re.compile(r"layers\.(\d+)\.")


@torch.inference_mode()
def calibrate(
    resident: ResidentModel, engine: GenerationEngine, measurement: Measurement, splits: Sequence[PreparedSplit]
) -> Calibration:
    """Measure a calibration on the unedited model, with its cost.

    Args:
        resident: Unedited model.
        engine: Engine of the same model.
        measurement: Quantities to measure.
        splits: Splits whose prompts are run with their answers; see `token_sequences`.

    Raises:
        UserError: The measurement is unknown, or there are no prompts.
    """
    if isinstance(measurement, CombinedMeasurement):
        parts = [calibrate(resident, engine, part, splits) for part in measurement.parts]
        joined = Calibration({name: array for part in parts for name, array in part.arrays.items()})
        return joined.with_cost(sum(part.tokens_run for part in parts), sum(part.seconds for part in parts))
    started = time.perf_counter()
    limit = measurement.tokens
    rows = _rows(engine, splits, limit)
    if isinstance(measurement, RowsMeasurement):
        written = _written(engine, rows, measurement)
        rows += written
        made = _stored(rows, _count(written), measurement)
    else:
        if not rows:
            raise UserError(
                "genome.calibration_tokens: there are no prompts to measure on; give a task `calibration` rows"
            )
        made = _measured(resident, rows, measurement)
    while (
        isinstance(measurement, GrowingMeasurement) and limit < measurement.most and not measurement.is_met(made.arrays)
    ):
        if _count(rows) < limit:
            break  # there are no more
        limit = min(2 * limit, measurement.most)
        before, rows = len(rows), _rows(engine, splits, limit)
        more = _measured(resident, rows[before:], measurement).arrays
        made = Calibration({name: array + more[name] for name, array in made.arrays.items()})
    return made.with_cost(_count(rows), time.perf_counter() - started)


def _count(rows: Sequence[_CalibrationRow]) -> int:
    return sum(len(row.tokens) for row in rows)


def _measured(resident: ResidentModel, rows: Sequence[_CalibrationRow], measurement: Measurement) -> Calibration:
    return calibrator_of(measurement)(resident, [row.tokens for row in rows], measurement)


def _written(
    engine: GenerationEngine, rows: Sequence[_CalibrationRow], measurement: RowsMeasurement
) -> list[_CalibrationRow]:
    """Return what the unedited model writes where the rows have fewer tokens than are asked for.

    It continues every row in turn: behind the prompt where there is an answer, and else behind a quarter of the text.

    Source: self-calibration (Williams et al., arXiv 2410.17170), where a model's own text prunes it as well as real
    text.
    """
    starts = [row.prompt if row.prompt < len(row.tokens) else max(1, len(row.tokens) // 4) for row in rows]
    limits = [len(row.tokens) - start for row, start in zip(rows, starts, strict=True)]
    continued = [place for place, limit in enumerate(limits) if limit >= _FEWEST_WRITTEN]
    left, taken = measurement.tokens - _count(rows), list[int]()
    for place in continued * measurement.continuations:
        if left <= 0:
            break
        taken.append(place)
        left -= len(rows[place].tokens)
    if not taken:
        return []
    texts = engine.continued(
        [rows[place].tokens[: starts[place]] for place in taken],
        [limits[place] for place in taken],
        np.random.default_rng(0),
    )
    answers = [rows[place].prompt < len(rows[place].tokens) for place in taken]
    return [
        _CalibrationRow(text, starts[place] if each else len(text))
        for place, text, each in zip(taken, texts, answers, strict=True)
    ]


def _stored(rows: Sequence[_CalibrationRow], written: int, measurement: RowsMeasurement) -> Calibration:
    """Store token sequences as a calibration, so that a fit on them can be repeated; see `FitRows` for the arrays.

    Of their tokens the model has written the last `written`.

    Raises:
        UserError: There are no sequences, or fewer than two for a repair, which holds some out.
    """
    least = 2 if measurement.use == "repair" else 1
    if len(rows) < least:
        raise UserError(
            f"{measurement.use}: it needs {least} calibration prompts at least within its tokens, got {len(rows)}; "
            "give the task more `calibration` rows, or this more tokens"
        )
    arrays = {
        "tokens": [token for row in rows for token in row.tokens],
        "lengths": [len(row.tokens) for row in rows],
        "prompts": [row.prompt for row in rows],
        "written": [written],
    }
    return Calibration({f"{measurement.use}_{name}": np.array(array, dtype=np.int32) for name, array in arrays.items()})


def token_sequences(engine: GenerationEngine, splits: Sequence[PreparedSplit], limit: int) -> list[Tokens]:
    """Return whole prompts with their answers, taking turns between splits, until `limit` tokens are reached.

    Answers are the gold ones, or the unedited model's greedy ones for examples without gold answer.
    """
    return [row.tokens for row in _rows(engine, splits, limit)]


class _CalibrationRow(NamedTuple):
    """A prompt with its answer.

    Attributes:
        tokens: Token ids of prompt and answer.
        prompt: Number of tokens of the prompt.
    """

    tokens: Tokens
    prompt: int


def _rows(engine: GenerationEngine, splits: Sequence[PreparedSplit], limit: int) -> list[_CalibrationRow]:
    prompts = [engine.tokens_of(split).prompts for split in splits]
    # With answers even fewer prompts reach the limit, so no others need greedy answers.
    needed = Counter(number for number, _ in _in_turn(prompts, limit))
    answered = [engine.answered(split, needed[number]) for number, split in enumerate(splits)]
    places = _in_turn(answered, limit)
    return [_CalibrationRow(answered[number][row], len(prompts[number][row])) for number, row in places]


def _in_turn(groups: Sequence[Sequence[Tokens]], limit: int) -> list[tuple[int, int]]:
    """Pairs of a group's number and a row, taking turns between groups, until `limit` tokens are reached."""
    taken: list[tuple[int, int]] = []
    total = 0
    for row in range(max(map(len, groups), default=0)):
        for number, group in enumerate(groups):
            if row < len(group) and total < limit:
                taken.append((number, row))
                total += len(group[row])
    return taken


@torch.inference_mode()
def analyse_usage(
    resident: ResidentModel, edit: Edit, sequences: Sequence[Tokens], name: Callable[[int], str] = str
) -> Usage:
    """Run token sequences through an edited model and count the experts that its routers choose.

    Args:
        resident: Resident model, which is unedited afterwards.
        edit: Edit to apply.
        sequences: Sequences of token ids.
        name: Returns the text of a token.

    Raises:
        UserError: There are no sequences, or the edit doesn't fit this model.
        CandidateError: The edit has invalid values.
    """
    if not sequences:
        raise UserError("there are no prompts to analyse")
    words = _Words(sequences)
    with resident.edited(edit), ExitStack() as stack:
        counters = _watch(decoder_of(resident.model), stack, words)
        for row in resident.rows(sequences):
            words.set_row(row)
            resident.run_row(row)
        counted = [counter.counted() for counter in counters]
        base = underlying(edit)
        if not isinstance(base, IdentityEdit):
            method = method_of(type(base))
            counted = [method.described(layer, position, base) for position, layer in enumerate(counted)]
        return Usage(sum(map(len, sequences)), tuple(counted), tuple(map(name, words.ids)))


def _watch(decoder: nn.Module, stack: ExitStack, words: _Words) -> list[_Counter]:
    """Count at every layer with experts until `stack` is closed."""
    counters: list[_Counter] = []
    for name, module in decoder.named_modules():
        matched, reader = _LAYER.search(f"{name}."), routing_reader(module)
        if matched is not None and reader is not None:
            counters.append(_Counter(int(matched[1]), words))
            stack.callback(module.register_forward_hook(partial(counters[-1].observe, reader)).remove)
    return counters


class _Words:
    """The most frequent tokens of all sequences, and their positions in the row that is run.

    Attributes:
        ids: Ids of these tokens in descending order of frequency; ties by ascending id.
        indices: Index into `ids` of every token of the row, `len(ids)` for other tokens, int64 [tokens].
    """

    def __init__(self, sequences: Sequence[Tokens]) -> None:
        counts = Counter(token for tokens in sequences for token in tokens)
        self.ids = sorted(counts, key=lambda token: (-counts[token], token))[:WORDS]
        self._index = {token: index for index, token in enumerate(self.ids)}
        self.indices = torch.empty(0, dtype=torch.int64)

    def set_row(self, row: Sequence[Tokens]) -> None:
        self.indices = torch.tensor([self._index.get(token, len(self.ids)) for tokens in row for token in tokens])


class _Counter:
    """Counts of one layer, on its device."""

    def __init__(self, layer: int, words: _Words) -> None:
        self._layer, self._words = layer, words
        self._by_word = torch.empty(0)
        self._weights: Tensor | None = None
        self._together = torch.empty(0)

    def observe(self, reader: RoutingReader, module: nn.Module, args: tuple[Tensor, ...], output: object) -> None:
        chosen, weights = reader(module, args, output)
        if self._weights is None:
            experts = chosen.shape[1]
            self._weights = torch.zeros(experts, dtype=torch.float64, device=chosen.device)
            self._together = torch.zeros(experts, experts, dtype=torch.float64, device=chosen.device)
            self._by_word = self._together.new_zeros(len(self._words.ids) + 1, experts)
        ones = chosen.double()
        self._together += ones.t() @ ones
        self._by_word.index_add_(0, self._words.indices.to(ones.device), ones)
        self._weights += weights.double().sum(dim=0)

    def counted(self) -> RoutedLayer:
        assert self._weights is not None, "a layer with experts was not run"
        together: NDArray[np.int64] = self._together.round().long().cpu().numpy()
        by_word: NDArray[np.int64] = self._by_word[:-1].round().long().cpu().numpy()
        return RoutedLayer(self._layer, np.diagonal(together).copy(), self._weights.cpu().numpy(), together, by_word)
