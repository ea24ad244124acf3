"""Models that take media, of real sizes and with random weights, and rows for them."""

import json
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForMultimodalLM,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2_5_VLProcessor,
    Qwen2AudioProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    WhisperFeatureExtractor,
)

from tests import tiny_media
from tests import tiny_media_models as tiny

NUM_TOKENS = 151_646
"""Of the tokenizers; what the models' vocabularies have beyond it stands for nothing, as in the published ones."""
NUM_ROWS = 64
SIDE, SECONDS = 448, 5
"""Pixels of an image's side, which is 256 tokens, and seconds of a sound, which are 125."""

QWEN2_5_VL_3B: dict[str, Any] = tiny.QWEN_IDS | {
    "text_config": {
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 11_008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32_768,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    },
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 2048,
        "patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
    },
    "tie_word_embeddings": True,
}
QWEN2_AUDIO_7B: dict[str, Any] = {
    "text_config": {
        "model_type": "qwen2",
        "vocab_size": 156_032,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 8192,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
    },
    "audio_config": {
        "num_mel_bins": 128,
        "d_model": 1280,
        "encoder_layers": 32,
        "encoder_attention_heads": 20,
        "encoder_ffn_dim": 5120,
        "max_source_positions": 1500,
    },
    "audio_token_index": tiny.IDS["<|AUDIO|>"],
    "tie_word_embeddings": False,
}


def tokenizer() -> PreTrainedTokenizerFast:
    """The tiny models' tokens, and words that only a random model writes."""
    ids = tiny.IDS | {f"w{i}": i for i in range(len(tiny.TOKENS), NUM_TOKENS)}
    core = Tokenizer(models.WordLevel(ids, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tiny.SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", clean_up_tokenization_spaces=False
    )


def qwen2_5_vl_processor() -> Qwen2_5_VLProcessor:
    """With the published limits of pixels."""
    sizes = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
    limits = {"shortest_edge": 56 * 56, "longest_edge": 3584 * 3584}
    images, clips = (kind(**sizes, size=limits) for kind in (Qwen2VLImageProcessor, Qwen2VLVideoProcessor))
    return Qwen2_5_VLProcessor(images, tokenizer(), clips, chat_template=tiny_media.QWEN_TEMPLATE)


def qwen2_audio_processor() -> Qwen2AudioProcessor:
    features = WhisperFeatureExtractor(feature_size=128, sampling_rate=16_000, return_attention_mask=True)
    return Qwen2AudioProcessor(features, tokenizer())


def save(
    folder: Path, family: str, arguments: dict[str, Any], processor: Callable[[], ProcessorMixin], device: str = "cuda"
) -> None:
    torch.manual_seed(0)
    with torch.device(device):
        config = AutoConfig.for_model(family, **arguments)
        model = AutoModelForMultimodalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    processor().save_pretrained(folder)


def save_images(folder: Path) -> None:
    """Noise."""
    rows = []
    for i in range(NUM_ROWS):
        pixels = np.random.default_rng(i).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
        rows.append({"input": f"<image>what is {i}?", "label": "", "images": [f"{i}.png"]})
    _save_rows(folder, rows)


def save_sounds(folder: Path) -> None:
    """Noise."""
    rows = []
    for i in range(NUM_ROWS):
        samples = np.random.default_rng(i).integers(-8000, 8000, SECONDS * 16_000).astype("<i2")
        with wave.open(str(folder / f"{i}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(16_000)
            file.writeframes(samples.tobytes())
        rows.append({"input": f"<audio>what is {i}?", "label": "", "audios": [f"{i}.wav"]})
    _save_rows(folder, rows)


def _save_rows(folder: Path, rows: list[dict[str, Any]]) -> None:
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text("def is_odd(response):\n    return float(len(response) % 2)\n")
