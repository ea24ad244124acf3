"""Tiny random models of real classes, and samples for them."""

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from lightrft.types import Experience, PromptExample

CHARACTERS = ["<pad>", "<eos>", *"0123456789+=abc "]


def qwen2(**changes: object) -> Qwen2Config:
    sizes = {
        "vocab_size": len(CHARACTERS),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
    }
    return Qwen2Config(**sizes | changes)


def llama(**changes: object) -> LlamaConfig:
    return LlamaConfig(**qwen2().to_dict() | {"tie_word_embeddings": False} | changes)


def gpt2(**changes: object) -> GPT2Config:
    sizes = {"vocab_size": len(CHARACTERS), "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    return GPT2Config(**sizes | {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None} | changes)


def tokenizer() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel({character: i for i, character in enumerate(CHARACTERS)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", clean_up_tokenization_spaces=False
    )


def random_model(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    return _scaled_up(AutoModelForCausalLM.from_config(config, dtype=torch.float32))


def random_classifier(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A reward model: one label."""
    torch.manual_seed(seed)
    config.num_labels = 1
    return _scaled_up(AutoModelForSequenceClassification.from_config(config, dtype=torch.float32))


def _scaled_up(model: PreTrainedModel) -> PreTrainedModel:
    """With matrices so large that attention is not near uniform and mistakes show."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)
    return model.eval()


def save_model(folder: Path, config: PretrainedConfig | None = None, seed: int = 0) -> str:
    """A Hugging Face folder with model and tokenizer; returns its path."""
    random_model(config or qwen2(), seed).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def save_classifier(folder: Path, config: PretrainedConfig | None = None, seed: int = 0) -> str:
    """A folder with reward model and tokenizer; returns its path."""
    random_classifier(config or qwen2(), seed).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def sample(
    prompt_ids: list[int], response_ids: list[int], group: int = 0, index: int = 0, **fields: object
) -> Experience:
    ids = torch.tensor(prompt_ids + response_ids)
    defaults: dict[str, object] = {
        "action_mask": torch.ones(len(response_ids), dtype=torch.bool),
        "finish_reason": "stop",
    }
    return Experience(
        group=group,
        index=index,
        example=PromptExample(row=group, prompt="", prompt_ids=prompt_ids),
        response="",
        input_ids=ids,
        position_ids=torch.arange(len(ids)),
        response_start=len(prompt_ids),
        **defaults | fields,
    )


def random_samples(count: int, seed: int = 0, max_prompt: int = 9, max_response: int = 7) -> list[Experience]:
    generator = torch.Generator().manual_seed(seed)

    def ids(most: int) -> list[int]:
        length = int(torch.randint(1, most + 1, (1,), generator=generator))
        return torch.randint(2, len(CHARACTERS), (length,), generator=generator).tolist()

    return [sample(ids(max_prompt), ids(max_response), group=i) for i in range(count)]
