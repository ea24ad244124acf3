"""Users' mistakes: one message that names values and remedy, before any model is loaded."""

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import Gemma2Config, T5Config

from lightrft.config import dump_yaml, parse_config
from lightrft.trainer import build_trainer
from lightrft.utils.logging import ROOT
from tests import tiny_models
from tests.distributed.runs import make_config
from tests.distributed.torchrun import torchrun

TRAIN = Path(__file__).parents[2] / "examples" / "addition" / "train.py"


@pytest.fixture(scope="module")
def folder(task, tmp_path_factory) -> Path:
    """Models without weights, which cannot be loaded: a check that comes after loading would not be reached; and one
    with them, for what is checked after that."""
    folder = tmp_path_factory.mktemp("bad_input")
    shutil.copytree(task / "model", folder / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    shutil.copytree(task / "model", folder / "whole")
    (folder / "model_without_tokenizer").mkdir()
    shutil.copy(folder / "model" / "config.json", folder / "model_without_tokenizer")
    for name, config in (("t5", T5Config()), ("gemma2", Gemma2Config()), ("gpt2", tiny_models.gpt2())):
        config.save_pretrained(folder / name)
        tiny_models.tokenizer().save_pretrained(folder / name)
    (folder / "run.yaml").write_text(dump_yaml(make_config(task, folder / "run", model={"pretrain": "model"})))
    return folder


@pytest.fixture
def mistake(folder, monkeypatch, capsys) -> Iterator:
    """What stderr holds after a start with these flags in the place of right ones, on so many ranks."""
    logger = logging.getLogger(ROOT)
    before = (logger.handlers, logger.level, logger.propagate)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("RANK", "0")

    def start(*flags: str, world_size: int = 1) -> str:
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
        with pytest.raises(SystemExit) as stop:
            build_trainer(parse_config(["--config", "run.yaml", *flags]))
        assert stop.value.code == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        return "".join(line for line in captured.err.splitlines(keepends=True) if " INFO " not in line)

    yield start
    logger.handlers, logger.level, logger.propagate = before


def test_a_world_size_that_the_rollout_group_does_not_divide(mistake):
    """DIST-04: 6 = 1 x 2 x 3; the batches fit 6 ranks: 24 = 4 x 6."""
    flags = ["--engine_tp_size=4", "--train_batch_size=24", "--rollout_batch_size=6"]
    assert mistake(*flags, world_size=6) == (
        "error: WORLD_SIZE must be a multiple of engine_tp_size: 6 ranks, engine_tp_size=4. "
        "Set --engine_tp_size to 1, 2, 3 or 6.\n"
    )


def test_a_rollout_group_that_the_attention_heads_do_not_divide_into(mistake):
    """DIST-04"""
    flags = ["--engine_tp_size=3", "--train_batch_size=12", "--rollout_batch_size=3"]
    assert mistake(*flags, world_size=3) == (
        "error: engine_tp_size must divide the model's attention heads: 4 heads, engine_tp_size=3. "
        "Set --engine_tp_size to a divisor of 4.\n"
    )


def test_a_train_batch_that_the_micro_batches_of_all_ranks_do_not_divide(mistake):
    """CLI-02: 2 x 7 = 14; 256 lies between 18 x 14 = 252 and 19 x 14 = 266."""
    flags = ["--micro_train_batch_size=2", "--train_batch_size=256", "--rollout_batch_size=64"]
    assert mistake(*flags, world_size=7) == (
        "error: train_batch_size must be a multiple of micro_train_batch_size x ranks: 256, 2 x 7 ranks = 14. "
        "Set --train_batch_size to 252 or 266.\n"
    )


def test_a_rollout_that_is_no_multiple_of_the_train_batch(mistake):
    """3 x 4 = 12 of 16. Prompts: 16 / 4 = 4. Of the divisors of 12, 4 and 12 are multiples of the micro-batch 4."""
    assert mistake("--rollout_batch_size=3") == (
        "error: rollout_batch_size x n_samples_per_prompt must be a multiple of train_batch_size: 3 x 4 = 12, "
        "train_batch_size=16. Set --rollout_batch_size to 4, or --train_batch_size to 12.\n"
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--advantage_estimator", "grpo"], ["advantage_estimator=grpo", "--advantage_estimator to gae, group_norm"]),
        (["--engine_type", "tensorrt"], ["'tensorrt'", "--engine_type", "'torch'"]),
        (["--max_steps", "many"], ["many", "--max_steps"]),
        (["--temprature", "1"], ["--temprature", "--temperature"]),
    ],
)
def test_a_value_or_flag_that_the_parser_does_not_know_is_a_usage_error_with_the_known_ones(mistake, flags, words):
    """The parser's message is a box that breaks lines."""
    message = " ".join(mistake(*flags).replace("│", " ").split())
    assert [word for word in words if word not in message] == []
    assert "Traceback" not in message


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--zero_stage 2",
            "zero_stage is a setting of DeepSpeed, and fsdp trains with FSDP2: both are set, zero_stage=2. "
            "Drop --zero_stage (FSDP2 deals out what stage 3 does), or drop --fsdp.",
        ),
        (
            "--reward_fn accurate",
            "reward_fn must be a built-in reward or module:function: reward_fn=accurate. "
            "Set --reward_fn to exact_match, contains_answer, last_number, answer, geo3k, choice, exact, fuzzy, "
            "countdown, code, format, think_box, length or overlong, or to module:function.",
        ),
        ("--pretrain /nowhere/model", "the model folder must exist: /nowhere/model does not. Check the path."),
        (
            "--pretrain t5",
            "the model must be a causal language model: t5 holds a t5 (no architecture named). Choose another folder; "
            "those that take media are qwen2_vl, qwen2_5_vl, qwen3_vl, internvl, qwen2_audio.",
        ),
        (
            "--pretrain gemma2",
            "models that change their logits after the head are not supported: gemma2 (gemma2) has "
            "final_logit_softcapping. Choose another model.",
        ),
        (
            "--advantage_estimator gae --critic_pretrain /nowhere/critic",
            "the model folder must exist: /nowhere/critic does not. Check the path.",
        ),
        (
            "--pretrain model_without_tokenizer",
            "the model folder must hold a tokenizer (tokenizer.json): model_without_tokenizer does not. "
            "Copy the tokenizer's files there.",
        ),
        (
            "--generate_max_len 57",
            "prompt and response must fit into the model's context: prompt_max_len=8 + generate_max_len=57 = 65 "
            "tokens, context 64. Lower one of them by 1 or more.",
        ),
        (
            "--pretrain gpt2 --generate_max_len 57",
            "prompt and response must fit into the model's context: prompt_max_len=8 + generate_max_len=57 = 65 "
            "tokens, context 64. Lower one of them by 1 or more.",
        ),
        (
            "--prompt_data nowhere.jsonl --eval_data gone.jsonl",
            "prompt_data must name files, folders or hub ids: 'nowhere.jsonl' is no file. Change --prompt_data.\n"
            "eval_data must name files, folders or hub ids: 'gone.jsonl' is no file. Change --eval_data.",
        ),
        (
            "--rollout_batch_size 16 --train_batch_size 64",
            "A data set must fill a rollout batch: 12 prompts < rollout_batch_size=16. "
            "Set a smaller --rollout_batch_size, or give more prompts.",
        ),
        (
            "--pretrain whole --save_path /proc/nowhere/run",
            "save_path must be a folder that can be written: [Errno 2] No such file or directory: '/proc/nowhere'. "
            "Change --save_path.",
        ),
    ],
)
def test_a_mistake_is_told_in_one_message(mistake, flags, message):
    assert mistake(*flags.split()) == f"error: {message}\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "A source of prompts must have rows: {0} has none. Change the source."),
        (
            b'{"input": "1+1=", "label": "2"}\n{"input": "1+2="}\n',
            "{0}, row 1 (line 2): no key 'label': it has input. Add it or set --label_key.",
        ),
        (
            b'{"input": 7, "label": "2"}',
            "{0}, row 0 (line 1): 'input' must be a text that is not empty: got 7.",
        ),
        (
            b'{"input": [{"role": "user", "content": "1+1="}], "label": "2"}',
            "{0}, row 0 (line 1): 'input' is a list of messages, which needs the chat template. "
            "Add --apply_chat_template.",
        ),
        (
            b'{"input": "1\xff", "label": "2"}',
            "{0} must hold one JSON object a line, in UTF-8: line 1: 'utf-8' codec can't decode byte 0xff in position "
            "12: invalid start byte. Correct the line.",
        ),
        (
            b'{"input": "1+1+1+1+1=", "label": "5"}\n' * 20,
            "A source needs a prompt of at most prompt_max_len tokens: 0 of 20 rows of {0} are left at "
            "prompt_max_len=8. Raise --prompt_max_len, or set --overlong_prompts truncate.",
        ),
        (
            b'{"input": "1+1=", "label": "2"}\n' * 3,
            "A data set must fill a rollout batch: 3 prompts < rollout_batch_size=4. "
            "Set a smaller --rollout_batch_size, or give more prompts.",
        ),
    ],
)
def test_data_that_cannot_be_trained_on_is_told_with_its_place(mistake, tmp_path, content, message):
    """DATA-03, DATA-04"""
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    assert mistake("--prompt_data", str(path)) == f"error: {message.format(path)}\n"


