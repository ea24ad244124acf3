import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2VLImageProcessor

from lightrft.config import DataConfig
from lightrft.datasets.media import MediaLoader
from lightrft.datasets.media_files import MediaError
from lightrft.datasets.media_inputs import MediaInputs, MediaProcessor, MediaRequest
from lightrft.datasets.media_server import MediaFailure, loaded
from lightrft.datasets.media_sizes import MediaLimits, PixelRange
from lightrft.datasets.media_workers import MediaWorkers
from lightrft.datasets.prompts import PromptDataset, load_prompts
from lightrft.models.collate import micro_batches
from lightrft.types import Experience, PromptExample
from tests import tiny_media, tiny_models
from tests.datasets.media_samples import image, save_tone, save_video

SIZES = [(32, 32), (480, 640), (1500, 2000)]
VISUAL = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl"]
ASK = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Mapping[str, str]:
    """Folder of each family, without weights."""
    folder = tmp_path_factory.mktemp("models")
    return {family: tiny_media.save_processor(folder / family, family) for family in tiny_media.PROCESSORS}


class Run:
    """A family's loader, and the prompts of rows of a folder."""

    def __init__(self, folder: Path, pretrain: str, family: str) -> None:
        self.folder = folder
        self.pretrain = pretrain
        self.processor = tiny_media.PROCESSORS[family]()
        self.loaders: list[MediaLoader] = []

    def loader(self, num_workers: int = 0, **flags: Any) -> MediaLoader:
        self.loaders.append(MediaLoader(self.pretrain, self.processor, DataConfig(**flags), num_workers))
        return self.loaders[-1]

    def prompts(
        self, rows: Sequence[Mapping[str, Any]], loader: MediaLoader | None = None, **flags: Any
    ) -> PromptDataset:
        path = self.folder / "rows.jsonl"
        path.write_text("".join(json.dumps({"label": "1"} | row) + "\n" for row in rows))
        data = DataConfig(**{"apply_chat_template": True, "prompt_max_len": 4096} | flags)
        loader = loader or self.loader(**flags)
        return load_prompts(str(path), "train", self.processor.tokenizer, data, None, loader)

    def text(self, example: PromptExample) -> str:
        return self.processor.tokenizer.decode(example.prompt_ids)


@pytest.fixture
def run(tmp_path, models) -> Iterator[Run]:
    made = Run(tmp_path, models["qwen2_5_vl"], "qwen2_5_vl")
    yield made
    for loader in made.loaders:
        loader.close()


def save_images(folder: Path, *names: str) -> None:
    for seed, name in enumerate(names):
        image(16 + 8 * seed, 32, seed).save(folder / name)


# Sizes


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("high", [None, 64 * 28 * 28])
def test_an_image_has_as_many_tokens_as_the_models_processor_makes_of_its_file(size, high):
    """DATA-07: in the sizes of the real Qwen2.5-VL, 28 x 28 pixels a token. Engines get these ids and pixels.

    32 x 32 has 1 of them, less than 4, and becomes 56 x 56; 640 x 480 has 23 x 17 = 391; 2000 x 1500 has 3,827, more
    than the processor's 1,280. At 64 tokens, 640 x 480 has 9 x 6 and 2000 x 1500 too.
    """
    processor = tiny_media.qwen2_5_vl()
    processor.image_processor = Qwen2VLImageProcessor()
    text = processor.apply_chat_template(ASK, tokenize=False)
    made = MediaProcessor(processor, MediaLimits(image_max_pixels=high))(MediaRequest(text, {"image": [image(*size)]}))
    limits = {"shortest_edge": 56 * 56, "longest_edge": high or 28 * 28 * 1280}
    direct = processor(text=[text], images=[image(*size)], size=limits, return_tensors="pt")
    assert made.prompt_ids == direct["input_ids"][0].tolist()
    counts = {SIZES[0]: 4, SIZES[1]: 391 if high is None else 54, SIZES[2]: 1230 if high is None else 54}
    assert made.prompt_ids.count(processor.image_token_id) == counts[size]


