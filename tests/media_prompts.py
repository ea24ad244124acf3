"""Prompts with media as a run has them: files that the tiny processors of real classes make inputs of."""

from collections.abc import Mapping
from pathlib import Path

import torch

from lightrft.datasets.media_inputs import MediaProcessor, MediaRequest
from lightrft.datasets.media_sizes import MediaLimits
from lightrft.types import PromptExample
from tests.datasets.media_samples import image, save_tone, save_video

_QWEN_PLACES = {"image": "<|vision_start|><|image_pad|><|vision_end|>"}
_QWEN_PLACES["video"] = _QWEN_PLACES["image"].replace("image", "video")
PLACES: dict[str, dict[str, str]] = {
    "qwen2_vl": _QWEN_PLACES,
    "qwen2_5_vl": _QWEN_PLACES,
    "qwen3_vl": _QWEN_PLACES,
    "internvl": {"image": "<IMG_CONTEXT>", "video": "<video>"},
    "qwen2_audio": {"audio": "<|audio_bos|><|AUDIO|><|audio_eos|>"},
}
"""What stands for an item in the text of each family."""
VISUAL = ["image what?", "what?", "image image is it image ?", "video ?", "image and video then image :"]
AUDIBLE = ["audio what?", "what?", "audio audio is it audio ?"]


def media_prompts(folder: Path, family: str) -> list[PromptExample]:
    """One prompt of text alone, and with 1, 3 and mixed items; no two items are alike.

    Clips have 8 frames of 20 thirds of a second, 5 / 3 s a piece of two: Qwen2.5-VL's fourth is at 9 or at 10,
    according to how that is rounded.

    Args:
        folder: The model's, with its processor; files are made in it.
    """
    make = MediaProcessor.load(str(folder), MediaLimits(video_fps=1.2))
    prompts = []
    for row, words in enumerate(AUDIBLE if family == "qwen2_audio" else VISUAL):
        text, media = words, {}
        for kind, place in PLACES[family].items():
            count = words.count(kind)
            text = text.replace(kind, place)
            if count:
                media[kind] = [_item(folder, kind, 10 * row + number) for number in range(count)]
        prompts.append(_prompt(make, row, text, media))
    return prompts


def _item(folder: Path, kind: str, number: int) -> str:
    path = folder / f"{kind}-{number}"
    if kind == "image":
        path = path.with_suffix(".png")
        image(16 + 8 * (number % 3), 24, seed=number).save(path)
    elif kind == "video":
        levels = [(40 * step + 7 * number) % 256 for step in range(20)]
        save_video(path := path.with_suffix(".mp4"), levels, rate=3, height=16, width=24)
    else:
        save_tone(path := path.with_suffix(".wav"), seconds=0.3 + 0.02 * number, hertz=200.0 + 50 * number)
    return str(path)


def _prompt(make: MediaProcessor, row: int, text: str, media: Mapping[str, list[str]]) -> PromptExample:
    inputs = make(MediaRequest(text, media))
    return PromptExample(
        row=row,
        prompt=text,
        prompt_ids=inputs.prompt_ids,
        media=media,
        token_inputs={name: torch.tensor(array) for name, array in inputs.token_inputs.items()},
        item_inputs={name: torch.tensor(array) for name, array in inputs.item_inputs.items()},
    )
