"""Forward passes of the resident model, and the log-probabilities read from their logits."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from moevolve.evaluators.errors import CandidateError
from moevolve.kernels.products import logsumexp
from moevolve.workers.engine.batches import Batcher
from moevolve.workers.engine.columns import Columns, Layout, Masks, Step
from moevolve.workers.engine.packed_attention import packed, packs
from moevolve.workers.families.decoder import cache_name, decoder_layers, decoder_of, only_layer, skipped
from moevolve.workers.families.registry import pads_left
from moevolve.workers.families.rotary import separate_texts, texts_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# Begins to apply an edit layer by layer: yields the index of every decoder layer when it may run, as
# `ResidentModel.by_layer`.
LayersOf = Callable[[], Generator[int]]


class _NoCopyLayer(DynamicLayer):
    """A layer of a KV cache that stores the first states it gets without copying them, unlike its base class."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **more: object) -> tuple[Tensor, Tensor]:
        if self.is_initialized:
            return super().update(key_states, value_states, *args, **more)
        self.lazy_initialization(key_states, value_states)
        self.keys, self.values = key_states, value_states
        return key_states, value_states


class Forward:
    """Runs forward passes of a model. Its methods raise CandidateError if a logit that they return is not finite.

    Args:
        model: Model in eval mode. Edits made to it later take effect.
        batch_tokens: Upper bound on the columns of a pass.
        prefixes: Run common prefixes of sequences once, if the model's attention allows packing.

    Attributes:
        rewinds: True if cached columns can be masked out, so that decoding can continue from a part of them. That isn't
            possible with recurrent states, nor with sliding windows unless attention knows each token's position
            (`Step`).
        pads_left: True if tokens may follow padding; see `Family.pads_left`.
        batcher: Plans the passes.
        layers: Gives the layers one after the other, within `finished`; else None.
    """

    def __init__(self, model: PreTrainedModel, batch_tokens: int, prefixes: bool = True) -> None:
        self._model = model
        self._cache_name = cache_name(model)
        self.device: torch.device = next(model.get_input_embeddings().parameters()).device
        layers = DynamicCache(config=model.config).layers
        packable = packs(model, layers)
        self._steps = Masks() if packable and self.device.type == "cpu" else None
        self.rewinds = self._steps is not None or all(type(layer) is DynamicLayer for layer in layers)
        self.pads_left = pads_left(model.config.model_type)
        layout: Layout = "padded" if not packable else "packed" if prefixes else "unshared"
        self.batcher = Batcher(layout, batch_tokens, self.device, separate_texts(model))
        self.layers: LayersOf | None = None
        # By the layout of a pass, which it keeps: what the last decoder layer gave, on the host.
        self._finished: dict[int, tuple[Columns, Tensor]] = {}

    def new_cache(self) -> DynamicCache:
        """Create an empty KV cache of the kind that the model needs."""
        cache = DynamicCache(config=self._model.config)
        if self.rewinds:
            cache.layers = [_NoCopyLayer() for _ in cache.layers]
        return cache

    def logits(self, columns: Columns, places: ArrayLike, cache: DynamicCache | None = None) -> Tensor:
        """Run columns and return the logits of some places.

        Args:
            columns: Layout of one of `batcher`'s batches, or of a step, whose mask covers cached columns, too.
            places: Places to read, int64 [places], none of them padding; see `Columns.places`.
            cache: KV cache to extend in place; None to keep none.

        Returns:
            Logits [places, vocabulary] in the model's dtype.
        """
        logits = self._run(columns, places, cache)
        # A sum is finite only if its terms are, and summing is far cheaper than testing every term.
        finite = logits.sum(dim=-1, dtype=torch.float32).isfinite()
        if not finite.all():
            bad = int((~finite).sum())
            raise CandidateError(f"non-finite logits at {bad} of {len(finite)} positions read in a batch")
        return logits

    def hidden_states(self, columns: Columns, places: ArrayLike) -> Tensor:
        """Run a batch as `logits` does, but return the inputs of the output head, [places, hidden], unchecked."""
        return self._run(columns, places, None, hidden=True)

    @contextmanager
    def finished(
        self, passes: Sequence[Columns], layers: LayersOf | None = None, states: Sequence[Tensor] | None = None
    ) -> Iterator[None]:
        """Run passes through one decoder layer after the other; within a `with` block they are then complete.

        Only the final norm and the output head remain to be computed for them. Results are those of whole passes, bit
        for bit, and every layer is needed once.

        Args:
            passes: Layouts of the passes.
            layers: The layers of an edit. None takes those of the `with` block around this one once more, whose passes
                stay complete.
            states: What the last layer gave, if the passes have run (`through_layers`).
        """
        before = self.layers, self._finished
        self.layers = layers = layers or self.layers
        assert layers is not None
        try:
            if states is None:
                (found,) = self.through_layers(passes, [layers])
                if isinstance(found, Exception):
                    raise found
                states = found
            complete = {id(columns): (columns, state) for columns, state in zip(passes, states, strict=True)}
            self._finished = self._finished | complete
            yield
        finally:
            self.layers, self._finished = before

    def through_layers(
        self, passes: Sequence[Columns], edits: Sequence[LayersOf]
    ) -> list[Sequence[Tensor] | Exception]:
        """Run passes with several edits, all of them through one decoder layer before the next.

        Returns for each edit what its last layer gave in every pass, on the host, or the error that ended it.
        """
        layers = decoder_layers(self._model)
        states: list[Sequence[Tensor] | Exception] = [
            [self._run_layer(columns, len(layers), None) for columns in passes]
        ] * len(edits)
        # What an edit makes outlives this pass.
        with torch.inference_mode(False), ExitStack() as stack:
            running = {place: stack.enter_context(closing(edit())) for place, edit in enumerate(edits)}
            for layer in range(len(layers)):
                for place, turns in [*running.items()]:
                    before = states[place]
                    assert not isinstance(before, Exception)
                    try:
                        next(turns)
                        pairs = zip(passes, before, strict=True)
                        states[place] = [self._run_layer(columns, layer, state) for columns, state in pairs]
                    except Exception as error:  # noqa: BLE001 - the other edits go on
                        states[place] = error
                        running.pop(place).close()
        return states

    @torch.inference_mode()
    def _run_layer(self, columns: Columns, layer: int, state: Tensor | None) -> Tensor:
        """Run one decoder layer on its input, or for None compute the embeddings; returns them on the host."""
        with ExitStack() as stack:
            stack.enter_context(texts_of(columns.lengths))
            if columns.attention is not None:
                stack.enter_context(packed(self._model, columns.attention))
            state = None if state is None else state.to(self.device)
            found = stack.enter_context(only_layer(decoder_layers(self._model), layer, state))
            decoder_of(self._model)(
                input_ids=columns.ids, attention_mask=columns.mask, position_ids=columns.positions, use_cache=False
            )
        return found[0].cpu()

    def output_head(self, hidden: Tensor) -> Tensor:
        """Compute the unchecked logits [positions, vocabulary] of inputs of the output head, [positions, hidden]."""
        # The model runs on one token without its layers, because some families scale or cap what their head gives.
        head = self._model.get_output_embeddings()
        handle = head.register_forward_pre_hook(lambda _, args: (hidden.unsqueeze(0), *args[1:]))
        with skipped(decoder_layers(self._model)):
            try:
                token = torch.zeros((1, 1), dtype=torch.int64, device=self.device)
                logits: Tensor = self._model(input_ids=token, use_cache=False).logits
            finally:
                handle.remove()
        return logits[0]

    def step(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
        """Run new columns after those in the cache.

        Args:
            ids, positions: Token ids and positions, padded on the left, int64 [rows, columns].
            mask: 1 for tokens and 0 for padding, int64 [rows, cached + columns].
            cache: KV cache, extended in place.

        Returns:
            Logits of the last column, [rows, vocabulary].
        """
        attention = None if self._steps is None or ids.shape[1] > 1 else Step.of(mask, self._steps)
        places = np.arange(ids.numel()).reshape(ids.shape)
        return self.logits(Columns(ids, positions, mask, places, attention), places[:, -1], cache)

    @property
    def vocabulary(self) -> int:
        """Number of logits per position."""
        return int(self._model.get_output_embeddings().weight.shape[0])

    def rows_of(self, cache: DynamicCache, paths: ArrayLike) -> DynamicCache:
        """Gather a pass's KV cache into one row per path of places, int64 [new rows, new columns]."""
        index = torch.as_tensor(np.asarray(paths), device=self.device)
        rows = self.new_cache()
        for number, layer in enumerate(cache.layers):
            assert isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None
            rows.update(_rows(layer.keys, index), _rows(layer.values, index), number)
        return rows

    def _run(self, columns: Columns, places: ArrayLike, cache: DynamicCache | None, hidden: bool = False) -> Tensor:
        """Return unchecked logits as `logits` does, or if `hidden` the inputs of the output head."""
        with ExitStack() as stack:
            stack.enter_context(texts_of(columns.lengths))
            if columns.attention is not None:
                stack.enter_context(packed(self._model, columns.attention))
            if self.layers is not None:
                # Layers are given up by now, so that no other pass than those announced can run.
                state = self._finished[id(columns)][1].to(self.device)
                stack.enter_context(skipped(decoder_layers(self._model), state))
            read = stack.enter_context(self._reading(places, hidden))
            logits: Tensor = self._model(
                input_ids=columns.ids,
                attention_mask=columns.mask,
                position_ids=columns.positions,
                use_cache=cache is not None,
                **{self._cache_name: cache},
            ).logits
        return read[0] if hidden else logits[0]

    @contextmanager
    def _reading(self, places: ArrayLike, hidden: bool) -> Iterator[list[Tensor]]:
        """Context manager that passes only some places to the output head, and collects their hidden states."""
        index = torch.as_tensor(np.asarray(places, dtype=np.int64), device=self.device)
        read: list[Tensor] = []

        def select(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            states = args[0].reshape(-1, args[0].shape[-1])
            read.append(states.index_select(0, index.to(states.device)))
            # When hidden states are read, the logits aren't: one place is enough.
            return ((read[0][:1] if hidden else read[0]).unsqueeze(0), *args[1:])

        handle = self._model.get_output_embeddings().register_forward_pre_hook(select)
        try:
            yield read
        finally:
            handle.remove()


def _rows(states: Tensor, index: Tensor) -> Tensor:
    """Gather states [rows, heads, columns, width] by places [R, C] into [R, heads, C, width]."""
    rows, heads, columns, width = states.shape
    flat = states.transpose(1, 2).reshape(rows * columns, heads, width)
    return flat[index.to(flat.device)].transpose(1, 2)


def token_logprobs(logits: Tensor, rows: Sequence[int], tokens: Sequence[int]) -> NDArray[np.float64]:
    """Compute log-probabilities of tokens in nats, float64 [tokens], normalised in float32.

    `rows` are the rows of the logits [rows, vocabulary] that predict each token.
    """
    norms = logsumexp(logits)
    index = torch.tensor([rows, tokens], dtype=torch.int64, device=logits.device)
    return (logits[index[0], index[1]].float() - norms[index[0]]).double().cpu().numpy()


def sums_by_owner(values: NDArray[np.float64], counts: Sequence[int]) -> NDArray[np.float64]:
    """Sum consecutive groups of `counts` values, float64 [groups]; 0 for an empty group."""
    owners = np.repeat(np.arange(len(counts)), counts)
    return np.bincount(owners, weights=values, minlength=len(counts)).astype(np.float64, copy=False)