@pytest.mark.parametrize("family", VISUAL)
@pytest.mark.parametrize("size", [*SIZES, (7, 300)], ids=str)
def test_an_item_that_was_brought_to_size_is_not_changed_again(family, size):
    processor = tiny_media.PROCESSORS[family]()
    text = processor.apply_chat_template(ASK, tokenize=False)
    make = MediaProcessor(processor, MediaLimits())
    media = {"image": [image(*size)]}
    made = make(MediaRequest(text, media))
    again = processor(text=[text], images=make.items(media)["image"], return_tensors="pt")
    direct = processor(text=[text], images=[image(*size)], return_tensors="pt")
    assert made.prompt_ids == again["input_ids"][0].tolist() == direct["input_ids"][0].tolist()
    assert np.array_equal(made.item_inputs["pixel_values"], again["pixel_values"].numpy())


def test_tiles_are_of_an_image_within_the_limits():
    """InternVL: 2000 x 1500 at 1,200 pixels at most: 40 x 30."""
    make = MediaProcessor(tiny_media.internvl(), MediaLimits(image_max_pixels=1200))
    [scaled] = make.items({"image": [image(1500, 2000)]})["image"]
    assert scaled.size == (40, 30)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"image_max_pixels": 10**6}, r"image_max_pixels=1000000, processor 256 to 4096 pixels\. Change --image_max"),
        ({"image_min_pixels": 100}, r"image_min_pixels=100, processor 256 to 4096 pixels"),
        ({"video_max_pixels": 100}, r"video_max_pixels=100, processor 256 to 4096 pixels"),
    ],
)
def test_limits_that_the_models_processor_would_not_keep_are_refused(limits, message):
    """It would change the sizes again."""
    with pytest.raises(ValueError, match=message):
        MediaProcessor(tiny_media.qwen2_5_vl(), MediaLimits(**limits))


