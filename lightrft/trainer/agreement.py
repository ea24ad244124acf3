"""Agreement: what every rank of a run must have alike, though each node's command line and files say it anew."""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from typing import Any

from lightrft.config.flags import flag_values
from lightrft.models.loading import LoadedConfig
from lightrft.strategy.utils.distributed_util import format_ranks
from lightrft.strategy.utils.process_groups import ProcessGroups

OF_A_NODE = {
    *("reward_workers", "media_workers", "print_memory_ledger"),
    *("use_wandb", "wandb_project", "wandb_run_name", "wandb_group", "wandb_org"),
}
"""Flags of a node's own processes, and those that rank 0 alone reads."""
PLACES = {
    *("pretrain", "critic_pretrain", "teacher_pretrain", "lora_path", "save_path", "ckpt_path"),
    *("prompt_data", "eval_data", "pretrain_data", "train_data", "teacher_url", "remote_rm_url", "judge_url"),
}
"""What a node may have elsewhere: whether it is given counts."""
FILES = {"reward_fn", "reward_recipe", "reward_pretrain", "advantage_estimator", "policy_loss", "judge_prompt"}
"""What may name a file, whose folder does not count."""
_NAMED = 5
"""Flags that an error shows."""


def check_same_flags(groups: ProcessGroups, config: Any) -> None:
    """Every rank must call it.

    Args:
        config: A Config, or another dataclass of owners.

    Raises:
        ValueError: On all ranks, where flags differ that decide what they compute.
    """
    first, *others = _gathered(groups, flag_values(config))
    for rank, own in enumerate(others, start=1):
        differing = [name for name in first if _core(name, first[name]) != _core(name, own[name])]
        if differing:
            shown = [f"--{n} is {first[n]!r} on rank 0 and {own[n]!r} on rank {rank}" for n in differing]
            more = f", and {len(shown) - _NAMED} others differ" if len(shown) > _NAMED else ""
            raise ValueError(
                f"every rank must have the same flags: {', '.join(shown[:_NAMED])}{more}. Start all nodes by one "
                "command line or configuration file."
            )


def check_same_contents(groups: ProcessGroups, contents: Mapping[str, Any], remedy: str) -> None:
    """Every rank must call it.

    Args:
        contents: What each thing holds that was read from files, by its name, or what stands for it.
        remedy: What to do, for the error.

    Raises:
        ValueError: On all ranks, where the contents are not those of rank 0.
    """
    everyone = _gathered(groups, dict(contents))
    for name, held in everyone[0].items():
        others = [rank for rank, theirs in enumerate(everyone) if theirs[name] != held]
        if others:
            raise ValueError(
                f"every rank must have the same {name}: {format_ranks(others)} and rank 0 differ. {remedy}"
            )


def model_identity(loaded: LoadedConfig) -> str:
    """Hash of what the model's configuration says, wherever it lies."""
    said = loaded.hf_config.to_dict()
    said.pop("_name_or_path", None)
    return hashlib.sha256(json.dumps(said, default=str, sort_keys=True).encode()).hexdigest()


def _gathered(groups: ProcessGroups, own: dict[str, Any]) -> list[dict[str, Any]]:
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return [own]
    with groups.early_collectives() as ranks:
        return ranks.all_gather_objects(own)


def _core(name: str, value: Any) -> Any:
    """What of a flag's value must be alike."""
    if name in OF_A_NODE:
        return None
    if name in PLACES:
        return value is None
    if name in FILES and isinstance(value, str):
        return re.sub(r"[^\s\"':,=]*/", "", value)
    return value
