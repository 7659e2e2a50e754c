"""The resident model: it stays loaded, and edits are applied to it and reverted."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moevolve.evaluators.errors import opening
from moevolve.workers.checkpoints.loading import load_config, load_model, load_without_experts, resolve_device
from moevolve.workers.contract.capacity import release_unused_models
from moevolve.workers.contract.edits import ROW_TOKENS, Edit, IdentityEdit, Tokens
from moevolve.workers.contract.methods import Applicator, ExpertFiles, ExpertsOwner, ModelParts
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.families.decoder import carries, decoder_layers, decoder_of, only_layer
from moevolve.workers.families.layers import adapt_blocks, check_router, find_dense_layers, find_moe_layers
from moevolve.workers.families.registry import expert_family, family_of
from moevolve.workers.families.rotary import separate_texts
from moevolve.workers.methods.registry import experts_owner, method_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class ResidentModel:
    """A loaded model with at most one edit at a time.

    Edits are applied in place and reverted bit for bit, so results don't depend on the edits applied before.

    Args:
        model: Model as returned by `load_model`. With `expert_offload="host"` it is still on the host, and moved here.
        config: Settings that the model was loaded with.
        pass_bytes: Device memory that forward passes need besides weights and experts, in bytes; None if unknown.
        stored: Original experts that stay in the checkpoint's files; None if the model has them.
        fits: See `ModelParts.fits`.

    Attributes:
        layers, dense_layers: See `moevolve.workers.contract.methods.Resident`.
        device: Device of the model's inputs.
        applied: The edit that is applied; `IdentityEdit` for the unedited model.
        one_layer_at_a_time: True if original experts aren't on the device, so that passes should share a layer's. False
            for families whose layers hand on more than hidden states.

    Raises:
        UserError: The checkpoint can't be loaded, its family isn't supported, no layer holds experts, or the installed
            version of `transformers` has routers with other outputs than expected.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: ModelConfig,
        pass_bytes: int | None = None,
        stored: ExpertFiles | None = None,
        fits: Path | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.config = config
        adapt_blocks(model)
        separate_texts(model)
        self.layers = find_moe_layers(model, config.path)
        self.dense_layers = find_dense_layers(model)
        self.applied: Edit = IdentityEdit()
        device, on_host = resolve_device(config), config.expert_offload == "host" or stored is not None
        self.one_layer_at_a_time = on_host and not any(map(carries, decoder_layers(model)))
        self._parts = ModelParts(
            model, self.layers, self.dense_layers, device, on_host, stored, pass_bytes, fits, self._applicator
        )
        self._applicators: dict[type, Applicator] = {}
        if self.layers:
            check_router(self.layers[0], config.path)
            # It must take over the experts before the first edit. If they stay elsewhere, it moves what doesn't.
            self._applicator(experts_owner().edit)
        elif on_host:
            model.to(device)
        self.device: torch.device = next(model.get_input_embeddings().parameters()).device

    @classmethod
    def load(cls, config: ModelConfig, pass_bytes: int | None = None, fits: Path | None = None) -> ResidentModel:
        """Load a checkpoint; for the other arguments and errors see `ResidentModel`."""
        stored: ExpertFiles | None = None
        with opening(f"model {config.path}: it can't be loaded"):
            if config.expert_offload == "disk" and expert_family(load_config(config).model_type) is not None:
                model, tokenizer, stored = load_without_experts(config)
            else:
                model, tokenizer = load_model(config)
            release_unused_models()  # what experts were fused from
            return cls(model, tokenizer, config, pass_bytes, stored, fits)

    def apply(self, edit: Edit) -> None:
        """Apply an edit in place of the one that is applied, unless that is the same. After an error none is applied.

        Raises:
            CandidateError: The edit has invalid values.
            UserError: The edit doesn't fit this model.
        """
        if edit.phenotype_hash == self.applied.phenotype_hash:
            return
        self.revert()
        if isinstance(edit, IdentityEdit):
            return
        applicator = self._applicator(type(edit))
        try:
            applicator.apply(edit)
        except BaseException:
            applicator.revert()
            self.applied = IdentityEdit()
            raise
        self.applied = edit

    def by_layer(self, edit: Edit) -> Generator[int]:
        """Apply an edit to one decoder layer at a time, in place of the one that is applied.

        Yields the index of every layer once it may run, and gives the layer up when the next one is asked for.
        Afterwards the model is unedited. For errors see `apply`.
        """
        self.revert()
        layers = range(len(decoder_layers(self.model)))
        with self._one_layer():
            if isinstance(edit, IdentityEdit):
                for layer in layers:
                    if self._owner is not None:  # another edit may have had the layer in between
                        self._owner.revert()
                    yield layer
                return
            applicator = self._applicator(type(edit))
            try:
                yield from applicator.by_layer(edit, layers)
            finally:
                applicator.revert()

    def revert(self) -> None:
        """Restore the unedited model, bit for bit.

        Experts that are kept on the host return to the device with the next forward pass.
        """
        applicator = self._applicators.get(type(self.applied))
        if applicator is not None:
            applicator.revert()
        self.applied = IdentityEdit()

    def report(self, edit: Edit) -> tuple[tuple[str, str], ...]:
        """Return the details of the last edit of this type as (title, value); empty for most types."""
        applicator = self._applicators.get(type(edit))
        return () if applicator is None else applicator.report()

    def original_experts(self, ordinal: int) -> Mapping[str, Tensor]:
        assert self._owner is not None, "the model is dense"
        return self._owner.original_experts(ordinal)

    def _applicator(self, kind: type) -> Applicator:
        """Return the applicator of an edit type. It is created on first use, when the model must be unedited."""
        if kind not in self._applicators:
            self._applicators[kind] = method_of(kind).applicator(self._parts)
        return self._applicators[kind]

    @contextmanager
    def edited(self, edit: Edit, keep: bool = False) -> Iterator[ResidentModel]:
        """Context manager that applies `edit`, and reverts it after an error, or at the end unless it is to be kept."""
        self.apply(edit)
        try:
            yield self
        except BaseException:
            self.revert()
            raise
        if not keep:
            self.revert()

    @contextmanager
    def layers_with(self, edit: Edit) -> Iterator[Iterator[int]]:
        """Context manager that gives every decoder layer with an edit: one after the other, or else all at once.

        Before the first layer is asked for, all that isn't within layers can be read. Afterwards the model is unedited.
        """
        if self.one_layer_at_a_time:
            with closing(self.by_layer(edit)) as layers:
                yield chain((next(layers),), layers)
        else:
            with self.edited(edit):
                yield iter(range(len(decoder_layers(self.model))))

    def rows(self, sequences: Sequence[Tokens]) -> list[tuple[Tokens, ...]]:
        limit = ROW_TOKENS if family_of(self.model.config, self.config.path).packs else 0
        rows: list[tuple[Tokens, ...]] = []
        length = 0
        for sequence in sequences:
            if rows and length + len(sequence) <= limit:
                rows[-1] += (sequence,)
                length += len(sequence)
            else:
                rows.append((sequence,))
                length = len(sequence)
        return rows

    def run(self, rows: Sequence[Sequence[Tokens]]) -> None:
        if not self.one_layer_at_a_time:
            for row in rows:
                self.run_row(row)
            return
        layers = decoder_layers(self.model)
        states: list[Tensor | None] = [None] * len(rows)
        with self._one_layer():
            for layer in (len(layers), *range(len(layers))):
                for place, row in enumerate(rows):
                    with only_layer(layers, layer, states[place]) as found:
                        self.run_row(row)
                    states[place] = found[0]

    def run_row(self, row: Sequence[Tokens]) -> None:
        """Do as `run` for one row, with the edit that is applied, and all layers at hand."""
        ids = torch.tensor([[token for sequence in row for token in sequence]], device=self.device)
        # Without a cache `transformers` masks attention between sequences of a row whose position ids restart at 0.
        positions = torch.cat([torch.arange(len(sequence), device=self.device) for sequence in row])
        decoder_of(self.model)(input_ids=ids, position_ids=positions.unsqueeze(0), use_cache=False)

    def _one_layer(self) -> AbstractContextManager[None]:
        return nullcontext() if self._owner is None else self._owner.one_layer()

    @property
    def _owner(self) -> ExpertsOwner | None:
        """What has taken over the experts; None for a dense model."""
        found = self._applicators.get(experts_owner().edit)
        assert found is None or isinstance(found, ExpertsOwner)
        return found
