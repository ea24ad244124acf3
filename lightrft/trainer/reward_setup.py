"""Reward setup: what grades the responses of a run, checked, and its processes."""

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from lightrft.config import Config
from lightrft.config.functions import function_spec
from lightrft.config.reward_models import reward_folders
from lightrft.rewards.functions import RewardFunction
from lightrft.rewards.pool import GraderPool
from lightrft.rewards.recipes import RewardPlan, plan_rewards
from lightrft.rewards.remote import remote_sources
from lightrft.trainer.reward_engine import reward_input
from lightrft.types import PromptExample

RewardCallable: TypeAlias = Callable[..., Any]
"""A reward function as users write it: `RewardFunction` says how it is called."""


def load_rewards(config: Config, reward_fn: RewardCallable | None = None) -> RewardPlan:
    """What grades each component of the reward: the caller's function, and what the flags name."""
    own = None
    if reward_fn is not None:
        if not callable(reward_fn):
            raise ValueError(f"reward_fn must be a function: got {reward_fn!r}. Names are for --reward_fn.")
        own = RewardFunction(function_spec(reward_fn), reward_fn)
    models = reward_folders(config.reward.reward_pretrain)
    return plan_rewards(config.reward, remote_sources(config), [*models], own)


def check_rows(rewards: RewardPlan, data: Mapping[str, Iterable[PromptExample]]) -> None:
    """Raises ValueError for the first row whose label or columns the reward cannot do with; `data` is by its flag."""
    for flag, examples in data.items():
        for example in examples:
            try:
                rewards.check_row(reward_input(example, response="", finish_reason="stop"))
            except ValueError as error:
                raise ValueError(f"{flag}: {error}") from error


def start_graders(config: Config, rewards: RewardPlan) -> GraderPool | None:
    """This rank's share of the node's grader processes, where functions run in such."""
    if not rewards.graders:
        return None
    options = config.reward
    num_workers = options.reward_workers or max(1, (os.cpu_count() or 1) // 2)
    share = num_workers // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return GraderPool([*rewards.graders.values()], max(1, share), options.reward_timeout_seconds)
