"""A model that stays loaded while candidate after candidate is tried on it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from moevolve.workers.checkpoints.loading import load_model, resolve_device
from moevolve.workers.contract.edits import ROW_TOKENS, Edit, IdentityEdit, LayeredEdit, Tokens
from moevolve.workers.contract.methods import Applicator, ExpertsOwner, ModelParts, ReportingApplicator
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.families.decoder import decoder_layers
from moevolve.workers.families.layers import DenseLayer, MoELayer, check_router, find_dense_layers, find_moe_layers
from moevolve.workers.families.registry import family_of
from moevolve.workers.methods.registry import experts_owner, method_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class ResidentModel:
    """A loaded model with at most one edit on it at a time.

    Edits are made in place and reverted bit for bit: what a candidate computes doesn't depend on what was applied
    before.

    Attributes:
        model: the `transformers` model, in eval mode, without gradients.
        tokenizer: its tokenizer.
        config: how it was loaded.
        device: where inputs go.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: ModelConfig,
        beside: int | None = None,
    ) -> None:
        """Take over a freshly loaded model.

        Args:
            model: from `load_model`; with `originals="host"` still on the host, and placed here.
            tokenizer: its tokenizer.
            config: the settings it was loaded with.
            beside: bytes on the device that passes need beside weights and experts; None if that isn't known.

        Raises:
            UserError: the model has no MoE layers, its family is not supported, or its routers answer in another way
                than this version of `transformers` is known to let them.
        """
        self.model = model
        self.tokenizer = tokenizer
        self.config = config
        device = resolve_device(config)
        self._parts = ModelParts(
            model,
            find_moe_layers(model, config.path),
            find_dense_layers(model),
            device,
            on_host=config.originals == "host",
            beside=beside,
            applicator=self._applicator,
        )
        self._applicators: dict[type, Applicator] = {}
        if self.layers:
            check_router(self.layers[0], config.path)
            # Before the first edit of any kind, and before the model is placed.
            self._applicator(experts_owner().edit)
        if self._parts.on_host:
            model.to(device)  # type: ignore[arg-type]  # transformers' decorator hides the signature
        self.device: torch.device = next(model.get_input_embeddings().parameters()).device
        self._applied: Edit = IdentityEdit()

    @classmethod
    def load(cls, config: ModelConfig, beside: int | None = None) -> ResidentModel:
        """Load a checkpoint and make it resident.

        Args:
            config: which, and how to hold it.
            beside: see `__init__`.

        Raises:
            UserError: it can't be loaded or searched; see `load_model` and `find_moe_layers`.
        """
        model, tokenizer = load_model(config)
        _give_back()
        return cls(model, tokenizer, config, beside)

    @property
    def layers(self) -> tuple[MoELayer, ...]:
        """Handles of its MoE layers as loaded; empty for a dense model."""
        return self._parts.moe_layers

    @property
    def dense_layers(self) -> tuple[DenseLayer, ...]:
        """Handles of its dense feed-forward networks as loaded; empty for a model of experts."""
        return self._parts.dense_layers

    @property
    def applied(self) -> Edit:
        """The edit the model has now; `IdentityEdit` when it has none."""
        return self._applied

    def layer_keys(self) -> tuple[str, ...] | None:
        """What every decoder layer is now: layers of equal position and key compute the same, bit for bit.

        None where the edit doesn't tell its layers apart.
        """
        keys = [""] * len(decoder_layers(self.model))
        edit = self._applied
        if isinstance(edit, IdentityEdit):
            return tuple(keys)
        if not isinstance(edit, LayeredEdit):
            return None
        indices = [layer.index for layer in self.layers] or [layer.index for layer in self.dense_layers]
        for index, key in zip(indices, edit.layer_hashes, strict=True):
            keys[index] = key
        return tuple(keys)

    def apply(self, edit: Edit) -> None:
        """Make an edit in place of whatever edit was there.

        Raises:
            CandidateError: the edit's values are at fault; the model is unedited then.
            UserError: the edit doesn't fit this model; the model is unedited then.
        """
        if isinstance(edit, IdentityEdit):
            self.revert()
            return
        if type(edit) is not type(self._applied):
            self.revert()
        applicator = self._applicator(type(edit))
        try:
            applicator.apply(edit)
        except BaseException:
            applicator.revert()
            self._applied = IdentityEdit()
            raise
        self._applied = edit

    def revert(self) -> None:
        """Bring back the unedited model, bit for bit.

        Experts on the host come back when it next runs; `original_experts` has them at any time.
        """
        applicator = self._applicators.get(type(self._applied))
        if applicator is not None:
            applicator.revert()
        self._applied = IdentityEdit()

    def report(self) -> tuple[tuple[str, str], ...]:
        """What there is to tell of how the edit came out on this model, titles and values; of most edits nothing."""
        applicator = self._applicators.get(type(self._applied))
        return applicator.report() if isinstance(applicator, ReportingApplicator) else ()

    def arrays(self) -> Mapping[str, NDArray[Any]]:
        """What of that is too long for a table; see `ReportingApplicator`."""
        applicator = self._applicators.get(type(self._applied))
        return applicator.arrays() if isinstance(applicator, ReportingApplicator) else {}

    def original_experts(self, ordinal: int) -> Mapping[str, Tensor]:
        """The experts of a MoE layer as they were loaded, fused, by name, wherever they are kept; not to be changed.

        Args:
            ordinal: number of the layer among the MoE layers.
        """
        return self._owner.original_experts(ordinal)

    @property
    def _owner(self) -> ExpertsOwner:
        """What has taken over the experts of the MoE layers, of which there are some."""
        applicator = self._applicator(experts_owner().edit)
        assert isinstance(applicator, ExpertsOwner)
        return applicator

    def _applicator(self, kind: type) -> Applicator:
        """The applicator of a kind of edits, made when it is first needed; the model is unedited then."""
        if kind not in self._applicators:
            self._applicators[kind] = method_of(kind).applicator(self._parts)
        return self._applicators[kind]

    @contextmanager
    def edited(self, edit: Edit) -> Iterator[ResidentModel]:
        """The model with `edit` for the length of a `with` block, unedited afterwards.

        Raises:
            CandidateError: see `apply`.
            UserError: see `apply`.
        """
        self.apply(edit)
        try:
            yield self
        finally:
            self.revert()

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

    def run(self, row: Sequence[Tokens]) -> None:
        ids = torch.tensor([[token for sequence in row for token in sequence]], device=self.device)
        # Positions that begin anew are what `transformers` keeps the sequences of a row apart by, without a cache.
        places = torch.cat([torch.arange(len(sequence), device=self.device) for sequence in row])
        self.model.get_decoder()(input_ids=ids, position_ids=places.unsqueeze(0), use_cache=False)


def _give_back() -> None:
    """Let the system have what loading took beyond the weights: workers otherwise keep freed memory (`WORKER_ENV`)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
