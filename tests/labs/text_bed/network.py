"""The text model's tokenizer and untrained network."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast, Qwen2MoeConfig, Qwen2MoeForCausalLM

START, END = "<s>", "</s>"


def build_tokenizer(texts: Iterable[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with this many tokens, trained on texts; it puts ``<s>`` in front."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{START} $A", special_tokens=[(START, 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=START, eos_token=END, pad_token=END, clean_up_tokenization_spaces=False
    )


def build_model(vocabulary: int, layers: int, hidden: int, ffn: int, balance: float) -> Qwen2MoeForCausalLM:
    """An untrained model of Qwen1.5-MoE's form; uses torch's global generator.

    32 experts of width ``ffn``, of which a token takes 4, and a shared one of twice that width behind a gate.
    """
    config = Qwen2MoeConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        moe_intermediate_size=ffn,
        shared_expert_intermediate_size=2 * ffn,
        num_experts=32,
        num_experts_per_tok=4,
        norm_topk_prob=False,
        router_aux_loss_coef=balance,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        experts_implementation="grouped_mm",
    )
    return Qwen2MoeForCausalLM(config)
