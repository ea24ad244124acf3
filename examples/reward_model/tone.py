"""The task: a shop answers complaints. What it may say, how polite that is, and a word-level Llama that says it."""

import random
from itertools import product

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

THINGS = ("parcel", "bill", "room", "order", "ticket", "phone", "card", "seat", "lamp", "coat")
TROUBLES = ("is late", "is wrong", "is lost", "is broken", "is missing", "is dirty", "is too small", "does not work")
OPENINGS = {
    1: ("we are very sorry .", "thank you for telling us ."),
    0: ("your message is here .", "we have read it ."),
    -1: ("that is your own problem .", "stop complaining ."),
}
BODIES = {
    1: ("we will gladly help you today .", "please allow us to send a new one ."),
    0: ("a new one is sent .", "someone looks at it ."),
    -1: ("nobody will help you .", "you should have been careful ."),
}
CLOSINGS = {
    1: ("have a lovely day !", "please write again !"),
    0: ("end of message .", "regards ."),
    -1: ("do not write again .", "go away now ."),
}
PARTS = (OPENINGS, BODIES, CLOSINGS)
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ' : ' + message['content'] + ' \\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant : ' }}{% endif %}"
)
SPECIAL = ("<pad>", "<eos>")
MAX_LEN = 64


def complaints() -> list[tuple[str, str]]:
    """Every thing with every trouble."""
    return list(product(THINGS, TROUBLES))


def complaint_text(thing: str, trouble: str) -> str:
    return f"my {thing} {trouble}"


def draw_reply(rng: random.Random) -> tuple[str, int]:
    """Three sentences, each polite, plain or rude with the same chance; and their politeness, -3 to 3."""
    levels = [rng.choice((1, 0, -1)) for _ in PARTS]
    sentences = [rng.choice(part[level]) for part, level in zip(PARTS, levels, strict=True)]
    return " ".join(sentences), sum(levels)


def politeness(reply: str) -> int | None:
    """-3 to 3; None for what is no reply of three such sentences."""
    levels = []
    rest = f"{reply} "
    for part in PARTS:
        found = [(level, text) for level, of in part.items() for text in of if rest.startswith(f"{text} ")]
        if not found:
            return None
        level, text = found[0]
        levels.append(level)
        rest = rest[len(text) + 1 :]
    return None if rest else sum(levels)


def words() -> list[str]:
    texts = [text for part in PARTS for of in part.values() for text in of]
    texts += [*THINGS, *TROUBLES, "my user assistant :"]
    return sorted({word for text in texts for word in text.split()})


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word."""
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *words()])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL[0]))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=SPECIAL[0], eos_token=SPECIAL[1], clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def build_model(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(SPECIAL) + len(words()),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LEN,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)
