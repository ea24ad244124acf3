"""Pupils: tiny random models of real classes that see or hear, with the tokenizer and processor they need."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForMultimodalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2_5_VLProcessor,
    Qwen2AudioProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    WhisperFeatureExtractor,
)

FAMILIES = {"image": "qwen2_5_vl", "audio": "qwen2_audio"}
"""The model type that takes a kind of media."""
PAD, EOS = "<pad>", "<eos>"
MARKS = {
    "image": ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>"),
    "audio": ("<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"),
}
"""What stands around an item in the prompt, and for its pieces."""
VIDEO_MARK = "<|video_pad|>"
SPECIAL = [PAD, EOS, *MARKS["image"], *MARKS["audio"], VIDEO_MARK]
WORD = r"\\?[A-Za-z]+\{?| [A-Za-z]+|[\s\S]"
"""A token: a word with the space before it, `\\boxed{`, or one character."""
TURN = " Answer:"
TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}{{ 'MARK' }}{% endif %}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}{{ 'TURN' }}{% endif %}"
)
HIDDEN, LAYERS, HEADS = 96, 2, 4
TOWER_HIDDEN, TOWER_LAYERS = 64, 1
GAIN = 3.0
"""Of the first matrices, against transformers' own, with which attention stays near uniform for long."""
PIECES = 4
"""Of a picture along a side: each is one token, made of 2 x 2 patches."""
SOUND_SECONDS, MEL_BINS = 2, 32


def words_of(texts: Iterable[str]) -> list[str]:
    return sorted({word for text in texts for word in re.findall(WORD, text)})


def build_tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """One token a word, and no others than these."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *words])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(WORD), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, eos_token=EOS, clean_up_tokenization_spaces=False
    )


def build_processor(kind: str, tokenizer: PreTrainedTokenizerFast, side: int) -> ProcessorMixin:
    """The processor of the family.

    Args:
        side: Of the pictures, in pixels; sounds have none.
    """
    template = TEMPLATE.replace("MARK", "".join(MARKS[kind])).replace("TURN", TURN)
    if kind == "audio":
        features = WhisperFeatureExtractor(
            feature_size=MEL_BINS, chunk_length=SOUND_SECONDS, return_attention_mask=True
        )
        return Qwen2AudioProcessor(features, tokenizer, chat_template=template)
    sizes: dict[str, Any] = {
        "patch_size": patch_size(side),
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": side * side, "longest_edge": side * side},
        # Paper is 0 and ink is far from it: a model this small does not see ink on a large constant.
        "image_mean": [1.0] * 3,
        "image_std": [0.25] * 3,
    }
    pictures, clips = Qwen2VLImageProcessor(**sizes), Qwen2VLVideoProcessor(**sizes)
    return Qwen2_5_VLProcessor(pictures, tokenizer, clips, chat_template=template)


def patch_size(side: int) -> int:
    """Raises ValueError where the pictures cannot be cut evenly."""
    if side % (2 * PIECES):
        raise ValueError(f"the side of a picture must be a multiple of {2 * PIECES} pixels: got {side}.")
    return side // (2 * PIECES)


def build_model(kind: str, tokenizer: PreTrainedTokenizerFast, side: int, seed: int) -> PreTrainedModel:
    """Random weights, about 0.3 million of them."""
    ids = tokenizer.get_vocab()
    text: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": HIDDEN,
        "intermediate_size": 3 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "max_position_embeddings": 256,
        "pad_token_id": ids[PAD],
        "eos_token_id": ids[EOS],
        "bos_token_id": None,
    }
    torch.manual_seed(seed)
    config = audio_config(text, ids) if kind == "audio" else image_config(text, ids, side)
    model = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(GAIN)
    return model


def image_config(text: dict[str, Any], ids: dict[str, int], side: int) -> Any:
    start, image, end = MARKS["image"]
    # A head has 24 numbers, of which pairs turn by time, height and width.
    positions = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 4, 4]}
    vision = {
        "patch_size": patch_size(side),
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": side,
        "fullatt_block_indexes": [0],
        "depth": TOWER_LAYERS,
        "num_heads": HEADS,
        "hidden_size": TOWER_HIDDEN,
        "intermediate_size": 2 * TOWER_HIDDEN,
        "out_hidden_size": HIDDEN,
    }
    return AutoConfig.for_model(
        FAMILIES["image"],
        text_config=text | {"rope_parameters": positions},
        vision_config=vision,
        image_token_id=ids[image],
        video_token_id=ids[VIDEO_MARK],
        vision_start_token_id=ids[start],
        vision_end_token_id=ids[end],
        tie_word_embeddings=True,
    )


def audio_config(text: dict[str, Any], ids: dict[str, int]) -> Any:
    hearing = {
        "num_mel_bins": MEL_BINS,
        "d_model": TOWER_HIDDEN,
        "encoder_layers": TOWER_LAYERS,
        "encoder_attention_heads": HEADS,
        "encoder_ffn_dim": 2 * TOWER_HIDDEN,
        # 100 frames a second, of which the first layers make half as many.
        "max_source_positions": 50 * SOUND_SECONDS,
    }
    return AutoConfig.for_model(
        FAMILIES["audio"],
        text_config=text | {"model_type": "qwen2"},
        audio_config=hearing,
        audio_token_index=ids[MARKS["audio"][1]],
        tie_word_embeddings=False,
    )
