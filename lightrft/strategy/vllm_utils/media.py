"""Media: the images, clips and sounds of a prompt in the form in which vLLM's models take them.

vLLM gets the ids and tensors that the Actor gets. Its own processors would make all of it a second time, and not the
same: up to 0.26 they lose the times of Qwen2.5-VL's clips, and InternVL's clips get other ids.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import PretrainedConfig

from lightrft.models.multimodal import family_of
from lightrft.strategy.vllm_utils.library import argument_names, media_input, text_input
from lightrft.types import PromptExample


@dataclasses.dataclass(frozen=True)
class Items:
    """The items in a prompt that vLLM's model takes under one name."""

    modality: str
    placeholder: int
    """The id that stands for a piece of them."""
    num_tokens: Sequence[int]
    """Pieces that the model makes of each."""
    starts_before: int = 0
    """Tokens in front of an item's first piece at which vLLM begins to look for it."""
    inputs: Mapping[str, Tensor] | None = None
    """What the model takes of them, where that is not what the Actor takes."""


ItemsOf: TypeAlias = Callable[[PretrainedConfig, Mapping[str, Tensor]], list[Items]]
"""The items of a prompt, from its item inputs."""


def _qwen_vl_items(config: PretrainedConfig, inputs: Mapping[str, Tensor]) -> list[Items]:
    merged = config.vision_config.spatial_merge_size**2
    kinds = {"image": config.image_token_id, "video": config.video_token_id}
    return [
        Items(kind, placeholder, (inputs[f"{kind}_grid_thw"].prod(-1) // merged).tolist())
        for kind, placeholder in kinds.items()
        if f"{kind}_grid_thw" in inputs
    ]


def _qwen3_vl_items(config: PretrainedConfig, inputs: Mapping[str, Tensor]) -> list[Items]:
    """vLLM counts a clip's frames by the mark in front of each."""
    groups = _qwen_vl_items(config, inputs)
    return [dataclasses.replace(items, starts_before=int(items.modality == "video")) for items in groups]


def _internvl_items(config: PretrainedConfig, inputs: Mapping[str, Tensor]) -> list[Items]:
    """Each tile of an image, or frame of a clip, is an image of its own: the Actor's inputs do not say whose it is."""
    tiles = inputs["pixel_values"]
    named = {
        "pixel_values": tiles,
        "image_num_patches": torch.ones(len(tiles), dtype=torch.long),
        "image_token_id": torch.tensor(config.image_token_id),
    }
    return [Items("image", config.image_token_id, [config.image_seq_length] * len(tiles), inputs=named)]


def _qwen2_audio_items(config: PretrainedConfig, inputs: Mapping[str, Tensor]) -> list[Items]:
    """A convolution and a pooling, each with stride 2, make a fourth of the frames."""
    num_frames = inputs["feature_attention_mask"].sum(-1)
    num_tokens = ((num_frames - 1) // 2 + 1 - 2) // 2 + 1
    return [Items("audio", config.audio_token_id, num_tokens.tolist())]


ITEMS: dict[str, ItemsOf] = {
    "qwen2_vl": _qwen_vl_items,
    "qwen2_5_vl": _qwen_vl_items,
    "qwen3_vl": _qwen3_vl_items,
    "internvl": _internvl_items,
    "qwen2_audio": _qwen2_audio_items,
}
"""By `model_type`: the families that this adapter knows in vLLM."""
_EXACT = ("second_per_grid_ts",)
"""Inputs that stay as they are: positions are made of these times."""
_MIN_BATCHED_TOKENS = 8192


def media_arguments(max_model_len: int) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for a model that takes media, which come processed."""
    arguments = {
        # An item of the longest prompt must fit into one step.
        "max_num_batched_tokens": max(_MIN_BATCHED_TOKENS, max_model_len),
        "mm_processor_cache_gb": 0,
    }
    # Newer versions would take pixels for raw ones, and normalise them once more.
    if "mm_device_do_normalize" in argument_names():
        arguments["mm_device_do_normalize"] = False
    return arguments


class EngineInputs:
    """Makes of prompts what vLLM's engine takes, behind the place where it would process media itself."""

    def __init__(self, config: PretrainedConfig, dtype: torch.dtype, processor: Any) -> None:
        """`processor` is vLLM's of the model, which names the fields that its tensors go to; None for a text model."""
        self._config = config
        self._dtype = dtype
        self._processor = processor
        self.num_prompts = 0

    def __call__(self, prompt: PromptExample) -> dict[str, Any]:
        """A `vllm.inputs.engine.EngineInput`, for any number of responses.

        Raises:
            ValueError: The model makes another number of pieces of the prompt's media than the prompt has; the message
                has the row.
        """
        if not prompt.item_inputs:
            return text_input(prompt.prompt_ids)
        groups = items_of(self._config, prompt)
        inputs = dict(prompt.item_inputs)
        for items in groups:
            inputs |= items.inputs or {}
        self.num_prompts += 1
        # New names each time: weights may have changed in between.
        names = {
            items.modality: [f"{self.num_prompts}-{items.modality}-{i}" for i in range(len(items.num_tokens))]
            for items in groups
        }
        return media_input(
            prompt.prompt_ids,
            {name: self._cast(name, value) for name, value in inputs.items()},
            names,
            {items.modality: ranges_of(items, prompt) for items in groups},
            self._processor,
        )

    def _cast(self, name: str, value: Tensor) -> Tensor:
        """In the model's dtype."""
        return value.to(self._dtype) if value.is_floating_point() and name not in _EXACT else value


def items_of(config: PretrainedConfig, prompt: PromptExample) -> list[Items]:
    """The prompt's items, whose pieces are as many as its placeholders.

    Raises:
        ValueError: They are not; the message has the row.
    """
    groups = ITEMS[config.model_type](config, prompt.item_inputs)
    wanted = {placeholder: 0 for placeholder in _placeholders(config)}
    for items in groups:
        wanted[items.placeholder] += sum(items.num_tokens)
    num_others = sum(token not in wanted for token in prompt.prompt_ids)
    if any(prompt.prompt_ids.count(placeholder) != count for placeholder, count in wanted.items()):
        raise ValueError(
            f"row {prompt.row}: the prompt must have as many placeholders as vLLM makes pieces of its media: it has "
            f"{len(prompt.prompt_ids)} tokens, and vLLM makes {num_others + sum(wanted.values())} of them. Check "
            "that the processor's files in the model's folder are those of the model."
        )
    return groups


def _placeholders(config: PretrainedConfig) -> set[int]:
    return {getattr(config, name) for name in family_of(config).placeholders.values()}


def ranges_of(items: Items, prompt: PromptExample) -> list[tuple[int, Tensor]]:
    """Of each item, where it starts in the prompt, and which of the tokens from there on are pieces of it."""
    places = [i for i, token in enumerate(prompt.prompt_ids) if token == items.placeholder]
    ranges = []
    for count in items.num_tokens:
        own, places = places[:count], places[count:]
        start = own[0] - items.starts_before
        mask = torch.zeros(own[-1] + 1 - start, dtype=torch.bool)
        mask[torch.tensor(own) - start] = True
        ranges.append((start, mask))
    return ranges