def test_a_chat_template_that_the_tokenizer_does_not_have(mistake):
    assert mistake("--apply_chat_template") == (
        "error: apply_chat_template needs a tokenizer with a chat template: model has none. "
        "Drop --apply_chat_template (and set --input_template), or choose a chat model.\n"
    )


def test_shares_that_do_not_fit_the_sources(mistake, task):
    assert mistake("--prompt_data_probs", "0.5,0.5") == (
        "error: prompt_data_probs must have a share for each source: 2 shares (0.5,0.5), 1 sources in prompt_data. "
        "Change one of them.\n"
    )


def test_a_folder_without_weights_is_told_before_anything_loads(mistake):
    assert mistake() == (
        "error: the model folder must hold weights (*.safetensors or *.bin): model has none. Copy them there, or "
        "choose another folder.\n"
    )


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def f(response:", "must name a module that loads: {0}:f: SyntaxError: '(' was never closed ({0}, line 1)."),
        ("\nimport nowhere", "ModuleNotFoundError: No module named 'nowhere' ({0}, line 2). Correct the module."),
        ("\n\nint('x')", "ValueError: invalid literal for int() with base 10: 'x' ({0}, line 3). Correct the module."),
        ("def g(response): pass", "reward_fn must name a function: {0} has no f. Its functions: g."),
        ("def f(answer): pass", "first parameter must be response or responses: {0}:f has answer."),
        (
            "def f(response, solution): pass",
            "parameters must be columns or have defaults: {0}:f needs solution, row 0 has gold, media, "
            "response_length, prompt, label, reference, finish_reason. Rename the parameter, give it a default, or "
            "set it in --reward_recipe.",
        ),
        ("def f(responses, label): pass", "{0}:f needs label, row 0 has gold, media, response_length, prompts, "),
    ],
)
def test_a_reward_function_that_cannot_be_used_is_told_with_its_line(mistake, tmp_path, code, message):
    (tmp_path / "mine.py").write_text(code)
    (line,) = mistake("--reward_fn", f"{tmp_path}/mine.py:f").splitlines()
    assert line.startswith("error: ")
    assert message.format(f"{tmp_path}/mine.py") in line


def test_under_torchrun_rank_0_tells_it_once_and_all_ranks_end(folder, monkeypatch):
    """A mistake in the flags, found before models are imported; `test_reports.py` has one that is found after."""
    monkeypatch.chdir(folder)
    ended = torchrun(TRAIN, "--config", "run.yaml", "--train_batch_size=12", "--rollout_batch_size=3")
    message = (
        "train_batch_size must be a multiple of micro_train_batch_size x ranks: 12, 4 x 2 ranks = 8. "
        "Set --train_batch_size to 8 or 16."
    )
    assert ended.returncode != 0
    assert ended.left == []
    assert ended.seconds < 45
    assert f"error: {message}\n" in ended.output
    assert ended.output.count("error: ") == 1
    # The only traceback is torchrun's own, after the message.
    assert "lightrft/trainer" not in ended.output[ended.output.index(message) + len(message) :]
