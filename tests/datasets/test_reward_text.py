import pytest

from lightrft.datasets.prompt_ids import tokenize
from lightrft.datasets.reward_text import reward_text
from tests.datasets.test_prompt_text import PLAIN, STRICT, WITH_BOS, WITHOUT_BOS, turn
from tests.datasets.test_prompts import tokenizer

MESSAGES = [turn("system", "s"), turn("user", "u")]


def words(template: str | None, adds: str | None = None):
    made = tokenizer(adds)
    made.chat_template = template
    return made


def test_a_conversation_is_written_by_the_models_own_template_and_no_turn_is_opened():
    assert reward_text(words(PLAIN), "of the actor", MESSAGES, "r") == "[system] s [user] u [assistant] r "
    assert len(MESSAGES) == 2


def test_without_messages_or_without_a_template_the_response_follows_the_prompt_as_it_is():
    assert reward_text(words(PLAIN), "1+1=", None, "2") == "1+1=2"
    assert reward_text(words(None), "<actor>u", MESSAGES, "r") == "<actor>ur"


def test_a_template_that_does_not_take_the_roles_is_a_users_mistake():
    with pytest.raises(ValueError, match=r"no system role here \(roles: system, user, assistant\)"):
        reward_text(words(STRICT), "", MESSAGES, "r")


@pytest.mark.parametrize("template", [WITH_BOS, WITHOUT_BOS])
@pytest.mark.parametrize("adds", [None, "<s> $A", "<s> $A </s>"])
def test_it_has_exactly_one_bos_whoever_adds_it(template, adds):
    """DATA-01: a, </s> and b are 3, 1 and 4; only where neither adds a BOS (0) there is none."""
    made = words(template, adds)
    [ids] = tokenize([reward_text(made, "", [turn("user", "a")], "b")], made)
    bos = [] if template == WITHOUT_BOS and adds is None else [0]
    assert ids == [*bos, 3, 1, 4, 1]