def test_an_image_that_is_too_long_for_the_model_is_refused():
    with pytest.raises(ValueError, match=r"^its sides differ by more than a factor of 200: 2001 x 10 pixels$"):
        PixelRange(256, 4096, 8).fit(1, (10, 2001))


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_frames_are_as_many_and_as_large_as_the_flags_say(tmp_path, family):
    """2 s at 10 frames a second: 2 s x 2 = 4, at most 2; 96 x 64 is 6,144 pixels and at 1,024 at most 32 x 24."""
    save_video(tmp_path / "a.mp4", range(0, 200, 10), 10, height=64, width=96)
    processor = tiny_media.PROCESSORS[family]()
    text = processor.apply_chat_template([{"role": "user", "content": [{"type": "video"}]}], tokenize=False)
    for limits, count, size in (
        ({}, 4, (48, 72)),
        ({"video_max_frames": 3}, 2, (48, 72)),
        ({"video_max_pixels": 1024}, 4, (24, 32)),
    ):
        if family == "qwen3_vl" and "video_max_pixels" not in limits:
            # 4 frames of 64 x 64 for all of them: 2 may be of the full size.
            size = {4: (48, 72), 2: (64, 96)}[count]
        make = MediaProcessor(processor, MediaLimits(**limits))
        media = {"video": [str(tmp_path / "a.mp4")]}
        made = make(MediaRequest(text, media))
        [(frames, metadata)] = make.items(media)["video"]
        assert frames.shape == (count, *size, 3)
        again = processor(
            text=[text], videos=[frames], video_metadata=[metadata], do_sample_frames=False, return_tensors="pt"
        )
        assert made.prompt_ids == again["input_ids"][0].tolist()
        grid = [count // 2, size[0] // 4, size[1] // 4]
        assert made.item_inputs["video_grid_thw"].tolist() == [grid] == again["video_grid_thw"].tolist()


def test_a_clip_of_one_frame_fills_a_piece_of_time(tmp_path):
    save_video(tmp_path / "a.mp4", [100], 10)
    make = MediaProcessor(tiny_media.qwen3_vl(), MediaLimits())
    [(frames, _)] = make.items({"video": [str(tmp_path / "a.mp4")]})["video"]
    assert len(frames) == 2


def test_sounds_are_heard_whole_or_refused(tmp_path):
    """A second is 100 frames of features and 25 tokens; 0.02 s are filled up to 0.1 s: 10 frames, 2 tokens."""
    processor = tiny_media.qwen2_audio()
    make = MediaProcessor(processor, MediaLimits())
    text = "<|audio_bos|><|AUDIO|><|audio_eos|>"
    for seconds, tokens in ((1.0, 25), (0.02, 2)):
        media = {"audio": [str(save_tone(tmp_path / "a.wav", seconds, 440))]}
        made = make(MediaRequest(text, media))
        assert made.prompt_ids.count(processor.audio_token_id) == tokens
        assert made.item_inputs["input_features"].shape == (1, 16, 100)
        assert made.item_inputs["feature_attention_mask"].sum() == max(10, round(100 * seconds))
        [(samples, rate)] = make.items(media)["audio"]
        again = processor(text=[text], audio=[samples], sampling_rate=rate, return_tensors="pt")
        assert made.prompt_ids == again["input_ids"][0].tolist()
    save_tone(tmp_path / "a.wav", 1.5, 440)
    with pytest.raises(
        MediaError, match=r"a\.wav: this audio cannot be read: it lasts 1\.5 s, and the model hears 1 s"
    ):
        make(MediaRequest(text, {"audio": [str(tmp_path / "a.wav")]}))


# Rows


def test_rows_keep_their_own_images_through_shuffling_and_micro_batching(run):
    """DATA-06: rows with 1, 3, 0 and 2 images, each of another height, and decoded in another order."""
    names = [f"{i}.png" for i in range(6)]
    save_images(run.folder, *names)
    loader = run.loader()
    owned = [names[:1], names[1:4], [], names[4:]]
    rows = [{"images": owned[i], "input": "<image>" * len(owned[i]) + f"row {i}"} for i in range(4)]
    examples = run.prompts(rows, loader)
    loader.prefetch([examples[1], examples[3]], "step")
    order = [2, 0, 3, 1]
    decoded = dict(zip(order, loader.with_inputs([examples[i] for i in order]), strict=True))
    for i, example in decoded.items():
        assert example.media == ({"image": [str(run.folder / name) for name in owned[i]]} if owned[i] else {})
        heights = [4 * grid[1] for grid in example.item_inputs["image_grid_thw"].tolist()] if owned[i] else []
        assert heights == [16 + 8 * int(name[0]) for name in owned[i]]
    samples = [sample_of(decoded[i]) for i in range(4)]
    for plan in ([[2, 0, 3, 1]], [[3, 2], [1, 0]]):
        for batch, indices, _ in micro_batches(samples, plan, "packed", torch.device("cpu"), ()):
            grids = torch.cat([decoded[i].item_inputs["image_grid_thw"] for i in indices if owned[i]])
            assert torch.equal(batch.model_inputs["image_grid_thw"], grids)
            pixels = torch.cat([decoded[i].item_inputs["pixel_values"] for i in indices if owned[i]])
            assert torch.equal(batch.model_inputs["pixel_values"], pixels)
            image_tokens = int((batch.model_inputs["input_ids"] == run.processor.image_token_id).sum())
            assert image_tokens == int(grids.prod(-1).sum()) // 4


def sample_of(example: PromptExample) -> Experience:
    sample = tiny_models.sample(example.prompt_ids, [5, 6], group=example.row)
    return replace(
        sample,
        token_inputs={name: torch.cat([t, t.new_zeros(2)]) for name, t in example.token_inputs.items()},
        item_inputs=example.item_inputs,
    )


def test_marks_columns_and_content_parts_say_alike_where_an_image_stands(run):
    save_images(run.folder, "a.png", "b.png")
    part = {"type": "image"}
    contents: list[Any] = [
        "see <image> and <image>!",
        [{"type": "text", "text": "see <image> and "}, part, {"type": "text", "text": "!"}],
        [
            {"type": "text", "text": "see "},
            part,
            {"type": "text", "text": " and "},
            part,
            {"type": "text", "text": "!"},
        ],
    ]
    rows: list[dict[str, Any]] = [
        {"images": ["a.png", "b.png"], "input": [{"role": "user", "content": c}]} for c in contents
    ]
    rows.append({"images": ["a.png", "b.png"], "input": contents[0]})
    see, between, end = ({"type": "text", "text": text} for text in ("see ", " and ", "!"))
    first, second = {"type": "image", "image": "a.png"}, {"type": "image_url", "image_url": {"url": "b.png"}}
    rows.append({"input": [{"role": "user", "content": [see, first, between, second, end]}]})
    examples = run.prompts(rows)
    assert {example.prompt for example in examples} == {
        "<|im_start|>user\nsee <|vision_start|><|image_pad|><|vision_end|> and "
        "<|vision_start|><|image_pad|><|vision_end|>!<|im_end|>\n<|im_start|>assistant\n"
    }
    assert {tuple(example.media["image"]) for example in examples} == {
        (str(run.folder / "a.png"), str(run.folder / "b.png"))
    }
    # 16 x 32 and 24 x 32 pixels: 8 and 12 tokens.
    assert {e.prompt_ids.count(run.processor.image_token_id) for e in examples} == {8 + 12}
    assert "images" not in examples[0].extra


def test_images_without_a_place_stand_in_front_of_the_users_first_message(run):
    save_images(run.folder, "a.png")
    messages = [
        {"role": "user", "content": "hm"},
        {"role": "assistant", "content": "?"},
        {"role": "user", "content": "so"},
    ]
    (example,) = run.prompts([{"images": "a.png", "input": messages}], system_prompt="be")
    assert example.prompt.startswith(
        "<|im_start|>system\nbe<|im_end|>\n<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>hm<|im_end|>\n"
    )


def test_a_plain_prompt_takes_marks_too(run):
    save_images(run.folder, "a.png", "b.png")
    rows = [{"images": ["a.png", "b.png"], "input": "<image>?<image>"}, {"images": ["a.png"], "input": "what?"}]
    item = "<|vision_start|><|image_pad|><|vision_end|>"
    prompts = [example.prompt for example in run.prompts(rows, apply_chat_template=False)]
    assert prompts == [f"{item}?{item}", f"{item}what?"]


def test_a_mark_in_a_row_without_such_media_is_text(run):
    (example,) = run.prompts([{"input": "write <image> and <video>"}])
    assert "write <image> and <video>" in example.prompt and not example.media
    assert example.prompt_ids == run.processor.tokenizer(example.prompt)["input_ids"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input": "<image> <image>", "images": ["a.png"]}, "more than the 1 of 'images' are asked for"),
        ({"input": "<image>", "images": ["a.png", "a.png"]}, "'images' has 2 items, the prompt 1 places"),
        ({"input": "listen", "audios": ["a.wav"]}, "media that the model does not take: audio, in 'audios'"),
        ({"input": "see", "images": [3]}, "'images': media must be paths, encoded bytes, base64 or URLs: got 3"),
        ({"input": [{"role": "user", "content": [{"type": "smell"}]}]}, "or content parts of a known type: message 0"),
        ({"input": "<|image_pad|>", "images": ["a.png"]}, "the model's processor does not take the prompt"),
    ],
)
def test_a_row_whose_prompt_and_media_do_not_fit_is_named(run, row, message):
    save_images(run.folder, "a.png")
    with pytest.raises(ValueError, match=r"row 1 \(line 2\)") as error:
        run.prompts([{"input": "fine"}, row])
    assert message in str(error.value)


