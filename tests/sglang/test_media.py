"""Images, clips and sounds on SGLang's adapter: SGLang itself on a CPU where it is installed, else the tests' own."""

import os
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForMultimodalLM, AutoProcessor

from lightrft.strategy.sglang_utils.media import QWEN2_5_VL_PATCH
from lightrft.strategy.sglang_utils.preconditions import num_patch_values
from lightrft.strategy.sglang_utils.sglang_engine import SGLangEngine
from lightrft.types import PromptExample
from tests import tiny_media_models as tiny
from tests.sglang.engines import IS_REAL, ON_GPU, engine_of
from tests.strategy.engine_conformance import Reference
from tests.strategy.media_conformance import GREEDY, Case, MediaConformance
from tests.wide_models import save_wide_processor, wide_media_config

pytestmark = pytest.mark.skipif(ON_GPU, reason="SGLang's kernels for GPUs take no fp32; tests/gpu has its own")


class SGLangMedia(MediaConformance):
    def build(self, reference: Reference) -> AbstractContextManager[SGLangEngine]:
        return closing(engine_of(reference, takes_stop_strings=False))

    def test_nothing_of_a_rollout_s_media_stays_open(self, case: Case) -> None:
        """Neither here, where the file has no name, nor mapped in a scheduler once the next request is through."""
        assert case.generate(GREEDY) and files_of_media(os.getpid()) == []
        case.engine.generate(case.prompts[1:2], GREEDY, [[0]])
        assert [files_of_media(pid) for pid in case.engine.pids] == [[] for _ in case.engine.pids]


class SGLangImages(SGLangMedia):
    def test_images_of_the_same_pixels_and_another_shape_are_not_the_same(self, case: Case) -> None:
        """The same patches, in 4 rows of 8 and in 8 of 4: SGLang's own hash is of pixels alone."""
        start, place, end = (tiny.IDS[f"<|{name}|>"] for name in ("vision_start", "image_pad", "vision_end"))
        ids = [start, *[place] * 8, end] * 2 + [tiny.IDS[character] for character in "which?"]
        patches = torch.rand(32, num_patch_values(case.model.config), generator=torch.Generator().manual_seed(0))
        inputs = {"pixel_values": patches.repeat(2, 1)}
        inputs["image_grid_thw"] = torch.tensor([[1, 4, 8], [1, 8, 4]])
        types = {"mm_token_type_ids": tiny.token_types(torch.tensor(ids))}
        alike = replace(case, prompts=[PromptExample(0, "", ids, token_inputs=types, item_inputs=inputs)])
        params = replace(GREEDY, suppressed_ids=case.suppressed)
        self.assert_scored_alike(alike, alike.generate(params), params)


def files_of_media(pid: int) -> list[str]:
    """Files without a name in folders of engines that a process has open or mapped."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    opened = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
    return [line for line in [*maps, *opened] if "lightrft-sglang-" in line and line.endswith("(deleted)")]


class TestQwen2VL(SGLangImages):
    __test__ = IS_REAL
    family = "qwen2_vl"


class TestQwen2_5VL(SGLangImages):
    family = "qwen2_5_vl"

    def save(self, folder: Path) -> None:
        """With patches of 14 x 14 pixels, which alone SGLang takes for images; 28 x 28 of them are a piece."""
        config = wide_media_config(self.family)
        config.vision_config.patch_size, config.vision_config.window_size = 14, 56
        assert num_patch_values(config) == QWEN2_5_VL_PATCH
        torch.manual_seed(0)
        model = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim >= 2:
                    parameter.mul_(3)
        model.save_pretrained(folder)
        save_wide_processor(folder, self.family)
        processor = AutoProcessor.from_pretrained(folder)
        for part in (processor.image_processor, processor.video_processor):
            part.patch_size, part.size = 14, {"shortest_edge": 4 * 28**2, "longest_edge": 9 * 28**2}
        processor.save_pretrained(folder)


class TestQwen3VL(SGLangImages):
    __test__ = IS_REAL
    family = "qwen3_vl"


class TestQwen2Audio(SGLangMedia):
    family = "qwen2_audio"
