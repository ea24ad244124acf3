"""Images and clips on SGLang's adapter on two ranks: one model over both (TP 2), and a model each."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from lightrft.models.multimodal import suppressed_ids
from lightrft.types import GenerationOutput, PromptExample, SamplingParams
from tests import tiny_media_models as tiny
from tests.distributed.ranks import Ranks
from tests.media_prompts import media_prompts
from tests.models.test_multimodal import live
from tests.sglang.engines import IS_REAL, ON_GPU
from tests.sglang.test_media import files_of_media
from tests.sglang.test_ranks import START_SECONDS, strategy_with_engine
from tests.strategy.media_conformance import Case, scored
from tests.wide_models import save_wide_media

pytestmark = pytest.mark.skipif(ON_GPU or not IS_REAL, reason="is of SGLang's own requests between its schedulers")
FAMILY = "qwen3_vl"


def generate(
    folder: str, tp_size: int, shares: Sequence[list[PromptExample]], params: SamplingParams
) -> tuple[list[list[GenerationOutput]], list[Any]]:
    """Two samples of each of this rank's prompts, and what SGLang's processes still have of media's files."""
    with strategy_with_engine(folder, tp_size, prompt_max_len=128, tokenizer=tiny.tokenizer()) as (strategy, actor):
        strategy.update_engine_weights(actor)
        own = shares[strategy.rank]
        seeds = [[100 * strategy.rank + 10 * i + j for j in range(2)] for i in range(len(own))]
        outputs = strategy.gather_and_generate(own, params, seeds)
        # A request is forgotten when the next is through.
        text = [prompt for prompt in own if not prompt.item_inputs]
        strategy.gather_and_generate(text, params, [[0] for _ in text])
        return outputs, [files_of_media(pid) for pid in strategy.engine.engine.pids]


@pytest.mark.parametrize("tp_size", [1, 2])
def test_every_scheduler_of_every_engine_reads_the_media(tmp_path: Path, tp_size: int) -> None:
    """DIST-06, NUM-01: the first scheduler of two gets the requests, and sends them on."""
    folder = save_wide_media(tmp_path, FAMILY)
    model = live(folder, FAMILY, "padded")
    prompts = media_prompts(tmp_path, FAMILY)
    shares = [prompts[:3], prompts[1:]]
    params = SamplingParams(8, suppressed_ids=suppressed_ids(model.config, tiny.tokenizer()))
    ranks = Ranks(world_size=2)
    try:
        results = ranks.run(generate, folder, tp_size, shares, params, timeout=START_SECONDS)
    finally:
        ranks.close()
    for share, (outputs, left) in zip(shares, results, strict=True):
        actors, engines = scored(Case(FAMILY, tmp_path, None, model, share), outputs, params)
        torch.testing.assert_close(actors, engines, atol=1e-4, rtol=0)
        assert left == [[] for _ in left] and len(left) == tp_size + 1
