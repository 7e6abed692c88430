"""Owns the tests' policy: a random Llama with a few hundred thousand parameters and a character tokenizer.

Must not be used outside tests.
"""

from __future__ import annotations

import string
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<unk>", "<bos>", "<eos>", "<user>", "<assistant>", "<system>"]
CHARACTERS = list(string.printable)
CHAT_TEMPLATE = (
    "{{ '<bos>' }}{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable character, and the chat's special tokens."""
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *CHARACTERS])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    characters.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<bos>",
        eos_token="<eos>",
        additional_special_tokens=["<user>", "<assistant>", "<system>"],
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def write_tiny_model(
    folder: Path, *, tied: bool = True, seed: int = 0, scale: float = 0.02, dtype: torch.dtype = torch.float32
) -> Path:
    """Create the model in `folder`. `scale`: standard deviation of its weights; larger is less uniform.

    `dtype`: what the weights are rounded to; they are stored in it.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(SPECIAL) + len(CHARACTERS),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
        bos_token_id=2,
        eos_token_id=3,
        pad_token_id=0,
        initializer_range=scale,
        dtype="float32",
    )
    model = LlamaForCausalLM(config).to(torch.float32).to(dtype)
    model.generation_config.eos_token_id = 3
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder
