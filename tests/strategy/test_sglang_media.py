"""What SGLang is given of images, clips and sounds, and which models with a tower it is not asked to run."""

import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from lightrft.models.multimodal import position_ids
from lightrft.strategy.sglang_utils.mapped_file import MediaFile, TensorPlace
from lightrft.strategy.sglang_utils.media import (
    QWEN2_5_VL_PATCH,
    EngineInputs,
    PackedTensor,
    frame_by_frame,
    num_sound_tokens,
    processor_output,
)
from lightrft.strategy.sglang_utils.preconditions import check_family
from lightrft.strategy.sglang_utils.scheduler import SUPPRESSED, without_suppressed
from lightrft.types import PromptExample
from tests import tiny_media_models as tiny


@pytest.fixture
def file(tmp_path: Path) -> Iterator[MediaFile]:
    with MediaFile.opened(tmp_path) as file:
        yield file


def in_scheduler(media: Mapping[str, Any]) -> dict[str, Any]:
    return pickle.loads(pickle.dumps(processor_output(media)))


def prompt_of(family: str, kinds: list[str], row: int = 0, sides: tuple[int, int] = (4, 4)) -> PromptExample:
    """A prompt with an item of each kind; clips have two frames."""
    sizes = {"image": sides, "video": (2, 4, 4), "audio": (9,)}
    sample = tiny.sample(family, [tiny.item(family, kind, i, sizes[kind]) for i, kind in enumerate(kinds)])
    ids = sample.example.prompt_ids
    return PromptExample(row, "", ids, item_inputs=sample.item_inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 5), (4,)])
def test_a_tensor_travels_by_its_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape).to(dtype)
    packed = pickle.loads(pickle.dumps(PackedTensor.of(tensor)))
    assert torch.equal(packed.tensor(), tensor) and packed.tensor().dtype == dtype


def test_a_prompt_of_text_is_its_ids_alone(file: MediaFile) -> None:
    made = EngineInputs(tiny.config("qwen3_vl"), torch.float32)(prompt_of("qwen3_vl", []), file)
    assert made.media == {} and len(made.ids) == len("what is it?")


def test_images_and_clips_come_with_the_actor_s_positions_and_in_the_engine_s_dtype(file: MediaFile) -> None:
    config, prompt = tiny.config("qwen3_vl"), prompt_of("qwen3_vl", ["image", "video"])
    made = EngineInputs(config, torch.bfloat16)(prompt, file)
    image, clip = (in_scheduler(made.media[kind]) for kind in ("image", "video"))
    axes = position_ids(config, torch.tensor(prompt.prompt_ids), prompt.item_inputs)[1:]
    for output in (image, clip):
        assert output["format"] == "processor_output" and torch.equal(output["mrope_positions"], axes)
        # What follows the prompt goes on behind its highest position.
        assert output["mrope_position_delta"] + len(made.ids) == axes.max() + 1
    assert torch.equal(image["pixel_values"], prompt.item_inputs["pixel_values"].bfloat16())
    assert torch.equal(clip["pixel_values_videos"], prompt.item_inputs["pixel_values_videos"].bfloat16())
    assert clip["video_grid_thw"].tolist() == [[2, 4, 4]] and made.ids == prompt.prompt_ids


def test_what_towers_read_is_sent_neither_to_the_host_nor_for_each_sample(file: MediaFile) -> None:
    """Two images of 1,024 patches of 96 numbers, 786,432 bytes; the host holds a reference."""
    prompt = prompt_of("qwen3_vl", ["image", "image"], sides=(32, 32))
    sent = pickle.dumps(EngineInputs(tiny.config("qwen3_vl"), torch.float32)(prompt, file))
    output = processor_output(pickle.loads(sent).media["image"])
    assert isinstance(output["pixel_values"], TensorPlace)
    positions = 3 * 8 * len(prompt.prompt_ids)
    assert max(len(sent) - 8 * len(prompt.prompt_ids), len(pickle.dumps(output))) < positions + 4000 < 786_432 // 30
    first_scheduler = pickle.loads(pickle.dumps(output))
    assert len(pickle.dumps(first_scheduler)) < positions + 4000
    second_scheduler = pickle.loads(pickle.dumps(first_scheduler))
    for received in (first_scheduler, second_scheduler):
        assert torch.equal(received["pixel_values"], prompt.item_inputs["pixel_values"])


