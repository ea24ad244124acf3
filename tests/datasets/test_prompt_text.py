import json
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from lightrft.config import DataConfig
from lightrft.datasets.prompt_text import prompt_renderer
from lightrft.datasets.prompts import load_prompts
from lightrft.datasets.sources import read_source
from tests.datasets.test_prompts import tokenizer

PLAIN = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}{% if add_generation_prompt %}[go]{% endif %}"
)
# Each token of the vocabulary is a word: what the template writes is `<s> a </s> b`, say.
WITH_BOS = "<s> {% for m in messages %}{{ m.content }} </s> {% endfor %}{% if add_generation_prompt %}c{% endif %}"
WITHOUT_BOS = WITH_BOS.removeprefix("<s> ")
STRICT = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role here') }}{% endif %}c"


def chat(template: str | None = PLAIN, adds: str | None = None, **values: object):
    words = tokenizer(adds)
    words.chat_template = template
    return words, DataConfig(prompt_data="", apply_chat_template=True, **values)


def rendered(value: object, template: str = PLAIN, **values: object) -> str:
    return prompt_renderer(*chat(template, **values))(value).text


def error(value: object, template: str = PLAIN, **values: object) -> str:
    with pytest.raises(ValueError) as caught:
        rendered(value, template, **values)
    return str(caught.value)


def turn(role: str, content: object = "x") -> dict[str, object]:
    return {"role": role, "content": content}


def test_plain_text_stays_or_stands_in_the_input_template():
    words = tokenizer()
    assert prompt_renderer(words, DataConfig(""))("a {} {b}").text == "a {} {b}"
    render = prompt_renderer(words, DataConfig("", input_template="Q: {} Write \\boxed{{}}."))
    assert render("a {} {b}").text == "Q: a {} {b} Write \\boxed{}."


def test_a_text_is_one_message_of_the_user_and_the_models_turn_is_opened():
    assert rendered("hi") == "[user] hi [go]"
    assert rendered("hi", system_prompt="Be brief.") == "[system] Be brief. [user] hi [go]"


def test_messages_are_written_in_their_order_and_the_flags_system_prompt_replaces_their_own():
    messages = [turn("system", "s"), turn("user", "u"), turn("assistant", "a"), turn("user", "v")]
    assert rendered(messages) == "[system] s [user] u [assistant] a [user] v [go]"
    assert rendered(messages, system_prompt="S") == "[system] S [user] u [assistant] a [user] v [go]"
    assert rendered(messages[1:2], system_prompt="") == "[system]  [user] u [go]"
    assert messages[0] == turn("system", "s")


def test_a_chat_prompt_keeps_what_its_template_was_given_and_a_plain_one_has_none():
    """A reward model writes it by a template of its own."""
    render = prompt_renderer(*chat(system_prompt="S"))
    assert render("hi").messages == [turn("system", "S"), turn("user", "hi")]
    assert prompt_renderer(tokenizer(), DataConfig(""))("hi").messages is None


@pytest.mark.parametrize("template", [WITH_BOS, WITHOUT_BOS])
@pytest.mark.parametrize("adds", [None, "<s> $A", "<s> $A </s>"])
def test_a_chat_prompt_has_exactly_one_bos_whoever_adds_it(template, adds, tmp_path: Path):
    """DATA-01: a, </s>, c are 3, 1 and 5; only where neither adds a BOS (0) there is none."""
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"input": [turn("user", "a")], "label": 1}))
    words, data = chat(template, adds)
    (example,) = load_prompts(str(path), "train", words, data, None)
    bos = [] if template == WITHOUT_BOS and adds is None else [0]
    assert example.prompt_ids == [*bos, 3, 1, 5]
    assert example.prompt == ("<s> a </s> c" if template == WITH_BOS else "a </s> c")


def test_keys_that_only_other_messages_of_a_table_have_are_none_of_a_message(tmp_path):
    """Parquet fills them up with null."""
    called = "{% if 'tool_calls' in m %} {{ m.tool_calls | length }}{% endif %}"
    template = "{% for m in messages %}{{ m.content }}" + called + " {% endfor %}"
    rows = [{"input": [turn("user"), turn("assistant") | {"tool_calls": ["f"]}, turn("tool")], "label": 1}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    ((_, row),) = read_source(str(tmp_path / "a.parquet"), "train").rows
    assert row["input"][0]["tool_calls"] is None
    assert rendered(row["input"], template) == "x x 1 x "


def test_a_tokenizer_without_a_chat_template_is_refused():
    with pytest.raises(ValueError, match=r"needs a tokenizer with a chat template: .* Drop --apply_chat_template"):
        prompt_renderer(*chat(None))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", "'input' must be a text or a list of messages, and not empty: got ''."),
        ([], "'input' must be a text or a list of messages, and not empty: got []."),
        (5, "'input' must be a text or a list of messages, and not empty: got 5."),
        (None, "'input' must be a text or a list of messages, and not empty: got None."),
        ({"role": "user"}, "'input' must be a text or a list of messages, and not empty: got {'role': 'user'}."),
        (["a"], "a message must be an object with the texts role and content: message 0 of 'input' is 'a'."),
        ([turn("user"), turn("user", None)], "message 1 of 'input' is {'content': None, 'role': 'user'}."),
        ([{"content": "x"}], "message 0 of 'input' is {'content': 'x'}."),
        ([turn("user"), turn("assistant")], "the last message of 'input' must not be the assistant's"),
        ("\ud800", "'input' must be Unicode text: 'utf-8' codec can't encode character"),
    ],
)
def test_a_value_that_is_no_conversation_is_refused(value, message):
    assert message in error(value)


def test_what_the_template_refuses_is_told_with_the_roles():
    said = error([turn("system"), turn("user")], STRICT)
    assert "no system role here (roles: system, user). Change them, or --system_prompt." in said
    assert "(roles: system, user)" in error("hi", STRICT, system_prompt="Be brief.")
