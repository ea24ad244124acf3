"""The Geometry3K example: its prompts, and that its script's flags are flags."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from examples.gsm8k_geo3k.data_preprocess.geo3k import INSTRUCTION, main, prompt_row
from lightrft.config import DataConfig, check_config, parse_config
from lightrft.config.recipes import read_recipes
from lightrft.datasets.media import MediaLoader
from lightrft.datasets.prompts import load_prompts
from tests import tiny_media
from tests.datasets.media_samples import image

EXAMPLE = Path(__file__).parents[2] / "examples" / "gsm8k_geo3k"
GEO_SYNTH = Path(__file__).parents[3] / "shared" / "data" / "geo_synth"


def written(folder: Path, split: str) -> list[dict]:
    return [json.loads(line) for line in (folder / f"{split}.jsonl").read_text().splitlines()]


def test_an_image_stands_where_the_problem_has_its_mark_or_in_front():
    asked = [
        prompt_row(question, " 7 ", ["a.png"])["prompt"][0]["content"] for question in ("Find <image> x.", "Find x.")
    ]
    assert asked == [f"Find <image> x. {INSTRUCTION}", f"<image>Find x. {INSTRUCTION}"]
    assert prompt_row("?", " 7 ", ["a.png"])["reference"] == "7"


def test_the_published_layout_is_read_in_the_order_of_its_numbers(tmp_path):
    """The answer is the choice of the letter: C is the third."""
    for split in ("train", "test"):
        for number in (10, 9):
            # The archives of the authors hold the split's folder twice.
            problem = tmp_path / "geometry3k" / split / split / str(number)
            problem.mkdir(parents=True)
            data = {"problem_text": f"Find {number}.", "choices": ["1", "2", "2 \\sqrt { 3 }", "4"], "answer": "C"}
            (problem / "data.json").write_text(json.dumps(data))
            image(16, 16).save(problem / "img_diagram.png")
    main(str(tmp_path / "geometry3k"), tmp_path / "out")
    rows = written(tmp_path / "out", "train")
    assert [row["prompt"][0]["content"].removesuffix(f" {INSTRUCTION}") for row in rows] == [
        "<image>Find 9.",
        "<image>Find 10.",
    ]
    assert rows[0]["images"] == ["../geometry3k/train/train/9/img_diagram.png"]
    assert (rows[0]["label"], rows[0]["reference"]) == ("geo3k", "2 \\sqrt { 3 }")


def test_a_table_as_the_hub_has_it_becomes_files(tmp_path):
    buffer = io.BytesIO()
    image(16, 16).save(buffer, "PNG")
    cells = [{"bytes": buffer.getvalue(), "path": None}]
    table = pyarrow.Table.from_pylist([{"images": cells, "problem": "<image>Find x.", "answer": "7"}])
    for split in ("train", "test"):
        parquet.write_table(table, tmp_path / f"{split}.parquet")
    main(str(tmp_path), tmp_path / "out")
    (row,) = written(tmp_path / "out", "test")
    assert row["images"] == ["images/test_0_0.png"]
    assert (tmp_path / "out" / "images" / "test_0_0.png").read_bytes() == buffer.getvalue()


@pytest.mark.parametrize("change", [{"answer": "E"}, {"answer": "three"}, {"choices": None}])
def test_a_problem_that_is_none_is_named(tmp_path, capsys, change):
    problem = tmp_path / "train" / "0"
    problem.mkdir(parents=True)
    data = {"problem_text": "Find x.", "choices": ["1", "2", "3", "4"], "answer": "A"} | change
    (problem / "data.json").write_text(json.dumps(data))
    with pytest.raises(SystemExit):
        main(str(tmp_path), tmp_path / "out")
    assert f"error: {problem}/data.json is no problem of Geometry3K: " in capsys.readouterr().err


@pytest.mark.skipif(not GEO_SYNTH.is_dir(), reason="needs the synthetic geometry set")
def test_a_synthetic_set_of_its_form_becomes_prompts_that_a_vision_language_model_takes(tmp_path):
    main(str(GEO_SYNTH), tmp_path / "out")
    data = DataConfig(input_key="prompt", apply_chat_template=True, prompt_max_len=512)
    processor = tiny_media.qwen2_5_vl()
    pretrain = tiny_media.save_processor(tmp_path / "model", "qwen2_5_vl")
    loader = MediaLoader(pretrain, processor, data, num_workers=0)
    prompts = load_prompts(str(tmp_path / "out"), "test", processor.tokenizer, data, 8, loader)
    loader.close()
    given = [json.loads(line) for line in (GEO_SYNTH / "test.jsonl").read_text().splitlines()[:8]]
    for example, row in zip(prompts, given, strict=True):
        assert row["question"] in example.prompt and example.reference == row["answer"]
        assert [Path(path).resolve() for path in example.media["image"]] == [(GEO_SYNTH / row["images"][0]).resolve()]
        # 112 x 112 pixels at 4,096 at most: 8 x 8 tokens of 8 x 8 pixels.
        assert example.prompt_ids.count(processor.image_token_id) == 64


def test_the_run_script_has_the_values_of_upstreams_and_fits_eight_gpus(tmp_path, capsys):
    """128 problems x 8 answers, 8 ranks with 4 answers each: 128 / (8 x 4) = 4 micro-batches a rank."""
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text("{}")
    torchrun = tmp_path / "torchrun"
    torchrun.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    torchrun.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "DATA": str(tmp_path), "SAVE_PATH": str(tmp_path / "r")}
    script = EXAMPLE / "run_grpo_geo3k_qwen2.5_vl_7b.sh"
    ended = subprocess.run(
        [script, "--max_steps", "2"], env=environment | {"ENGINE": "torch"}, capture_output=True, text=True, check=True
    )
    arguments = json.loads(ended.stdout)
    config = parse_config(arguments[arguments.index("examples/gsm8k_geo3k/train_colocate.py") + 1 :])
    check_config(config, 8)
    assert "warning" not in capsys.readouterr().err
    rollout, train = config.rollout, config.train
    assert (rollout.rollout_batch_size, rollout.n_samples_per_prompt, rollout.generate_max_len) == (128, 8, 2048)
    assert (train.train_batch_size, train.micro_train_batch_size, train.num_episodes) == (128, 4, 20)
    assert (config.data.image_key, config.data.prompt_max_len, config.data.max_eval_samples) == ("images", 1024, 700)
    # 602,112 = 768 x 28 x 28: 768 image tokens leave 256 for the problem.
    assert config.data.image_max_pixels == 768 * 28 * 28
    assert config.reward.reward_recipe is not None
    [recipe] = [read_recipes(config.reward.reward_recipe).of("geo3k")]
    assert [(part.component, part.weight) for part in recipe] == [("geo3k", 0.9), ("think_box", 0.1)]
