"""One pass of the resident model over columns of tokens, and what is read off its logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from moevolve.evaluators.errors import CandidateError
from moevolve.kernels.products import logsumexp
from moevolve.workers.engine.batches import Batcher
from moevolve.workers.engine.columns import Attention, Columns, Layout, Masks
from moevolve.workers.engine.lean import lean_blocks
from moevolve.workers.engine.packed_attention import Step, packed, packs
from moevolve.workers.engine.reuse import LayerReuse
from moevolve.workers.families.decoder import decoder_layers, skipped

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CHUNK = 1 << 22
"""Logits turned to float32 at once: bounds the copies that normalising over a large vocabulary makes."""


@dataclass(frozen=True, slots=True, eq=False)
class _Pass:
    """One pass of the model.

    Attributes:
        ids, positions: int64 [rows, columns].
        mask: int64 [rows, cached + columns], 1 where there is a token; None where there is everywhere.
        places: columns that are read, in all rows counted through, int64 [places].
        attention: of packed columns, or of a step that follows them.
        cache: extended in place; None to keep nothing.
        recurs: whether other candidates will ask for the same pass, and nothing is cached before: layers may be left
            out then, of the cache, too (see `Forward.complete`).
        hidden: whether what goes into the output embeddings is wanted instead of logits.
    """

    ids: Tensor
    mask: Tensor | None
    positions: Tensor
    places: Tensor
    attention: Attention | Step | None = None
    cache: DynamicCache | None = None
    recurs: bool = False
    hidden: bool = False


class _KeptLayer(DynamicLayer):
    """A cache's layer that keeps the first states it is given as they are; the stock one copies them."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.is_initialized:
            return super().update(key_states, value_states, *args, **kwargs)
        self.lazy_initialization(key_states, value_states)
        self.keys, self.values = key_states, value_states
        return key_states, value_states


