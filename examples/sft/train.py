"""Fine-tunes a causal language model on written answers (SFT) with transformers' Trainer: a folder in, a folder out.

Prompts are made by the code that reinforcement learning makes them with, so both see the same tokens; an answer is
tokenised alone, as an engine would have sampled it, and ends in the tokenizer's end token. Only its tokens are learned.
"""

import math
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForSeq2Seq,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
)
from transformers.utils.logging import disable_progress_bar

from lightrft.config import DataConfig, usage_errors
from lightrft.datasets.prompts import load_prompts
from lightrft.models.loading import context_length, load_config, load_generation_config, load_tokenizer
from lightrft.models.weights import persistent_tensors, sent_dtype
from lightrft.strategy.utils.checkpoint import HFFiles, export_hf
from lightrft.types import PromptExample
from lightrft.utils.logging import get_logger, setup_logging

logger = get_logger("examples.sft.train")

IGNORED = -100
"""The label of a token that is not learned, as transformers has it."""


@dataclass(frozen=True)
class SFTConfig:
    """Fine-tune a model on prompts with answers."""

    pretrain: str
    """Folder (or hub id) of the causal language model to start from."""
    data: str
    """Prompts with answers: a file, a folder or a hub id, as --prompt_data of reinforcement learning."""
    save_path: Path
    """New folder for the model, its tokenizer and its generation config."""
    split: str = "train"
    """Split of --data, where it is a folder or a hub id."""
    input_key: str = "prompt"
    """Column of the prompt, a text or a list of messages: for the tokenizer's chat template, where there is one."""
    label_key: str = "completion"
    """Column of the answer to learn: a text."""
    system_prompt: str | None = None
    """System message in front of every prompt of a chat template, in the place of the row's own."""
    input_template: str | None = None
    """Text around a plain prompt, which stands for its {}, in the place of a chat template."""
    max_len: int = 1024
    """Tokens of prompt and answer at most; rows with more are left out."""
    max_samples: int | None = None
    """Use only this many rows."""
    num_epochs: int = 3
    """Passes over the rows."""
    max_steps: int | None = None
    """Stop after this many optimizer steps."""
    batch_size: int = 32
    """Rows per optimizer step."""
    micro_batch_size: int = 32
    """Rows per forward; they are of similar length."""
    learning_rate: float = 2e-4
    """Peak rate; it rises over the first 3 % of the steps and falls to 0 along a cosine."""
    gradient_checkpointing: bool = False
    """Recompute each decoder layer in the backward pass instead of keeping its activations."""
    bf16: bool = False
    """Compute in bf16 over fp32 weights, and write the model in bf16."""
    seed: int = 42
    """Seed of the order of the rows."""


def train(config: SFTConfig) -> float:
    """Writes the fine-tuned model, and returns the mean loss per learned token over the run.

    Raises:
        ValueError: The flags, the data or the model are not what they must be.
    """
    check(config)
    tokenizer = load_tokenizer(config.pretrain)
    check_model(config, tokenizer)
    rows = training_rows(config, tokenizer)
    model: Any = AutoModelForCausalLM.from_pretrained(config.pretrain, dtype=torch.float32)
    use_cache = model.config.use_cache
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    with tempfile.TemporaryDirectory() as scratch:
        trainer = Trainer(
            model=model,
            args=training_arguments(config, scratch),
            train_dataset=Dataset.from_list(rows),
            data_collator=DataCollatorForSeq2Seq(padding_tokenizer(config), label_pad_token_id=IGNORED),
        )
        result = trainer.train()
    if not math.isfinite(result.training_loss):
        raise ValueError(
            f"the loss must stay finite: it was {result.training_loss} on average at learning_rate="
            f"{config.learning_rate:g}, and nothing is written. Lower --learning_rate."
        )
    # The trainer turns it off for itself, and whoever loads the model would generate without a cache.
    model.config.use_cache = use_cache
    save(model, tokenizer, config, result.global_step)
    logger.info(
        "%s after %d steps: mean loss %.3f, in %.0f s",
        config.save_path,
        result.global_step,
        result.training_loss,
        result.metrics["train_runtime"],
    )
    return result.training_loss


