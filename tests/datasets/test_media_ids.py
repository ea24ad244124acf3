"""Ids of prompts with images, from sizes alone: those that the models' processors make of the pixels."""

import random
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessor

from lightrft.datasets.media_files import MediaError
from lightrft.datasets.media_inputs import MediaProcessor, MediaRequest
from lightrft.datasets.media_sizes import MediaLimits
from tests import tiny_media
from tests.datasets.media_samples import image, save_video

VISUAL = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl"]


def ask(processor: Any, *texts: str) -> str:
    """A prompt with an image in front of each text."""
    parts = [part for text in texts for part in ({"type": "image"}, {"type": "text", "text": text})]
    return processor.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)


def both(make: MediaProcessor, text: str, media: dict[str, list[Any]]) -> tuple[list[int], list[int]]:
    """Ids as they are asked for alone, and those beside the pixels."""
    return tuple(make(MediaRequest(text, media, only_ids=only)).prompt_ids for only in (True, False))  # type: ignore


@pytest.mark.parametrize("limits", [MediaLimits(), MediaLimits(image_min_pixels=600, image_max_pixels=2000)], ids=str)
@pytest.mark.parametrize("family", VISUAL)
def test_ids_by_size_are_those_of_the_processor(family, limits):
    """Images of any size and shape, one to three of them, with text at both sides or none."""
    draw = random.Random(0)
    processor = tiny_media.PROCESSORS[family]()
    make = MediaProcessor(processor, limits)
    lengths = set()
    for _ in range(40):
        images = [image(draw.randint(2, 300), draw.randint(2, 300)) for _ in range(draw.randint(1, 3))]
        text = ask(processor, *(draw.choice(["what?", " a ", "\n", ""]) for _ in images))
        ids, whole = both(make, text, {"image": images})
        assert ids == whole
        lengths.add(len(ids))
    assert make._image_ids is not None and len(lengths) > 10


@pytest.mark.parametrize("family", ["qwen2_5_vl", "internvl"])
def test_real_sizes_have_the_same_ids_too(family):
    """Tokens of 28 x 28 pixels, and tiles of 448 x 448, up to twelve of them."""
    processor: Any = tiny_media.PROCESSORS[family]()
    if family == "internvl":
        processor.image_processor.size, processor.image_processor.max_patches = {"height": 448, "width": 448}, 12
    else:
        processor.image_processor = Qwen2VLImageProcessor()
    make = MediaProcessor(processor, MediaLimits())
    for size in [(448, 448), (1500, 2000), (90, 1300), (33, 20)]:
        ids, whole = both(make, ask(processor, "what?"), {"image": [image(*size)]})
        assert ids == whole


class Recording(Qwen2VLImageProcessor):
    """Keeps the sizes of the images whose pixels it is asked for."""

    seen: list[tuple[int, int]]

    def preprocess(self, images: Any, *args: Any, **kwargs: Any) -> Any:
        self.seen += [one.size for one in images]
        return super().preprocess(images, *args, **kwargs)


def test_pixels_are_made_for_ids_where_there_are_clips_and_not_for_images_alone(tmp_path):
    """Once two examples, in the model's range of sizes, have shown how an image is written."""
    processor: Any = tiny_media.qwen2_5_vl()
    settings = {
        k: v for k, v in processor.image_processor.to_dict().items() if k in ("patch_size", "merge_size", "size")
    }
    processor.image_processor = Recording(temporal_patch_size=2, **settings)
    processor.image_processor.seen = seen = []
    make = MediaProcessor(processor, MediaLimits())
    for height in (16, 24, 32):
        make(MediaRequest(ask(processor, "what?"), {"image": [image(height, 48)]}, only_ids=True))
    examples = [(64, 64), (80, 48)]
    assert seen == examples
    clip = str(save_video(tmp_path / "a.mp4", range(0, 100, 10), 10))
    text = "<|vision_start|><|image_pad|><|vision_end|><|vision_start|><|video_pad|><|vision_end|>"
    ids, whole = both(make, text, {"image": [image(16, 24)], "video": [clip]})
    assert ids == whole and seen == [*examples, (24, 16), (24, 16)]


class CountsOtherwise(Qwen2_5_VLProcessor):
    def _get_num_multimodal_tokens(self, image_sizes: Any = None, video_sizes: Any = None, **kwargs: Any) -> Any:
        counted: Any = super()._get_num_multimodal_tokens(image_sizes, video_sizes, **kwargs)
        counted.num_image_tokens = [count + 1 for count in counted.num_image_tokens]
        return counted


def test_a_processor_that_counts_otherwise_than_it_writes_is_not_believed():
    own = tiny_media.qwen2_5_vl()
    processor = CountsOtherwise(own.image_processor, own.tokenizer, own.video_processor, own.chat_template)
    make = MediaProcessor(processor, MediaLimits())
    ids, whole = both(make, ask(processor, "what?"), {"image": [image(48, 40)]})
    assert ids == whole and ids.count(processor.image_token_id) == 30


@pytest.mark.parametrize("ending", ["png", "jpg"])
def test_a_file_that_was_cut_off_has_no_ids_though_its_header_is_whole(tmp_path, ending):
    path = Path(tmp_path / f"a.{ending}")
    image(64, 64).save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) * 9 // 10])
    processor = tiny_media.qwen2_5_vl()
    make = MediaProcessor(processor, MediaLimits())
    with pytest.raises(MediaError, match=rf"a\.{ending}: this image cannot be read: "):
        make(MediaRequest(ask(processor, "what?"), {"image": [str(path)]}, only_ids=True))