def test_clips_of_qwen2_5_vl_come_frame_by_frame(file: MediaFile) -> None:
    """SGLang would have frames attend to each other."""
    grid = torch.tensor([[2, 4, 6], [1, 8, 8]])
    assert frame_by_frame(grid).tolist() == [[1, 4, 6], [1, 4, 6], [1, 8, 8]]
    made = EngineInputs(tiny.config("qwen2_5_vl"), torch.float32)(prompt_of("qwen2_5_vl", ["video"]), file)
    assert in_scheduler(made.media["video"])["video_grid_thw"].tolist() == [[1, 4, 4], [1, 4, 4]]


def test_what_sglang_keeps_is_found_by_a_prompt_s_samples_and_by_no_other_prompt(file: MediaFile) -> None:
    """Weights may have changed between two calls with one prompt; its own samples share what is made here."""
    inputs = EngineInputs(tiny.config("qwen3_vl"), torch.float32)
    prompt = prompt_of("qwen3_vl", ["image", "video"])
    numbers = [made["hash"] for _ in range(2) for made in inputs(prompt, file).media.values()]
    assert len(set(numbers)) == 4 and max(numbers) < 2**30


def test_a_prompt_with_a_placeholder_too_few_is_refused_with_its_row(file: MediaFile) -> None:
    """The image is of 4 pieces; the prompt has "0", a mark, 4 placeholders, a mark and 11 characters."""
    prompt = prompt_of("qwen2_vl", ["image"], row=7)
    short = prompt.prompt_ids.copy()
    short.remove(tiny.IDS["<|image_pad|>"])
    broken = PromptExample(7, "", short, item_inputs=prompt.item_inputs)
    with pytest.raises(
        ValueError, match=r"row 7: .* it has 17 tokens, 3 of them of image, .* 4 pieces .* 18 tokens\.$"
    ):
        EngineInputs(tiny.config("qwen2_vl"), torch.float32)(broken, file)


def test_sounds_have_a_token_for_four_frames() -> None:
    """90 frames: 45 behind the convolutions, of which the pool makes 22. Of 8: 4, and 2."""
    masks = torch.stack([(torch.arange(100) < count).long() for count in (90, 8)])
    assert num_sound_tokens(masks).tolist() == [22, 2]


def test_suppressed_ids_have_probability_0() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0], [0.0, 5.0, 5.0]])
    probs = without_suppressed(logits, [{SUPPRESSED: [1]}]).softmax(-1)
    expected = torch.tensor([[1 / (1 + 2.718281828**2), 0, 1 / (1 + 2.718281828**-2)]])
    assert torch.allclose(probs[:1], expected) and probs[:, 1].tolist() == [0, 0]
    assert torch.equal(without_suppressed(logits, None), logits)


def test_models_with_a_tower_that_sglang_cannot_run_are_refused() -> None:
    for family in ("qwen2_vl", "qwen3_vl", "qwen2_audio"):
        check_family(tiny.config(family))
    with pytest.raises(NotImplementedError, match=r"families qwen2_vl, .*: got internvl\. Set --engine_type torch"):
        check_family(tiny.config("internvl"))
    # 3 colours x 2 frames x 4 x 4 pixels.
    with pytest.raises(
        NotImplementedError, match=rf"patches of {QWEN2_5_VL_PATCH} numbers alone: this model's have 96\."
    ):
        check_family(tiny.config("qwen2_5_vl"))
    config = tiny.config("qwen2_5_vl")
    config.vision_config.patch_size = 14
    check_family(config)