def test_a_text_model_does_not_pass_over_images(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"input": "what?", "label": "1", "images": ["a.png"]}) + "\n")
    with pytest.raises(ValueError, match=r"row 0 \(line 1\): the row has media that the model does not take: image"):
        load_prompts(str(path), "train", tiny_models.tokenizer(), DataConfig(), None)
    data = DataConfig(image_key="pictures")
    assert load_prompts(str(path), "train", tiny_models.tokenizer(), data, None)[0].extra == {"images": ["a.png"]}


def test_prompts_are_filtered_by_their_expanded_lengths(run):
    """16 x 32 pixels: 8 tokens; 32 x 32: 16. The text around has 29 characters or special tokens and vision's 2."""
    image(16, 32).save(run.folder / "a.png")
    image(32, 32).save(run.folder / "b.png")
    rows = [{"input": "hi", "images": name} for name in ("a.png", "b.png")]
    lengths = [len(example.prompt_ids) for example in run.prompts(rows)]
    assert lengths[1] - lengths[0] == 8
    dataset = run.prompts(rows, prompt_max_len=lengths[0])
    assert [example.row for example in dataset] == [0] and dataset.num_filtered == 1
    with pytest.raises(ValueError, match=r"^A prompt with media cannot be cut to prompt_max_len="):
        run.prompts(rows, prompt_max_len=lengths[0], overlong_prompts="truncate")


# Broken media


def save_broken(folder: Path) -> list[dict[str, Any]]:
    """Rows with a whole image, one that was cut off, and one that is not there."""
    image(64, 64).save(folder / "whole.jpg")
    (folder / "cut.jpg").write_bytes((folder / "whole.jpg").read_bytes()[:900])
    return [{"input": "what?", "images": name} for name in ("whole.jpg", "cut.jpg", "absent.jpg")]


