"""Model families: what a model that sees or hears needs besides its text, by its `model_type`.

Text is the family without media, and nothing else in the package asks which one a model is of.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from lightrft.types import Experience, PromptExample

Positions: TypeAlias = Callable[[PretrainedConfig, Tensor, Mapping[str, Tensor]], Tensor]
"""Of a sample alone, from its ids `(T,)` and its item inputs: `(T,)`, or `(axes, T)` with the arange first."""
Item: TypeAlias = tuple[int, dict[str, Tensor]]
"""How many placeholders an item has in the prompt, and its item inputs."""


@dataclass(frozen=True)
class Family:
    """What the models of a family need so that their samples run as any others do."""

    positions: Positions
    tower: str | None = None
    """The part of the configuration that is of what reads media."""
    has_segments: bool = False
    """Whether the tower attends within segments whose borders it makes."""
    placeholders: Mapping[str, str] = field(default_factory=dict)
    """By kind of media, the configuration's name of the id that stands for a piece of it."""
    marks: tuple[str, ...] = ()
    """Further tokens that only a prompt may have."""
    smallest: Mapping[str, Callable[[PretrainedConfig], Item]] = field(default_factory=dict)
    """By kind of media, the smallest item that the tower takes."""
    published: tuple[tuple[str, str], ...] = ()
    """Beginnings of weights' names in transformers, and in the folders that were published."""


def text_positions(config: PretrainedConfig, input_ids: Tensor, item_inputs: Mapping[str, Tensor]) -> Tensor:
    return torch.arange(len(input_ids))


# Qwen2-VL, Qwen2.5-VL, Qwen3-VL


def mrope_positions(config: PretrainedConfig, input_ids: Tensor, item_inputs: Mapping[str, Tensor]) -> Tensor:
    """`(4, T)`: the place in the sample, and the three axes (time, height, width) of M-RoPE.

    The first row shows transformers where packed samples begin; the others do not, since pieces of an image share
    positions. What follows an item starts behind the highest position in it, as in the papers, vLLM and SGLang;
    transformers leaves the time axis out there, and so differs for a clip with more frames than pieces along a side.

    Source: Qwen2-VL (arXiv 2409.12191), section 2.1; the time axis of Qwen2.5-VL (arXiv 2502.13923), section 2.1.3.
    """
    kinds = {config.image_token_id: "image", config.video_token_id: "video"}
    grids = {"image": _grids(config, item_inputs, "image"), "video": _grids(config, item_inputs, "video")}
    axes = torch.arange(len(input_ids)).repeat(3, 1)
    places = torch.isin(input_ids, torch.tensor(list(kinds))).nonzero()[:, 0].tolist()
    # `shift` is what positions are ahead of places: negative after an image, which has fewer of them than pieces.
    end, shift = 0, 0
    while places:
        place = places[0]
        axes[:, end:place] += shift
        times, height, width = next(grids[kinds[int(input_ids[place])]])
        start, size = place + shift, len(times) * height * width
        pieces = torch.cartesian_prod(torch.tensor(times), torch.arange(height), torch.arange(width)).T
        end = place + size
        axes[:, place:end] = start + pieces
        shift = start + int(pieces.max()) + 1 - end
        places = places[size:]
    axes[:, end:] += shift
    return torch.cat([torch.arange(len(input_ids))[None], axes])


def _grids(
    config: PretrainedConfig, item_inputs: Mapping[str, Tensor], kind: str
) -> Iterator[tuple[list[int], int, int]]:
    """Of each run of placeholders of a kind: positions of its frames, height and width in pieces."""
    vision = config.vision_config
    sizes = item_inputs.get(f"{kind}_grid_thw", torch.empty(0, 3, dtype=torch.long)).tolist()
    seconds = item_inputs.get("second_per_grid_ts", torch.ones(len(sizes)))
    for i, (num_frames, height, width) in enumerate(sizes):
        height, width = height // vision.spatial_merge_size, width // vision.spatial_merge_size
        if kind == "image" or config.model_type == "qwen2_vl":
            yield list(range(num_frames)), height, width
        elif config.model_type == "qwen2_5_vl":
            # In fp64, as vLLM does it: at 0.3 frames a second the fourth piece is at 39 so, and at 40 in fp32.
            interval = vision.tokens_per_second * float(seconds[i])
            yield [int(number * interval) for number in range(num_frames)], height, width
        else:
            # Qwen3-VL writes the time before each frame as text.
            yield from [([0], height, width)] * num_frames


def _smallest_image(config: PretrainedConfig) -> Item:
    patches, grid = _one_piece(config)
    return 1, {"pixel_values": patches, "image_grid_thw": grid}


def _smallest_clip(config: PretrainedConfig) -> Item:
    patches, grid = _one_piece(config)
    return 1, {"pixel_values_videos": patches, "video_grid_thw": grid}


def _one_piece(config: PretrainedConfig) -> tuple[Tensor, Tensor]:
    """Patches and grid of an image that becomes one token."""
    vision = config.vision_config
    side = vision.spatial_merge_size
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return torch.zeros(side**2, values), torch.tensor([[1, side, side]])


