import pytest

from lightrft.config.steps import chosen_steps


def test_steps_are_numbers_between_commas():
    assert chosen_steps("3, 4,100") == {3, 4, 100}
    assert chosen_steps(None) == frozenset()


@pytest.mark.parametrize("text", ["", "0", "3,", "3-5", "-1", "three", "1.5"])
def test_anything_else_is_refused(text):
    with pytest.raises(ValueError, match="numbers from 1 on") as caught:
        chosen_steps(text)
    assert repr(text) in str(caught.value)
