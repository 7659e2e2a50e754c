"""What is measured of a resident model on the prompts of splits: calibrations, and how its experts are used."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.types import PreparedSplit
from moevolve.workers.contract.edits import (
    Calibration,
    CalibrationRecipe,
    CombinedRecipe,
    Edit,
    IdentityEdit,
    Tokens,
    underlying,
)
from moevolve.workers.contract.methods import RoutingReader, UsageReaders
from moevolve.workers.contract.usage import WORDS, RoutedLayer, Usage
from moevolve.workers.engine.engine import GenerationEngine
from moevolve.workers.methods.registry import calibrator_of, method_of, routing_reader
from moevolve.workers.model.resident import ResidentModel

_LAYER = re.compile(r"layers\.(\d+)\.")


@torch.inference_mode()
def calibrate(
    resident: ResidentModel, engine: GenerationEngine, recipe: CalibrationRecipe, splits: Sequence[PreparedSplit]
) -> Calibration:
    """Make a calibration and note what it cost.

    Args:
        resident: unedited.
        engine: on it.
        recipe: what to measure.
        splits: whose prompts are run, with answers (`token_sequences`).

    Raises:
        UserError: unknown recipe, or the model isn't one it is for.
    """
    if isinstance(recipe, CombinedRecipe):
        parts = [calibrate(resident, engine, part, splits) for part in recipe.parts]
        arrays = {name: array for part in parts for name, array in part.arrays.items()}
        return Calibration(arrays).with_cost(
            sum(part.tokens_run for part in parts), sum(part.seconds for part in parts)
        )
    calibrator = calibrator_of(recipe)
    started = time.perf_counter()
    sequences = token_sequences(engine, splits, recipe.tokens)
    made = calibrator(resident, sequences, recipe)
    return made.with_cost(sum(len(each) for each in sequences), time.perf_counter() - started)


def token_sequences(engine: GenerationEngine, splits: Sequence[PreparedSplit], limit: int) -> list[Tokens]:
    """Prompts with their answers, split by split in turn, whole ones until `limit` tokens are reached.

    The answer is the gold one; where an example has none, the greedy one of the engine's model, which is unedited.
    """
    # Answers only add tokens: no more prompts are needed than reach the limit by themselves.
    needed = Counter(place for place, _ in _in_turn([engine.tokens_of(split).prompts for split in splits], limit))
    groups = [engine.answered(split, needed[place]) for place, split in enumerate(splits)]
    return [sequence for _, sequence in _in_turn(groups, limit)]


def _in_turn(groups: Sequence[Sequence[Tokens]], limit: int) -> list[tuple[int, Tokens]]:
    """Sequences with their group's number, group by group in turn, until `limit` tokens are reached."""
    found: list[tuple[int, Tokens]] = []
    total = 0
    for row in range(max(map(len, groups), default=0)):
        for place, group in enumerate(groups):
            if row < len(group) and total < limit:
                found.append((place, group[row]))
                total += len(group[row])
    return found


@torch.inference_mode()
def analyse_usage(
    resident: ResidentModel, edit: Edit, sequences: Sequence[Tokens], name: Callable[[int], str] = str
) -> Usage:
    """Run token sequences through a model with `edit` and count what its routers choose.

    Args:
        resident: with any edit or none; it is unedited afterwards.
        edit: `IdentityEdit` for the model as loaded.
        sequences: token ids.
        name: a token's text.

    Raises:
        UserError: there are no tokens, or the edit doesn't fit this model.
        CandidateError: the edit's values are at fault.
    """
    if not sequences:
        raise UserError("there are no prompts to analyse")
    words = _Words(sequences)
    with resident.edited(edit), ExitStack() as stack:
        decoder = resident.model.get_decoder()
        counters = _watch(decoder, stack, words)
        for row in resident.rows(sequences):
            words.show(row)
            resident.run(row)
        counted = [counter.counted() for counter in counters]
        # Nothing is to be said of a model without an edit but what was counted.
        base = underlying(edit)
        readers = UsageReaders() if isinstance(base, IdentityEdit) else method_of(type(base)).usage
        routed = tuple(readers.described(layer, position, base) for position, layer in enumerate(counted))
        return Usage(sum(map(len, sequences)), routed, readers.mixed(decoder, base), tuple(map(name, words.ids)))


def _watch(decoder: nn.Module, stack: ExitStack, words: _Words) -> list[_Counter]:
    """Count at every layer of experts until `stack` closes."""
    counters: list[_Counter] = []
    for name, module in decoder.named_modules():
        matched, reader = _LAYER.search(f"{name}."), routing_reader(module)
        if matched is not None and reader is not None:
            counters.append(_Counter(int(matched[1]), words))
            stack.callback(module.register_forward_hook(_counting(counters[-1], reader)).remove)
    return counters


def _counting(counter: _Counter, reader: RoutingReader) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        counter.add(*reader(module, args, output))

    return hook


class _Words:
    """The most frequent tokens of all sequences, and which of them stand where in the row that is run.

    Attributes:
        ids: of these tokens, the most frequent first (ties: the smaller id).
        places: of the row's tokens among them, int64 [tokens]; their number for any other token.
    """

    def __init__(self, sequences: Sequence[Tokens]) -> None:
        counts = Counter(token for tokens in sequences for token in tokens)
        self.ids = sorted(counts, key=lambda token: (-counts[token], token))[:WORDS]
        self._place = {token: place for place, token in enumerate(self.ids)}
        self.places = torch.empty(0, dtype=torch.int64)

    def show(self, row: Sequence[Tokens]) -> None:
        """This row of sequences is run next."""
        self.places = torch.tensor([self._place.get(token, len(self.ids)) for tokens in row for token in tokens])


class _Counter:
    """Sums over tokens of one layer, on its device."""

    def __init__(self, layer: int, words: _Words) -> None:
        self._layer, self._words = layer, words
        self._by_word = torch.empty(0)
        self._weights: Tensor | None = None
        self._together = torch.empty(0)

    def add(self, chosen: Tensor, weights: Tensor) -> None:
        """Take in tokens: which experts they chose, 0 or 1 [tokens, E], and by what outputs are scaled, [tokens, E]."""
        if self._weights is None:
            experts = chosen.shape[1]
            self._weights = torch.zeros(experts, dtype=torch.float64, device=chosen.device)
            self._together = torch.zeros(experts, experts, dtype=torch.float64, device=chosen.device)
            self._by_word = self._together.new_zeros(len(self._words.ids) + 1, experts)
        ones = chosen.double()
        self._together += ones.t() @ ones
        self._by_word.index_add_(0, self._words.places.to(ones.device), ones)
        self._weights += weights.double().sum(dim=0)

    def counted(self) -> RoutedLayer:
        """What all tokens chose."""
        assert self._weights is not None, "a layer of experts was not run"
        together: NDArray[np.int64] = self._together.round().long().cpu().numpy()
        by_word: NDArray[np.int64] = self._by_word[:-1].round().long().cpu().numpy()
        return RoutedLayer(self._layer, np.diagonal(together).copy(), self._weights.cpu().numpy(), together, by_word)
