"""Images, clips and sounds on SGLang's adapter: SGLang itself on a CPU where it is installed, else the tests' own."""

from contextlib import AbstractContextManager, closing
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForMultimodalLM, AutoProcessor

from lightrft.strategy.sglang_utils.media import QWEN2_5_VL_PATCH
from lightrft.strategy.sglang_utils.preconditions import num_patch_values
from lightrft.strategy.sglang_utils.sglang_engine import SGLangEngine
from tests.sglang.engines import IS_REAL, ON_GPU, engine_of
from tests.strategy.engine_conformance import Reference
from tests.strategy.media_conformance import MediaConformance
from tests.wide_models import save_wide_processor, wide_media_config

pytestmark = pytest.mark.skipif(ON_GPU, reason="SGLang's kernels for GPUs take no fp32; tests/gpu has its own")


class SGLangMedia(MediaConformance):
    def build(self, reference: Reference) -> AbstractContextManager[SGLangEngine]:
        return closing(engine_of(reference, takes_stop_strings=False))


class TestQwen2VL(SGLangMedia):
    __test__ = IS_REAL
    family = "qwen2_vl"


class TestQwen2_5VL(SGLangMedia):
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


class TestQwen3VL(SGLangMedia):
    __test__ = IS_REAL
    family = "qwen3_vl"


class TestQwen2Audio(SGLangMedia):
    family = "qwen2_audio"
