"""Configurations and strategies for tests on real ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from lightrft.config import Config, DataConfig, ModelConfig, StrategyConfig
from lightrft.strategy.fsdp.fsdpv2 import FSDPV2Strategy
from lightrft.strategy.strategy import get_strategy


def config(pretrain: str = "unused", **owners: dict[str, Any]) -> Config:
    """A configuration on FSDP2; `owners` maps an owner to changes of its fields: `train={"seed": 1}`."""
    base = Config(
        ModelConfig(pretrain),
        DataConfig("unused"),
        strategy=StrategyConfig(fsdp=True, dist_timeout_seconds=60.0),
    )
    return replace(base, **{owner: replace(getattr(base, owner), **changes) for owner, changes in owners.items()})


@contextmanager
def fsdp(pretrain: str = "unused", **owners: dict[str, Any]) -> Iterator[FSDPV2Strategy]:
    """A strategy that is set up; it is closed when the test went well, since closing waits for all ranks."""
    strategy = get_strategy(config(pretrain, **owners))
    assert isinstance(strategy, FSDPV2Strategy)
    strategy.setup_distributed()
    yield strategy
    strategy.close()
