"""One pass of the resident model over columns of tokens, and what is read off its logits."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import DynamicCache

from moevolve.evaluators.errors import CandidateError
from moevolve.workers.lean import lean_blocks
from moevolve.workers.reuse import LayerReuse, decoder_layers, passed_over

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CHUNK = 1 << 22
"""Logits turned to float32 at once: bounds the copies that normalising over a large vocabulary makes."""


@dataclass(frozen=True, slots=True, eq=False)
class PassRequest:
    """One pass of the model.

    Attributes:
        ids, positions: int64 [rows, columns].
        mask: int64 [rows, cached + columns].
        cache: extended in place; None to keep nothing.
        keep: how many closing columns are read.
        recurs: whether other candidates will ask for the same pass, and nothing is cached before.
        follows: whether others will ask for the same pass, each after what it has cached.
        whole_cache: see `Forward.__call__`.
        hidden: whether what goes into the output embeddings is wanted instead of logits.
        places: int64, the only ones of the rows x keep closing columns whose logits are wanted; None for all.
    """

    ids: Tensor
    mask: Tensor
    positions: Tensor
    cache: DynamicCache | None
    keep: int
    recurs: bool = False
    follows: bool = False
    whole_cache: bool = False
    hidden: bool = False
    places: Tensor | None = None


class Forward:
    """Runs a model.

    Attributes:
        device: where inputs go.
        rewinds: whether cached columns can be masked out and left behind. Sliding windows and recurrent states run over
            columns, so there they can't.
    """

    def __init__(self, model: PreTrainedModel, lean: bool, reuse: LayerReuse | None = None) -> None:
        """Take a model; edits made to it later are seen.

        Args:
            model: in eval mode.
            lean: leave out feed-forward work that nobody reads; see `moevolve.workers.lean`.
            reuse: where passes that may come again find and leave hidden states; None runs all layers.
        """
        self._model = model
        self._lean = lean
        self._reuse = reuse
        self.device: torch.device = next(model.get_input_embeddings().parameters()).device
        self.rewinds = all(type(layer).__name__ == "DynamicLayer" for layer in self.new_cache().layers)

    def new_cache(self) -> DynamicCache:
        """An empty cache of the kind the model's layers need."""
        return DynamicCache(config=self._model.config)

    def __call__(
        self,
        ids: Tensor,
        mask: Tensor,
        positions: Tensor,
        cache: DynamicCache | None,
        keep: int,
        recurs: bool = False,
        whole_cache: bool = False,
        places: Sequence[int] | None = None,
        follows: bool = False,
    ) -> Tensor:
        """Run new columns, after those in the cache.

        Args:
            ids: int64 [rows, columns].
            mask: int64 [rows, cached + columns], 1 where there is a token.
            positions: int64 [rows, columns], each token's place in its sequence.
            cache: extended in place; None to keep nothing.
            keep: how many closing columns have their logits computed.
            recurs: whether other candidates will be asked the same, and nothing is cached before: layers may be left
                out then.
            whole_cache: whether the cache is sure to be used; otherwise `complete` it before.
            places: the only ones of the rows x keep closing columns whose logits are computed, none of them padding;
                None for all.
            follows: whether other candidates will be asked the same, each after what it has cached.

        Returns:
            Logits [rows, keep, vocabulary], or [places, vocabulary], in the model's dtype.

        Raises:
            CandidateError: logits of a token are not finite.
        """
        index = None if places is None else torch.tensor(places, dtype=torch.int64, device=self.device)
        logits = self.run(
            PassRequest(ids, mask, positions, cache, keep, recurs, follows, whole_cache=whole_cache, places=index)
        )
        # A sum is finite only if its terms are, and is far cheaper than a test of every term.
        infinite = ~logits.sum(dim=-1, dtype=torch.float32).isfinite()
        if index is None:
            infinite &= (mask[:, -keep:] != 0).to(logits.device)  # padding doesn't count
        if infinite.any():
            where = infinite.nonzero()[:, 0] if index is None else index.to(logits.device)[infinite] // keep
            bad = len(where.unique())
            raise CandidateError(f"non-finite logits for {bad} of {len(ids)} prompts of a batch")
        return logits

    @contextmanager
    def _selecting(self, index: Tensor) -> Iterator[None]:
        """Let the output embeddings see some positions only, as [1, positions, hidden]."""

        def select(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            hidden = args[0].reshape(-1, args[0].shape[-1])
            return (hidden.index_select(0, index.to(hidden.device)).unsqueeze(0), *args[1:])

        handle = self._model.get_output_embeddings().register_forward_pre_hook(select)
        try:
            yield
        finally:
            handle.remove()

    @property
    def vocabulary(self) -> int:
        """Logits per position."""
        return int(self._model.get_output_embeddings().weight.shape[0])

    def hidden_states(self, ids: Tensor, mask: Tensor, positions: Tensor, keep: int) -> Tensor:
        """Run columns and give what goes into the output embeddings; logits are left to `logits`.

        Args:
            ids: int64 [rows, columns].
            mask: int64 [rows, columns], 1 where there is a token.
            positions: int64 [rows, columns], each token's place in its sequence.
            keep: how many closing columns are wanted.

        Returns:
            [rows, keep, hidden] in the model's dtype, on the output embeddings' device; what stands on padding means
            nothing.
        """
        return self.run(PassRequest(ids, mask, positions, None, keep, recurs=True, hidden=True))

    def logits(self, hidden: Tensor) -> Tensor:
        """The output embeddings' logits of hidden states [positions, hidden], [positions, vocabulary]."""
        logits: Tensor = self._model.get_output_embeddings()(hidden)
        return logits

    def complete(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache) -> None:
        """Fill in the layers that a pass over the same columns left out of its cache, by running them."""
        filled = [bool(getattr(layer, "is_initialized", False)) for layer in cache.layers]
        missing = filled.index(True)
        if missing:
            with passed_over(decoder_layers(self._model)[missing:]):
                self.run(PassRequest(ids, mask, positions, cache, 1))

    def run(self, request: PassRequest) -> Tensor:
        """One pass, unchecked: logits or hidden states of the closing columns, [rows, keep, ...] or [places, ...]."""
        ids, cache = request.ids, request.cache
        with ExitStack() as stack:
            if self._lean and ids.shape[1] > 1:
                stack.enter_context(lean_blocks(self._model, request.mask[:, -ids.shape[1] :], request.keep))
            # Other kinds of caches hold more than keys and values, which can't be put back.
            if self._reuse is not None and request.recurs and (cache is None or self.rewinds):
                reused = self._reuse.over(ids, request.mask, request.positions, cache, request.whole_cache)
                stack.enter_context(reused)
            taken = stack.enter_context(self._taking_hidden()) if request.hidden else []
            if request.places is not None:
                stack.enter_context(self._selecting(request.places))
            logits: Tensor = self._model(
                input_ids=ids,
                attention_mask=request.mask,
                position_ids=request.positions,
                past_key_values=cache,
                use_cache=cache is not None,
                logits_to_keep=request.keep,
            ).logits
        if request.hidden:
            return taken[0]
        return logits if request.places is None else logits[0]

    @contextmanager
    def _taking_hidden(self) -> Iterator[list[Tensor]]:
        """Collect what goes into the output embeddings."""
        taken: list[Tensor] = []

        def take(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            taken.append(args[0])
            return (args[0][:, -1:], *args[1:])  # nobody reads these logits: one column is enough

        handle = self._model.get_output_embeddings().register_forward_pre_hook(take)
        try:
            yield taken
        finally:
            handle.remove()


def copy_rows(cache: DynamicCache, rows: Tensor) -> DynamicCache:
    """A cache of some rows of another (a row may come several times), which stays as it is."""
    copied = copy.copy(cache)
    copied.layers = [copy.copy(layer) for layer in cache.layers]
    copied.batch_select_indices(rows)
    return copied


def token_logprobs(logits: Tensor, rows: Sequence[int], tokens: Sequence[int]) -> NDArray[np.float64]:
    """Log-probabilities of tokens, normalised in float32.

    Args:
        logits: [rows, vocabulary].
        rows: per token, the row that predicts it.
        tokens: token ids.

    Returns:
        float64 [tokens], in nats.
    """
    step = max(1, _CHUNK // logits.shape[1])
    norms = torch.cat([part.float().logsumexp(dim=-1) for part in logits.split(step)])
    index = torch.tensor([rows, tokens], dtype=torch.int64, device=logits.device)
    return (logits[index[0], index[1]].float() - norms[index[0]]).double().cpu().numpy()


def sums_by_owner(values: NDArray[np.float64], counts: Sequence[int]) -> NDArray[np.float64]:
    """Sums of consecutive stretches of `counts` values, float64 [stretches]; 0 for an empty stretch."""
    owners = np.repeat(np.arange(len(counts)), counts)
    return np.bincount(owners, weights=values, minlength=len(counts)).astype(np.float64, copy=False)