def test_broken_media_stop_the_run_before_it_begins(run):
    """DATA-05"""
    with pytest.raises(ValueError, match=r"^Media must be there and readable: 2 of 3 rows of .*rows\.jsonl") as error:
        run.prompts(save_broken(run.folder))
    message = str(error.value)
    assert f"rows.jsonl, row 1 (line 2): {run.folder}/cut.jpg: this image cannot be read: " in message
    assert message.endswith("Correct the row, or set --media_errors skip to leave such rows out.")


def test_broken_media_are_left_out_with_their_paths_and_count(run, caplog, monkeypatch):
    """DATA-05"""
    monkeypatch.setattr(logging.getLogger("lightrft"), "propagate", True)
    with caplog.at_level("WARNING"):
        dataset = run.prompts(save_broken(run.folder), media_errors="skip")
    assert [example.row for example in dataset] == [0] and dataset.num_unreadable == 2
    [line] = [record.getMessage() for record in caplog.records if "left out for their media" in record.getMessage()]
    assert "2 of 3 rows" in line and "cut.jpg" in line and "absent.jpg" in line
    with pytest.raises(ValueError, match=r"2 of 2 rows"):
        run.prompts(save_broken(run.folder)[1:], media_errors="skip")


def test_media_that_change_while_a_run_goes_on_end_it_with_the_row(run):
    save_images(run.folder, "a.png")
    loader = run.loader()
    (example,) = run.prompts([{"input": "what?", "images": "a.png"}], loader)
    image(32, 32).save(run.folder / "a.png")
    with pytest.raises(MediaError, match=r"^row 0: its media must be the same on all nodes and stay as they were"):
        loader.with_inputs([example])
    (run.folder / "a.png").unlink()
    with pytest.raises(MediaError, match=r"^row 0: .*a\.png: this image cannot be read: "):
        loader.with_inputs([example])


# Processes


def test_processes_make_what_the_rank_itself_makes_and_go_on_after_a_death(run):
    save_images(run.folder, "a.png", "b.png")
    loader = run.loader(num_workers=1)
    examples = run.prompts([{"input": "what?", "images": ["a.png", "b.png"]}, {"input": "no"}], loader)
    made, text = loader.with_inputs(examples)
    [same, _] = run.loader().with_inputs(examples)
    assert made.token_inputs.keys() == {"mm_token_type_ids"}
    assert len(made.token_inputs["mm_token_type_ids"]) == len(made.prompt_ids)
    for ours, theirs in ((made.token_inputs, same.token_inputs), (made.item_inputs, same.item_inputs)):
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert text is examples[1]
    workers = loader._workers
    os.kill(pid_of_worker(workers), signal.SIGKILL)
    with pytest.raises(MediaError, match=r"^row 0: .*a\.png, .*b\.png: the process that decoded it has died$"):
        loader.with_inputs(examples)
    assert len(loader.with_inputs(examples)) == 2


def pid_of_worker(workers: MediaWorkers) -> int:
    [worker] = workers._idle
    return worker.pid


RANK = """
import sys, time
from lightrft.datasets.media_inputs import MediaRequest
from lightrft.datasets.media_sizes import MediaLimits
from lightrft.datasets.media_workers import MediaWorkers
workers = MediaWorkers(sys.argv[1], MediaLimits(), 1)
workers.submit(MediaRequest("hi", {})).result()
print(workers._idle[0].pid, workers._server._process.pid, flush=True)
time.sleep(600)
"""


def test_processes_end_with_a_rank_that_is_killed(models):
    rank = subprocess.Popen([sys.executable, "-c", RANK, models["qwen2_5_vl"]], stdout=subprocess.PIPE, text=True)
    assert rank.stdout is not None
    try:
        pids = [int(word) for word in rank.stdout.readline().split()]
        assert len(pids) == 2
    finally:
        rank.kill()
        rank.wait()
        rank.stdout.close()
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, "processes have outlived their rank"
        time.sleep(0.05)


def test_a_processor_that_a_process_cannot_load_is_said_and_is_no_fault_of_the_media(tmp_path):
    failure = loaded(str(tmp_path), MediaLimits())
    assert isinstance(failure, MediaFailure) and not failure.is_media
    assert failure.message.startswith("a media worker could not load its processor:\nTraceback ")


def test_inputs_travel_as_arrays():
    """Tensors would travel as open files, of which a process may have few."""
    made = MediaProcessor(tiny_media.qwen2_vl(), MediaLimits())(MediaRequest("hi", {}))
    assert isinstance(made, MediaInputs)
    assert all(isinstance(a, np.ndarray) for a in (*made.token_inputs.values(), *made.item_inputs.values()))
