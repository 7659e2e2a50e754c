"""Causal language models of text models that `transformers` has inside multimodal classes only."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import slice_logits_to_keep


def causal_class(text_model: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return a class of causal language models: a text model and an output head, as the multimodal class has them.

    Its tensors have the usual names, `model.*` and `lm_head.weight`. Nobody else can load checkpoints of it.
    """
    base: Any = text_model.__bases__[0]

    class CausalText(base, GenerationMixin):
        config_class = text_model.config_class
        _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}

        def __init__(self, config: PretrainedConfig) -> None:
            super().__init__(config)
            self.model = text_model(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def forward(
            self, input_ids: Tensor | None = None, logits_to_keep: int | Tensor = 0, **inputs: object
        ) -> CausalLMOutputWithPast:
            outputs = self.model(input_ids=input_ids, **inputs)
            states = slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep)
            logits = self.lm_head(states)
            if (factor := getattr(self.config, "output_multiplier", None)) is not None:  # of Muse Spark
                logits = logits * factor
            if (bound := getattr(self.config, "final_logit_softcapping", None)) is not None:
                logits = (logits / bound).tanh() * bound
            return CausalLMOutputWithPast(logits=logits, past_key_values=outputs.past_key_values)

    # `transformers` looks into a class's file to learn which backends it has, and so do we for its attention.
    CausalText.__module__, CausalText.__name__ = text_model.__module__, f"{text_model.__name__}ForCausalLM"
    return CausalText
