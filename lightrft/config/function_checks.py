"""Checks of the flags that name functions, components of the reward and reward models; nothing of theirs is loaded."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from lightrft.config.alternatives import alternatives
from lightrft.config.arguments import ADVANTAGE_NAMES, POLICY_LOSS_NAMES, REWARD_NAMES, RULE_NAMES, Config
from lightrft.config.functions import is_function_spec
from lightrft.config.recipes import read_recipes
from lightrft.config.reward_models import reward_folders


def function_errors(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    yield from _rewards(config)
    yield from _function("advantage_estimator", algorithm.advantage_estimator, "estimator", ADVANTAGE_NAMES)
    yield from _function("policy_loss", algorithm.policy_loss, "policy loss", POLICY_LOSS_NAMES)


def _rewards(config: Config) -> Iterator[str]:
    """What is wrong with --reward_fn or --reward_recipe, of which components are looked for when functions are."""
    reward = config.reward
    if reward.reward_fn is not None:
        yield from _function("reward_fn", reward.reward_fn, "reward", REWARD_NAMES + RULE_NAMES)
    if reward.reward_recipe is None:
        return
    if reward.reward_fn is not None:
        yield (
            f"reward_recipe names the functions itself: reward_fn={reward.reward_fn} is set too. "
            "Drop --reward_fn, or --reward_recipe."
        )
    try:
        recipes = read_recipes(reward.reward_recipe)
    except (ValueError, OSError) as error:
        yield str(error)
        return
    for component in dict.fromkeys(part.component for part in recipes.parts().values()):
        if is_function_spec(component):
            yield from _function("reward_recipe", component, "component", ())


def _function(name: str, spec: str, kind: str, known: Sequence[str]) -> Iterator[str]:
    """What is wrong with a flag that takes a known name or a user's function."""
    module, _, function = spec.rpartition(":")
    if not is_function_spec(spec):
        if spec not in known:
            yield (
                f"{name} must be a built-in {kind} or module:function: {name}={spec}. "
                f"Set --{name} to {alternatives(known)}, or to module:function."
            )
    elif not (module and function.isidentifier()):
        yield (
            f"{name} must name a module and a function: {name}={spec}. "
            f"Set --{name} to module:function or path/to/file.py:function."
        )
    elif module.endswith(".py") and not Path(module).is_file():
        yield f"{name} must name an existing file: {module} is no file. Change --{name}."


def reward_model_errors(config: Config) -> Iterator[str]:
    reward = config.reward
    try:
        folders = reward_folders(reward.reward_pretrain)
    except ValueError as error:
        yield str(error)
        return
    if reward.reward_residency != "all" and not folders:
        yield (
            f"reward_residency is about reward models: reward_residency={reward.reward_residency}, and reward_pretrain "
            "names none. Set --reward_pretrain, or drop --reward_residency."
        )