class Forward:
    """Runs a model.

    Attributes:
        device: where inputs go.
        rewinds: whether cached columns can be masked out and left behind. Recurrent states run over columns, so there
            they can't; nor can sliding windows, but for attention that knows each token's place (`Step`).
        batcher: plans its passes.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        batch_tokens: int,
        lean: bool = True,
        reuse: LayerReuse | None = None,
        prefixes: bool = True,
    ) -> None:
        """Take a model; edits made to it later are seen.

        Args:
            model: in eval mode.
            batch_tokens: upper bound on columns of a pass.
            lean: leave out feed-forward work that nobody reads; see `moevolve.workers.engine.lean`.
            reuse: where passes that may come again find and leave hidden states; None runs all layers.
            prefixes: run beginnings that sequences have in common once, if the model lets them be packed.
        """
        self._model = model
        self._lean = lean
        self._reuse = reuse
        self.device: torch.device = next(model.get_input_embeddings().parameters()).device
        layers = DynamicCache(config=model.config).layers
        packable = packs(model, layers)
        self._steps = Masks() if packable and self.device.type == "cpu" else None
        self.rewinds = self._steps is not None or all(type(layer) is DynamicLayer for layer in layers)
        layout: Layout = "padded" if not packable else "packed" if prefixes else "unshared"
        self.batcher = Batcher(layout, batch_tokens, self.device)

    def new_cache(self) -> DynamicCache:
        """An empty cache of the kind the model's layers need."""
        cache = DynamicCache(config=self._model.config)
        if self.rewinds:
            cache.layers = [_KeptLayer() for _ in cache.layers]
        return cache

    def logits(self, columns: Columns, places: ArrayLike, cache: DynamicCache | None = None) -> Tensor:
        """Run columns that other candidates will be asked, too.

        Args:
            columns: of one of `batcher`'s batches.
            places: columns whose logits are wanted, in all rows counted through, [places]; none is padding.
            cache: empty, and filled in place; `complete` it before it is used. None to keep nothing.

        Returns:
            Logits [places, vocabulary] in the model's dtype.

        Raises:
            CandidateError: a logit is not finite.
        """
        return self._read(self._pass_over(columns, places, cache))

    def hidden_states(self, columns: Columns, places: ArrayLike) -> Tensor:
        """Like `logits`, what goes into the output embeddings: [places, hidden], on their device, unchecked."""
        return self._run(self._pass_over(columns, places, None, hidden=True))

    def embedded(self, hidden: Tensor) -> Tensor:
        """The output embeddings' logits of hidden states [positions, hidden], [positions, vocabulary]."""
        logits: Tensor = self._model.get_output_embeddings()(hidden)
        return logits

    def step(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
        """Run new columns of some rows, after those in the cache.

        Args:
            ids, positions: int64 [rows, columns], which end together.
            mask: int64 [rows, cached + columns], 1 where there is a token.
            cache: extended in place.

        Returns:
            Logits of the last column, [rows, vocabulary].

        Raises:
            CandidateError: a logit is not finite.
        """
        places = torch.arange(1, len(ids) + 1, device=self.device) * ids.shape[1] - 1
        attention = None if self._steps is None or ids.shape[1] > 1 else Step.of(mask, self._steps)
        return self._read(_Pass(ids, mask, positions, places, attention, cache))

    @property
    def vocabulary(self) -> int:
        """Logits per position."""
        return int(self._model.get_output_embeddings().weight.shape[0])

    def complete(self, columns: Columns, cache: DynamicCache) -> None:
        """Fill in the layers that a pass over these columns left out of its cache, by running them."""
        filled = [bool(getattr(layer, "is_initialized", False)) for layer in cache.layers]
        missing = filled.index(True)
        if missing:
            with skipped(decoder_layers(self._model)[missing:]):
                self._run(replace(self._pass_over(columns, [0], cache), recurs=False))

    def rows_of(self, cache: DynamicCache, paths: ArrayLike) -> DynamicCache:
        """A cache with a row for every path.

        Args:
            cache: of a pass over columns, with all layers.
            paths: columns of that pass, in all rows counted through, int64 [new rows, new columns].
        """
        index = torch.as_tensor(np.asarray(paths), device=self.device)
        taken = self.new_cache()
        for number, layer in enumerate(cache.layers):
            assert isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None
            taken.update(_rows(layer.keys, index), _rows(layer.values, index), number)
        return taken

    def _read(self, one: _Pass) -> Tensor:
        """Logits of a pass, [places, vocabulary].

        Raises:
            CandidateError: a logit is not finite.
        """
        logits = self._run(one)
        # A sum is finite only if its terms are, and is far cheaper than a test of every term.
        finite = logits.sum(dim=-1, dtype=torch.float32).isfinite()
        if not finite.all():
            bad = int((~finite).sum())
            raise CandidateError(f"non-finite logits at {bad} of {len(finite)} positions read in a batch")
        return logits

    def _run(self, one: _Pass) -> Tensor:
        """One pass, unchecked: logits or hidden states of the places that are read, [places, ...]."""
        ids, cache = one.ids, one.cache
        with ExitStack() as stack:
            if one.attention is not None:
                stack.enter_context(packed(self._model, one.attention))
            if self._lean and ids.shape[1] > 1:
                real = None if one.mask is None else one.mask[:, -ids.shape[1] :]
                stack.enter_context(lean_blocks(self._model, ids.shape, real, one.places))
            # Other kinds of caches hold more than keys and values, which can't be put back.
            if self._reuse is not None and one.recurs and (cache is None or self.rewinds):
                stack.enter_context(self._reuse.over(ids, one.mask, one.positions))
            read = stack.enter_context(self._reading(one))
            logits: Tensor = self._model(
                input_ids=ids,
                attention_mask=one.mask,
                position_ids=one.positions,
                past_key_values=cache,
                use_cache=cache is not None,
            ).logits
        return read[0] if one.hidden else logits[0]

    def _pass_over(
        self, columns: Columns, places: ArrayLike, cache: DynamicCache | None, hidden: bool = False
    ) -> _Pass:
        """A pass over columns that other candidates will be asked, too; see `logits` and `hidden_states`."""
        index = torch.as_tensor(np.asarray(places, dtype=np.int64), device=self.device)
        return _Pass(
            columns.ids, columns.mask, columns.positions, index, columns.attention, cache, recurs=True, hidden=hidden
        )

    @contextmanager
    def _reading(self, one: _Pass) -> Iterator[list[Tensor]]:
        """Let the output embeddings see the places that are read only, as [1, places, hidden], and collect these."""
        read: list[Tensor] = []

        def select(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            hidden = args[0].reshape(-1, args[0].shape[-1])
            read.append(hidden.index_select(0, one.places.to(hidden.device)))
            # Where hidden states are wanted nobody reads these logits: one place is enough.
            return ((read[0][:1] if one.hidden else read[0]).unsqueeze(0), *args[1:])

        handle = self._model.get_output_embeddings().register_forward_pre_hook(select)
        try:
            yield read
        finally:
            handle.remove()


def _rows(states: Tensor, index: Tensor) -> Tensor:
    """[rows, heads, columns, width] -> [new rows, heads, new columns, width], by columns counted through all rows."""
    rows, heads, columns, width = states.shape
    flat = states.transpose(1, 2).reshape(rows * columns, heads, width)
    return flat[index.to(flat.device)].transpose(1, 2)


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
    norms = torch.cat([logsumexp(part.float()) for part in logits.split(step)])
    index = torch.tensor([rows, tokens], dtype=torch.int64, device=logits.device)
    return (logits[index[0], index[1]].float() - norms[index[0]]).double().cpu().numpy()


def sums_by_owner(values: NDArray[np.float64], counts: Sequence[int]) -> NDArray[np.float64]:
    """Sums of consecutive stretches of `counts` values, float64 [stretches]; 0 for an empty stretch."""
    owners = np.repeat(np.arange(len(counts)), counts)
    return np.bincount(owners, weights=values, minlength=len(counts)).astype(np.float64, copy=False)