def check(config: SFTConfig) -> None:
    """Refuses what can be told from the flags alone."""
    output = config.save_path
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"save_path must be a new folder: {output} is there already. Choose another one.")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"save_path must be in a folder that is there or can be made: {output.parent}: {error.strerror}. Choose "
            "another one."
        ) from error
    if (ranks := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        raise ValueError(f"this example trains in one process: WORLD_SIZE={ranks}. Start it with python.")
    if config.input_template is not None and "{}" not in config.input_template:
        raise ValueError(f"input_template must have a {{}} for the prompt: {config.input_template!r}. Add it.")
    sizes = ("max_len", "max_samples", "num_epochs", "max_steps", "batch_size", "micro_batch_size")
    for name in sizes:
        if (value := vars(config)[name]) is not None and value < 1:
            raise ValueError(f"{name} must be at least 1: {name}={value}. Change --{name}.")
    if config.batch_size % config.micro_batch_size:
        raise ValueError(
            f"batch_size must be a multiple of micro_batch_size: {config.batch_size}, {config.micro_batch_size}. "
            "Change one of them."
        )


def check_model(config: SFTConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    context = context_length(load_config(config.pretrain, "padded").hf_config)
    if context is not None and config.max_len > context:
        raise ValueError(f"max_len must be within the model's context: {config.max_len}, {context}. Lower --max_len.")
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer must have an end token, which ends an answer: {config.pretrain} has none.")


def training_rows(config: SFTConfig, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, list[int]]]:
    """`input_ids` and `labels` of each row that fits into `max_len` tokens."""
    data = data_config(config, tokenizer)
    prompts = load_prompts(config.data, config.split, tokenizer, data, config.max_samples)
    answers = [answer_of(prompt, config) for prompt in prompts]
    encoded: Any = tokenizer(answers, add_special_tokens=False, return_attention_mask=False)
    end = [tokenizer.eos_token_id]
    rows = [
        {"input_ids": prompt.prompt_ids + ids + end, "labels": [IGNORED] * len(prompt.prompt_ids) + ids + end}
        for prompt, ids in zip(prompts, encoded["input_ids"], strict=True)
    ]
    fitting = [row for row in rows if len(row["labels"]) <= config.max_len]
    if len(fitting) < len(rows):
        logger.info(
            "%d of %d rows left out: longer than max_len=%d", len(rows) - len(fitting), len(rows), config.max_len
        )
    if not fitting:
        raise ValueError(f"some row must fit into max_len={config.max_len} tokens: none does. Raise --max_len.")
    return fitting


def data_config(config: SFTConfig, tokenizer: PreTrainedTokenizerBase) -> DataConfig:
    """What reinforcement learning has to be given for the same prompts, which is logged."""
    is_chat = tokenizer.chat_template is not None and config.input_template is None
    if config.system_prompt is not None and not is_chat:
        raise ValueError("system_prompt needs a chat template: the prompts are plain. Drop --system_prompt.")
    logger.info(
        "prompts: %s", "the tokenizer's chat template (--apply_chat_template)" if is_chat else "plain, without a chat"
    )
    return DataConfig(
        input_key=config.input_key,
        label_key=config.label_key,
        apply_chat_template=is_chat,
        system_prompt=config.system_prompt,
        input_template=config.input_template,
        prompt_max_len=config.max_len,
    )


def answer_of(prompt: PromptExample, config: SFTConfig) -> str:
    if not isinstance(prompt.label, str) or not prompt.label:
        raise ValueError(
            f"{config.data}, row {prompt.row}: {config.label_key!r} must be a text that is not empty: got "
            f"{prompt.label!r}. Change the row, or --label_key."
        )
    return prompt.label


def padding_tokenizer(config: SFTConfig) -> PreTrainedTokenizerBase:
    """One for batches alone: what pads is masked, so any token will do where the model's tokenizer names none."""
    tokenizer = load_tokenizer(config.pretrain)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def training_arguments(config: SFTConfig, scratch: str) -> TrainingArguments:
    return TrainingArguments(
        output_dir=scratch,
        save_strategy="no",
        report_to=[],
        num_train_epochs=config.num_epochs,
        max_steps=-1 if config.max_steps is None else config.max_steps,
        per_device_train_batch_size=config.micro_batch_size,
        gradient_accumulation_steps=config.batch_size // config.micro_batch_size,
        learning_rate=config.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=0.03,
        weight_decay=0.0,
        train_sampling_strategy="group_by_length",
        bf16=config.bf16,
        use_cpu=not torch.cuda.is_available(),
        seed=config.seed,
        logging_steps=10,
        logging_nan_inf_filter=False,
        disable_tqdm=not sys.stderr.isatty(),
    )


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: SFTConfig, num_steps: int) -> None:
    dtype = torch.bfloat16 if config.bf16 else torch.float32
    weights = {name: t.detach().to("cpu", sent_dtype(t, dtype)) for name, t in persistent_tensors(model)}
    # The model's own settings, which follow, may contradict each other; transformers would refuse to write them.
    model.generation_config = GenerationConfig()
    files = HFFiles(tokenizer, load_generation_config(config.pretrain), model_card(config, num_steps))
    export_hf(model, weights.items(), dtype, files, config.save_path)


def model_card(config: SFTConfig, num_steps: int) -> str:
    return f"""# {config.save_path.name}

`{config.pretrain}` after {num_steps} steps of supervised fine-tuning on `{config.data}`.
"""


def main() -> None:
    setup_logging()
    disable_progress_bar()
    # Where DeepSpeed is installed, accelerate imports it; untold, it guesses aloud.
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    config = tyro.cli(SFTConfig, use_underscores=True)
    with usage_errors():
        train(config)


if __name__ == "__main__":
    main()
