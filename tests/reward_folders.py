"""Folders of tiny reward models whose tokenizer is not the actor's."""

from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PretrainedConfig, PreTrainedTokenizerFast

from tests import tiny_models

CHARACTERS = ["<bos>", *reversed(tiny_models.CHARACTERS)]
TEMPLATE = "{% for m in messages %}{{ 'a' if m.role == 'user' else 'b' }}{{ m.content }}c{% endfor %}"
"""`a` before a turn of the user, `b` before one of the assistant, `c` after each."""


def tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Other ids for the actor's characters, and a BOS that it adds."""
    core = Tokenizer(models.WordLevel({character: i for i, character in enumerate(CHARACTERS)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.decoder = decoders.Fuse()
    core.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    words = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<bos>", pad_token="<pad>", eos_token="<eos>")
    words.chat_template = template
    return words


def save(folder: Path, seed: int, template: str | None = TEMPLATE, config: PretrainedConfig | None = None) -> str:
    """Returns its path."""
    config = config or tiny_models.qwen2(vocab_size=len(CHARACTERS), pad_token_id=CHARACTERS.index("<pad>"))
    tiny_models.random_classifier(config, seed).save_pretrained(folder)
    tokenizer(template).save_pretrained(folder)
    return str(folder)
