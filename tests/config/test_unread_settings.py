"""Settings without the flag that reads them are refused, and are taken with it."""

from dataclasses import replace
from typing import Any

import pytest

from lightrft.config import Config, DataConfig, ModelConfig
from lightrft.config.flags import flag_values
from lightrft.config.unread_settings import READERS, unread_setting_errors

OTHER_VALUES: dict[type, Any] = {int: 7, float: 0.25, bool: True, str: "other", type(None): "other", tuple: (1.0, 2.0)}
PLAIN = Config(ModelConfig("model"), DataConfig("data"))


def with_flag(config: Config, name: str, value: object) -> Config:
    """The configuration with one flag changed, whichever of its parts that is in."""
    [part] = [part for part, owner in vars(config).items() if hasattr(owner, name)]
    return replace(config, **{part: replace(getattr(config, part), **{name: value})})


@pytest.mark.parametrize(("reader", "name"), [(reader, name) for reader, names in READERS.items() for name in names])
def test_a_setting_that_nothing_reads_is_one_error_and_none_with_its_reader(reader, name):
    other = OTHER_VALUES[type(flag_values(PLAIN)[name])]
    alone = with_flag(PLAIN, name, other)
    assert list(unread_setting_errors(alone, ())) == [
        f"{name} is a setting of {reader}: {name}={other}, and {reader} is unset. Set --{reader}, or drop --{name}."
    ]
    is_switch = flag_values(PLAIN)[reader] is False
    assert not list(unread_setting_errors(with_flag(alone, reader, True if is_switch else "set"), ()))


def test_evaluation_of_rows_that_a_program_hands_over_reads_its_settings():
    config = with_flag(PLAIN, "eval_steps", 5)
    assert list(unread_setting_errors(config, ())) and not list(unread_setting_errors(config, ("eval_data",)))
