"""A tiny language, and what its three readers like in it."""

import random
from collections.abc import Callable, Mapping, Sequence

import torch
from transformers import Qwen2Config, Qwen2Tokenizer

CHARACTERS = "0123456789abcdef,!="
SPECIAL = ("<pad>", "<eos>")
PROMPT_LEN, RESPONSE_LEN = len("12="), 16


def share(text: str, characters: str) -> float:
    return sum(character in characters for character in text) / max(1, len(text))


TASTES: Mapping[str, Callable[[str], float]] = {
    "informative": lambda text: share(text, "0123456789"),
    "calm": lambda text: -share(text, "!"),
    "readable": lambda text: -abs(share(text, ",") - 0.25),
}
"""What each reward model learns to tell: more digits, fewer exclamation marks, a comma for every three others."""


def random_text(rng: random.Random) -> str:
    """Up to `RESPONSE_LEN` characters; each text has a taste of its own for digits, commas and exclamation marks."""
    weights = {"0123456789": rng.random() / 10, ",": rng.random(), "!": rng.random(), "abcdef=": rng.random() / 7}
    each = [next(weight for group, weight in weights.items() if c in group) for c in CHARACTERS]
    return "".join(rng.choices(CHARACTERS, each, k=rng.randint(1, RESPONSE_LEN)))


def build_tokenizer(order: Sequence[str]) -> Qwen2Tokenizer:
    """One token a character, with the ids of the order."""
    return Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(order)},
        merges=[],
        unk_token=SPECIAL[0],
        pad_token=SPECIAL[0],
        eos_token=SPECIAL[1],
        model_max_length=32,
        clean_up_tokenization_spaces=False,
    )


def build_config(order: Sequence[str], hidden_size: int) -> Qwen2Config:
    config = Qwen2Config(
        vocab_size=len(order),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=True,
        pad_token_id=order.index(SPECIAL[0]),
        eos_token_id=order.index(SPECIAL[1]),
        bos_token_id=None,
    )
    config.num_labels = 1
    return config


def token_order(rng: random.Random) -> list[str]:
    """Each model has ids of its own."""
    return rng.sample([*SPECIAL, *CHARACTERS], k=len(SPECIAL) + len(CHARACTERS))


def seeded(seed: int) -> random.Random:
    torch.manual_seed(seed)
    return random.Random(seed)
