"""Tiny processors of real classes, by family, for the models of `tiny_media_models`: no download."""

from collections.abc import Callable
from pathlib import Path

from transformers import (
    GotOcr2ImageProcessor,
    InternVLProcessor,
    InternVLVideoProcessor,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2_5_VLProcessor,
    Qwen2AudioProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
    WhisperFeatureExtractor,
)

from tests import tiny_media_models

PATCH_SIZE, MERGE_SIZE, TEMPORAL_PATCH_SIZE = 4, 2, 2
"""Of the Qwen-VL families: an image token stands for 8 x 8 pixels, and in clips for two frames of them."""
MIN_PIXELS, MAX_PIXELS = 4 * 64, 64 * 64
"""Of an image, or of a frame: 4 to 64 tokens."""
TILE_SIZE, TILE_TOKENS = 16, 4
"""Of InternVL, whose images are cut into tiles: pixels of a side, and tokens."""
SAMPLING_RATE, MEL_BINS, SOUND_SECONDS = 16_000, 16, 1
"""Of Qwen2-Audio: a hundred frames of features, 25 tokens, a second."""

_CHAT_TEMPLATE = """{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\n' }}
{%- if message['content'] is string -%}
{{ message['content'] }}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}
{{ 'IMAGE' }}
{%- elif part['type'] == 'video' -%}
{{ 'VIDEO' }}
{%- elif part['type'] == 'text' -%}
{{ part['text'] }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{ '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\n' }}
{%- endif -%}"""


def chat_template(image: str, video: str) -> str:
    """A template in the manner of the families' own, with what stands for an item in the text."""
    return _CHAT_TEMPLATE.replace("IMAGE", image).replace("VIDEO", video)


QWEN_TEMPLATE = chat_template(
    "<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>"
)
INTERN_TEMPLATE = chat_template(r"<IMG_CONTEXT>\n", r"<video>\n")
INTERN_TOKENS = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
"""What InternVL's processor asks its tokenizer for."""


def tokenizer(**attributes: str) -> PreTrainedTokenizerFast:
    """That of the models, with names for some of its tokens."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tiny_media_models.tokenizer().backend_tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        extra_special_tokens=attributes,
        clean_up_tokenization_spaces=False,
    )


def image_processor() -> Qwen2VLImageProcessor:
    return Qwen2VLImageProcessor(
        patch_size=PATCH_SIZE,
        merge_size=MERGE_SIZE,
        temporal_patch_size=TEMPORAL_PATCH_SIZE,
        size={"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS},
    )


def video_processor() -> Qwen2VLVideoProcessor:
    return Qwen2VLVideoProcessor(
        patch_size=PATCH_SIZE,
        merge_size=MERGE_SIZE,
        temporal_patch_size=TEMPORAL_PATCH_SIZE,
        size={"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS},
    )


def qwen2_vl() -> Qwen2VLProcessor:
    return Qwen2VLProcessor(image_processor(), tokenizer(), video_processor(), chat_template=QWEN_TEMPLATE)


def qwen2_5_vl() -> Qwen2_5_VLProcessor:
    return Qwen2_5_VLProcessor(image_processor(), tokenizer(), video_processor(), chat_template=QWEN_TEMPLATE)


def qwen3_vl() -> Qwen3VLProcessor:
    """Its limits on clips are of all frames together."""
    clips = Qwen3VLVideoProcessor(
        patch_size=PATCH_SIZE,
        merge_size=MERGE_SIZE,
        temporal_patch_size=TEMPORAL_PATCH_SIZE,
        size={"shortest_edge": MIN_PIXELS, "longest_edge": 4 * MAX_PIXELS},
    )
    return Qwen3VLProcessor(image_processor(), tokenizer(), clips, chat_template=QWEN_TEMPLATE)


def internvl() -> InternVLProcessor:
    tile = {"height": TILE_SIZE, "width": TILE_SIZE}
    return InternVLProcessor(
        GotOcr2ImageProcessor(size=tile, crop_to_patches=True, min_patches=1, max_patches=4),
        tokenizer(**INTERN_TOKENS),
        InternVLVideoProcessor(size=tile),
        image_seq_length=TILE_TOKENS,
        chat_template=INTERN_TEMPLATE,
    )


def qwen2_audio(seconds: int = SOUND_SECONDS) -> Qwen2AudioProcessor:
    """With the class's own chat template."""
    features = WhisperFeatureExtractor(
        feature_size=MEL_BINS, sampling_rate=SAMPLING_RATE, chunk_length=seconds, return_attention_mask=True
    )
    return Qwen2AudioProcessor(features, tokenizer())


PROCESSORS: dict[str, Callable[[], ProcessorMixin]] = {
    "qwen2_vl": qwen2_vl,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_vl": qwen3_vl,
    "internvl": internvl,
    "qwen2_audio": qwen2_audio,
}
"""By the model type of the configuration."""


def save_processor(folder: Path, family: str) -> str:
    """A folder with the configuration and the processor of a model, without weights; returns its path."""
    tiny_media_models.config(family).save_pretrained(folder)
    PROCESSORS[family]().save_pretrained(folder)
    return str(folder)


def save_model(folder: Path, family: str, seed: int = 0) -> str:
    """A folder with model and processor; returns its path."""
    tiny_media_models.random_model(family, seed).save_pretrained(folder)
    PROCESSORS[family]().save_pretrained(folder)
    return str(folder)