_QWEN_VL = Family(
    mrope_positions,
    tower="vision_config",
    has_segments=True,
    placeholders={"image": "image_token_id", "video": "video_token_id"},
    marks=("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    smallest={"image": _smallest_image, "video": _smallest_clip},
)
_QWEN_VL_OLD = Family(
    mrope_positions,
    tower=_QWEN_VL.tower,
    has_segments=_QWEN_VL.has_segments,
    placeholders=_QWEN_VL.placeholders,
    marks=_QWEN_VL.marks,
    smallest=_QWEN_VL.smallest,
    published=(("model.visual.", "visual."), ("model.language_model.", "model.")),
)


# InternVL and Qwen2-Audio


def _smallest_tile(config: PretrainedConfig) -> Item:
    side = round(1 / config.downsample_ratio)
    patch_height, patch_width = config.vision_config.patch_size
    tile = torch.zeros(1, config.vision_config.num_channels, side * patch_height, side * patch_width)
    return 1, {"pixel_values": tile}


def _smallest_sound(config: PretrainedConfig) -> Item:
    audio = config.audio_config
    # The encoder takes all its 30 seconds, however few of them are sound; 8 frames become 2 tokens. One alone would
    # be taken for a prompt whose placeholders are yet to be expanded.
    num_frames = audio.max_source_positions * 2
    mask = (torch.arange(num_frames) < 8).long()[None]
    return 2, {"input_features": torch.zeros(1, audio.num_mel_bins, num_frames), "feature_attention_mask": mask}


_JOINED = (("model.language_model.", "language_model.model."), ("lm_head.", "language_model.lm_head."), ("model.", ""))
"""Names of folders whose language model is a whole causal one beside the tower."""
TEXT = Family(text_positions)
FAMILIES = {
    "qwen2_vl": _QWEN_VL_OLD,
    "qwen2_5_vl": _QWEN_VL_OLD,
    "qwen3_vl": _QWEN_VL,
    "internvl": Family(
        text_positions,
        tower="vision_config",
        # A clip becomes tiles too.
        placeholders={"image": "image_token_id", "video": "image_token_id"},
        marks=("<img>", "</img>", "<video>"),
        smallest={"image": _smallest_tile, "video": _smallest_tile},
        published=_JOINED,
    ),
    "qwen2_audio": Family(
        text_positions,
        tower="audio_config",
        placeholders={"audio": "audio_token_id"},
        marks=("<|audio_bos|>", "<|audio_eos|>"),
        smallest={"audio": _smallest_sound},
        published=_JOINED,
    ),
}
"""By `model_type`."""


def family_of(config: PretrainedConfig) -> Family:
    return FAMILIES.get(config.model_type, TEXT)


def position_ids(config: PretrainedConfig, input_ids: Tensor, item_inputs: Mapping[str, Tensor]) -> Tensor:
    """Positions of a sample, `(T,)` or `(axes, T)`."""
    return family_of(config).positions(config, input_ids, item_inputs)


def suppressed_ids(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids that a response must not have: what stands for media, and what no token has. A text model has none."""
    family = family_of(config)
    if family.tower is None:
        return ()
    vocabulary = tokenizer.get_vocab()
    unused = set(range(config.get_text_config().vocab_size)) - set(vocabulary.values())
    placeholders = {getattr(config, name) for name in family.placeholders.values()}
    marks = {vocabulary[mark] for mark in family.marks if mark in vocabulary}
    return tuple(sorted(unused | placeholders | marks))


def published_name(config: PretrainedConfig, name: str) -> str:
    """The name that a weight of transformers' model has in published folders, which other engines know."""
    for here, there in family_of(config).published:
        if name.startswith(here):
            return there + name.removeprefix(here)
    return name


# Fillers


def fillers(config: PretrainedConfig, kinds: Sequence[str]) -> list[Experience]:
    """A sample of each kind of media, for micro-batches without it: its tower then takes part on every rank."""
    by_inputs = {tuple(filler.item_inputs): filler for filler in (_filler(config, kind) for kind in kinds)}
    return list(by_inputs.values())


def _filler(config: PretrainedConfig, kind: str) -> Experience:
    """The smallest item of a kind and one token after it, which is masked: its gradient is exactly zero."""
    family = family_of(config)
    num_pieces, item_inputs = family.smallest[kind](config)
    prompt_ids = [getattr(config, family.placeholders[kind])] * num_pieces
    input_ids = torch.tensor([*prompt_ids, 0])
    return Experience(
        group=-1,
        index=0,
        example=PromptExample(row=-1, prompt="", prompt_ids=prompt_ids),
        response="",
        input_ids=input_ids,
        position_ids=family.positions(config, input_ids, item_inputs),
        response_start=num_pieces,
        action_mask=torch.zeros(1, dtype=torch.bool),
        finish_reason="stop",
        rollout_log_probs=torch.zeros(1),
        action_log_probs=torch.zeros(1),
        base_action_log_probs=torch.zeros(1),
        values=torch.zeros(1),
        advantages=torch.zeros(1),
        returns=torch.zeros(1),
        item_inputs=item_inputs,
    )
