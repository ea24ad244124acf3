"""Whole runs on data of several forms."""

import json
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from lightrft.config import Config
from lightrft.trainer import build_trainer
from lightrft.utils.sampler import MixedSampler
from tests import tiny_models
from tests.distributed.runs import make_config, read

# "1+2=" becomes "a1+2= b": one token more in front and two behind.
TEMPLATE = "a{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %} b{% endif %}"


@pytest.fixture(scope="module")
def chat_task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a chat template, six prompts in JSON lines and ten conversations in Parquet."""
    folder = tmp_path_factory.mktemp("chat_task")
    tiny_models.save_model(folder / "model")
    tokenizer = tiny_models.tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    texts = [{"input": f"{i}+1=", "label": str(i)} for i in range(6)]
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    chats = [{"input": [{"role": "user", "content": f"{i}+2="}], "label": str(i)} for i in range(10)]
    parquet.write_table(pyarrow.Table.from_pylist(chats), folder / "chats.parquet")
    return folder


def run(config: Config) -> None:
    build_trainer(config).fit()


def test_two_ranks_train_on_a_mix_of_sources_in_the_samplers_order(two_ranks, chat_task, tmp_path):
    """Rows 0 to 5 and 6 to 15: 6 / 0.5 = 12 rows an episode, 3 batches of 4, each with 2 of both."""
    data = {
        "prompt_data": f"{chat_task}/texts.jsonl,{chat_task}/chats.parquet",
        "prompt_data_probs": "1,1",
        "apply_chat_template": True,
    }
    train = {"max_steps": 4, "num_episodes": 2, "seed": 3}
    config = make_config(chat_task, tmp_path / "run", data=data, train=train)
    two_ranks.run(run, config)
    samples = read(config, "samples.jsonl")
    batches = list(MixedSampler((6, 10), (0.5, 0.5), 4, 2, 3, "drop"))
    for step in range(1, 5):
        rows = [sample["row"] for sample in samples if sample["step"] == step and sample["index"] == 0]
        assert rows == batches[step - 1]
        assert sum(row < 6 for row in rows) == 2
    for sample in samples:
        row = sample["row"]
        assert sample["prompt"] == (f"a{row}+1= b" if row < 6 else f"a{row - 6}+2= b")
        assert sample["label"] == str(row if row < 6 else row - 6)
