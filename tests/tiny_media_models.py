"""Tiny random models of the real classes that take media, and samples for them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForMultimodalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from lightrft.models.multimodal import position_ids
from lightrft.types import Experience
from tests import tiny_models

SPECIAL_TOKENS = [
    *("<|im_start|>", "<|im_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
    *("<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
    *("<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"),
]
TOKENS = ["<pad>", "<eos>", "\n", *map(chr, range(ord(" "), ord("~") + 1)), *SPECIAL_TOKENS]
IDS = {token: i for i, token in enumerate(TOKENS)}
NUM_UNUSED = 4
"""Ids of the models' vocabularies that no token has."""
TEXT = {
    "vocab_size": len(TOKENS) + NUM_UNUSED,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
QWEN_IDS = {
    "image_token_id": IDS["<|image_pad|>"],
    "video_token_id": IDS["<|video_pad|>"],
    "vision_start_token_id": IDS["<|vision_start|>"],
    "vision_end_token_id": IDS["<|vision_end|>"],
}
_PATCHES = {"patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2, "in_channels": 3, "num_heads": 2}
CONFIGS = {
    "qwen2_vl": QWEN_IDS
    | {
        "text_config": TEXT | {"rope_parameters": MROPE},
        "vision_config": _PATCHES | {"depth": 2, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
        "tie_word_embeddings": True,
    },
    "qwen2_5_vl": QWEN_IDS
    | {
        "text_config": TEXT | {"rope_parameters": MROPE},
        "vision_config": _PATCHES
        | {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "out_hidden_size": 64,
            "window_size": 16,
            "fullatt_block_indexes": [1],
            "tokens_per_second": 2,
        },
        "tie_word_embeddings": True,
    },
    "qwen3_vl": QWEN_IDS
    | {
        "text_config": TEXT | {"rope_parameters": MROPE | {"mrope_interleaved": True}, "head_dim": 16},
        "vision_config": _PATCHES
        | {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "out_hidden_size": 64,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
        "tie_word_embeddings": False,
    },
    "internvl": {
        "text_config": TEXT | {"model_type": "qwen2"},
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": [16, 16],
            "patch_size": [4, 4],
            "use_qk_norm": False,
            "layer_scale_init_value": 1.0,
            "initializer_range": 0.1,
        },
        "image_token_id": IDS["<IMG_CONTEXT>"],
        "image_seq_length": 4,
        "downsample_ratio": 0.5,
        "tie_word_embeddings": False,
    },
    "qwen2_audio": {
        "text_config": TEXT | {"model_type": "qwen2"},
        "audio_config": {
            "num_mel_bins": 16,
            "d_model": 32,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 48,
            "max_source_positions": 50,
        },
        "audio_token_index": IDS["<|AUDIO|>"],
        "tie_word_embeddings": False,
    },
}
"""Arguments of each family's configuration. Qwen2-Audio hears one second instead of 30."""


def config(family: str) -> PretrainedConfig:
    return AutoConfig.for_model(family, **CONFIGS[family])


def tokenizer() -> PreTrainedTokenizerFast:
    """Characters, and the special tokens of all families."""
    core = Tokenizer(models.WordLevel(IDS, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", clean_up_tokenization_spaces=False
    )


def random_model(family: str, seed: int = 0) -> PreTrainedModel:
    """With matrices so large that attention is not near uniform and mistakes show."""
    torch.manual_seed(seed)
    model = AutoModelForMultimodalLM.from_config(config(family), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(3)
    return model.eval()


def save_model(folder: Path, family: str, seed: int = 0) -> str:
    """A folder with model and tokenizer; returns its path."""
    random_model(family, seed).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


# Samples, as a processor makes them

Piece = tuple[list[int], dict[str, Tensor]]
"""Ids of an item in a prompt, and its item inputs."""


def item(family: str, kind: str, seed: int, sizes: Sequence[int] = (4, 4)) -> Piece:
    """A random image, clip or sound.

    Args:
        sizes: Height and width in patches, for a clip with frames in front; frames of a sound.
    """
    generator = torch.Generator().manual_seed(seed)
    if family == "internvl":
        ids = [IDS["<img>"], *[IDS["<IMG_CONTEXT>"]] * 4, IDS["</img>"]]
        return ids, {"pixel_values": torch.randn(1, 3, 16, 16, generator=generator)}
    if family == "qwen2_audio":
        num_frames = 10 * sizes[0]
        num_tokens = ((num_frames - 1) // 2 + 1 - 2) // 2 + 1
        ids = [IDS["<|audio_bos|>"], *[IDS["<|AUDIO|>"]] * num_tokens, IDS["<|audio_eos|>"]]
        features = torch.randn(1, 16, 100, generator=generator)
        return ids, {
            "input_features": features,
            "feature_attention_mask": (torch.arange(100) < num_frames).long()[None],
        }
    frames, height, width = (1, *sizes) if kind == "image" else sizes
    patches = torch.randn(frames * height * width, 3 * 2 * 4 * 4, generator=generator)
    grid = torch.tensor([[frames, height, width]])
    start, end, num_tokens = IDS["<|vision_start|>"], IDS["<|vision_end|>"], height * width // 4
    if kind == "image":
        return [start, *[IDS["<|image_pad|>"]] * num_tokens, end], {"pixel_values": patches, "image_grid_thw": grid}
    inputs = {"pixel_values_videos": patches, "video_grid_thw": grid}
    frame = [IDS["<|video_pad|>"]] * num_tokens
    if family == "qwen3_vl":
        return [i for n in range(frames) for i in (IDS[str(n)], start, *frame, end)], inputs
    if family == "qwen2_5_vl":
        inputs["second_per_grid_ts"] = torch.tensor([1.0])
    return [start, *frame * frames, end], inputs


def sample(
    family: str, items: Sequence[Piece], response: str = "red", group: int = 0, prompt: str = "what is it?"
) -> Experience:
    """The items, each with a character in front, and the prompt behind them."""
    ids: list[int] = []
    for number, (piece, _) in enumerate(items):
        ids += [IDS[str(number)], *piece]
    ids += [IDS[character] for character in prompt]
    names = {name for _, inputs in items for name in inputs}
    item_inputs = {name: torch.cat([inputs[name] for _, inputs in items if name in inputs]) for name in names}
    made = tiny_models.sample(ids, [IDS[character] for character in response], group=group, item_inputs=item_inputs)
    is_qwen_vl = family in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
    return replace(
        made,
        position_ids=position_ids(config(family), made.input_ids, item_inputs),
        token_inputs={"mm_token_type_ids": token_types(made.input_ids)} if is_qwen_vl else {},
    )


def token_types(input_ids: Tensor) -> Tensor:
    """What Qwen-VL's processors call `mm_token_type_ids`."""
    return (input_ids == IDS["<|image_pad|>"]).long() + 2 * (input_ids == IDS["<|video_pad|>"]).long()
