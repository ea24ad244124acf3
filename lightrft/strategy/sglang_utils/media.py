"""Media: a prompt's model inputs, on their way to SGLang, in the form in which it takes what a processor made."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig

from lightrft.models.multimodal import family_of, position_ids
from lightrft.strategy.sglang_utils.mapped_file import MediaFile, StoredTensor, TensorPlace
from lightrft.types import PromptExample

KINDS: Mapping[str, tuple[str, ...]] = {
    "image": ("pixel_values", "image_grid_thw"),
    "video": ("pixel_values_videos", "video_grid_thw"),
    "audio": ("input_features", "feature_attention_mask"),
}
"""Model inputs by kind of media; the first is what the tower reads. Clips' seconds are in the positions."""
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen2_audio")
"""`model_type` of the models with a tower that SGLang 0.5.16 has of its own."""
QWEN2_5_VL_PATCH = 1176
"""Numbers of a patch, 14 x 14 pixels of two frames: SGLang takes images in patches of other sizes for embeddings."""


@dataclass(frozen=True)
class PackedTensor:
    """A tensor by its bytes: a pipe would pass torch's own as a file descriptor."""

    values: np.ndarray
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "PackedTensor":
        return cls(tensor.contiguous().view(torch.uint8).numpy(), tensor.dtype)

    def tensor(self) -> Tensor:
        return torch.from_numpy(self.values).view(self.dtype)


@dataclass(frozen=True)
class EngineInput:
    """A prompt as the host's process gets it: with as many placeholders for an item as it has pieces."""

    ids: Sequence[int]
    media: Mapping[str, Mapping[str, Any]]
    """By kind."""


class EngineInputs:
    """Makes of prompts what the host's process gets."""

    def __init__(self, config: PretrainedConfig, dtype: torch.dtype) -> None:
        """`config` is the model's, `dtype` the engine's, which casts to it what its tower reads."""
        self._config = config
        self._dtype = dtype
        self._numbers = itertools.count(1)

    def __call__(self, prompt: PromptExample, file: MediaFile) -> EngineInput:
        """The very inputs that the Actor gets, with its positions: SGLang's own processing and positions are left out.

        Raises:
            RuntimeError: The file's disk is full.
            ValueError: The prompt has more or fewer placeholders than its media have pieces; the message has the row.
        """
        if not prompt.item_inputs:
            return EngineInput(prompt.prompt_ids, {})
        check_pieces(self._config, prompt)
        common = {"format": "processor_output"} | self._positions(prompt)
        media = {}
        for kind, names in KINDS.items():
            tensors = {name: prompt.item_inputs[name] for name in names if name in prompt.item_inputs}
            if not tensors:
                continue
            if kind == "video" and self._config.model_type == "qwen2_5_vl":
                tensors["video_grid_thw"] = frame_by_frame(tensors["video_grid_thw"])
            stored = file.add(tensors.pop(names[0]).to(self._dtype))
            packed = {name: PackedTensor.of(tensor) for name, tensor in tensors.items()}
            # SGLang tells items apart by 30 bits of this number. Two hashes would be alike there some day.
            media[kind] = common | packed | {names[0]: stored, "hash": next(self._numbers)}
        return EngineInput(prompt.prompt_ids, media)

    def _positions(self, prompt: PromptExample) -> dict[str, Any]:
        positions = position_ids(self._config, torch.tensor(prompt.prompt_ids), prompt.item_inputs)
        if positions.ndim == 1:
            return {}
        axes = positions[1:]
        # By how much positions of a response are ahead of its places.
        delta = int(axes.max()) + 1 - len(prompt.prompt_ids)
        return {"mrope_positions": PackedTensor.of(axes), "mrope_position_delta": delta}


def check_pieces(config: PretrainedConfig, prompt: PromptExample) -> None:
    """Raises ValueError where SGLang's scheduler would fail, or cut media to the prompt's placeholders."""
    inputs = prompt.item_inputs
    for kind, name in family_of(config).placeholders.items():
        num_pieces = 0
        if f"{kind}_grid_thw" in inputs:
            num_pieces = int(inputs[f"{kind}_grid_thw"].prod(-1).sum()) // config.vision_config.spatial_merge_size**2
        if kind == "audio":
            num_pieces = int(num_sound_tokens(inputs["feature_attention_mask"]).sum())
        num_places = prompt.prompt_ids.count(getattr(config, name))
        if num_places != num_pieces:
            raise ValueError(
                f"row {prompt.row}: a prompt must have a placeholder for each piece of its media: it has "
                f"{len(prompt.prompt_ids)} tokens, {num_places} of them of {kind}, and with its {num_pieces} pieces it "
                f"would have {len(prompt.prompt_ids) - num_places + num_pieces} tokens."
            )


def num_sound_tokens(masks: Tensor) -> Tensor:
    """Tokens of each sound, `(sounds,)`, from masks of its frames, `(sounds, frames)`."""
    return (num_sound_frames(masks) - 2) // 2 + 1


def num_sound_frames(masks: Tensor) -> Tensor:
    """Frames that the tower's convolutions leave, which its layers attend to; a pooling halves them again."""
    return (masks.sum(-1) - 1) // 2 + 1


def frame_by_frame(grid: Tensor) -> Tensor:
    """The grids of clips as those of their frames, `(frames, 3)`.

    In the tower of Qwen2.5-VL a frame attends to itself alone. SGLang's 0.5.16 has it attend to all its item's frames.
    """
    return torch.cat([torch.tensor([[1, height, width]]).repeat(frames, 1) for frames, height, width in grid.tolist()])


def processor_output(media: Mapping[str, Any]) -> dict[str, Any]:
    """What `sglang.Engine.generate` takes of one kind, of `EngineInput.media`.

    All items of the kind stay one, with its number: SGLang does not cut up what is no tensor. Otherwise it would give
    each a hash of its pixels, for each sample, and without their height and width.
    """
    return {name: _unpacked(value) for name, value in media.items()}


def _unpacked(value: Any) -> Any:
    match value:
        case PackedTensor():
            return value.tensor()
        case StoredTensor():
            return TensorPlace(value)
        case _:
            return value
