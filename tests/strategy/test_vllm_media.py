"""Where the items of a prompt stand for vLLM, and in how many tokens; vLLM itself is not needed."""

from collections.abc import Sequence

import pytest
import torch

from lightrft.strategy.vllm_utils.media import Items, items_of, ranges_of
from lightrft.types import PromptExample
from tests import tiny_media_models as tiny

IMAGE, CLIP, START, END = (
    tiny.IDS[mark] for mark in ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
)
TILE, SOUND, TEXT = tiny.IDS["<IMG_CONTEXT>"], tiny.IDS["<|AUDIO|>"], tiny.IDS["a"]


def prompt(ids: Sequence[int], **item_inputs: torch.Tensor) -> PromptExample:
    return PromptExample(7, "", list(ids), item_inputs=item_inputs)


def placed(family: str, example: PromptExample) -> list[tuple[str, int, list[int]]]:
    """Of each item its kind, where it starts, and 1 for each token from there on that is a piece of it."""
    return [
        (items.modality, start, mask.int().tolist())
        for items in items_of(tiny.config(family), example)
        for start, mask in ranges_of(items, example)
    ]


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_a_grid_of_patches_becomes_a_fourth_as_many_tokens(family: str) -> None:
    """1 x 4 x 2 patches are 2 tokens, 1 x 2 x 2 one, and a clip of 2 x 2 x 4 four; the two images touch each other."""
    ids = [TEXT, START, IMAGE, IMAGE, IMAGE, END, TEXT, START, CLIP, CLIP, CLIP, CLIP, END]
    grids = {"image_grid_thw": torch.tensor([[1, 4, 2], [1, 2, 2]]), "video_grid_thw": torch.tensor([[2, 2, 4]])}
    assert placed(family, prompt(ids, **grids)) == [("image", 2, [1, 1]), ("image", 4, [1]), ("video", 8, [1] * 4)]


def test_a_clip_of_qwen3_vl_has_the_marks_of_its_frames_and_what_stands_between_them() -> None:
    """vLLM looks for the mark in front of the first frame from the clip's start on."""
    ids = [TEXT, START, CLIP, CLIP, END, TEXT, START, CLIP, CLIP, END]
    example = prompt(ids, video_grid_thw=torch.tensor([[2, 2, 4]]))
    assert placed("qwen3_vl", example) == [("video", 1, [0, 1, 1, 0, 0, 0, 1, 1])]


def test_each_tile_of_internvl_is_an_image() -> None:
    """Two tiles of one image and one of another, with 4 tokens each."""
    ids = [TEXT, *[TILE] * 8, TEXT, *[TILE] * 4]
    example = prompt(ids, pixel_values=torch.zeros(3, 3, 16, 16))
    assert placed("internvl", example) == [("image", 1, [1] * 4), ("image", 5, [1] * 4), ("image", 10, [1] * 4)]


def test_a_fourth_of_the_frames_of_a_sound_are_tokens() -> None:
    """20 frames: 10 behind the convolution, (10 - 2) // 2 + 1 = 5 behind the pooling; 9 frames: 5, and 2."""
    mask = (torch.arange(100) < torch.tensor([[20], [9]])).long()
    example = prompt([*[SOUND] * 5, TEXT, *[SOUND] * 2], feature_attention_mask=mask)
    assert placed("qwen2_audio", example) == [("audio", 0, [1] * 5), ("audio", 6, [1] * 2)]


@pytest.mark.parametrize(
    ("ids", "lengths"),
    [
        ([TEXT, IMAGE], "it has 2 tokens, and vLLM makes 3 of them"),
        ([TEXT, IMAGE, IMAGE, IMAGE], "it has 4 tokens, and vLLM makes 3 of them"),
        ([TEXT, IMAGE, IMAGE, CLIP], "it has 4 tokens, and vLLM makes 3 of them"),
    ],
)
def test_other_placeholders_than_pieces_are_an_error_with_the_row(ids: list[int], lengths: str) -> None:
    example = prompt(ids, image_grid_thw=torch.tensor([[1, 4, 2]]))
    with pytest.raises(ValueError, match=f"row 7: .*{lengths}"):
        items_of(tiny.config("qwen2_5_vl"), example)


def test_the_tokens_of_an_item_may_lie_apart() -> None:
    example = prompt([TEXT, CLIP, TEXT, CLIP, CLIP])
    [(start, mask), (other, rest)] = ranges_of(Items("video", CLIP, [2, 1]), example)
    assert (start, mask.int().tolist(), other, rest.int().tolist()) == (1, [1, 0, 1], 4, [1])
