"""RewardPlan: which function, service or model grades each component of the reward."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightrft.config.arguments import RewardConfig
from lightrft.config.functions import is_function_spec, module_errors
from lightrft.config.recipes import Part, Recipes, read_recipes, sum_of
from lightrft.rewards.builtin import REWARDS
from lightrft.rewards.code import CODE_SECONDS
from lightrft.rewards.functions import BUILT_IN, RewardFunction, resolve_reward
from lightrft.rewards.grader_server import GraderSpec
from lightrft.rewards.records import RESERVED_COMPONENTS, RewardInput, RewardSource
from lightrft.rewards.rule_options import check_rule_options

DEFAULT_REWARD = "exact_match"
"""What rewards where no flag says it."""
CONFIGURED_BY = {"remote_rm": "--remote_rm_url", "judge": "--judge_url", "reward_model": "--reward_pretrain"}
"""Flags without which these are no components."""


@dataclass(frozen=True)
class RewardPlan:
    recipes: Recipes
    functions: Mapping[str, RewardFunction]
    """By the keys of their parts."""
    services: Mapping[str, RewardSource]
    """By the keys of their parts."""
    models: Mapping[str, str]
    """Names of local reward models, by the keys of their parts."""
    graders: Mapping[str, GraderSpec]
    """What of `functions` runs in grader processes, in their order there."""

    @property
    def reward_fn(self) -> str | None:
        """What --reward_fn says of it, where one function is the whole reward."""
        parts = self.recipes.parts().values()
        return next((part.component for part in parts if part.is_whole and part.key in self.functions), None)

    def check_row(self, sample: RewardInput) -> None:
        """Raises ValueError where the row's label has no recipe, or a function or service cannot take its columns."""
        try:
            recipe = self.recipes.of(sample.label)
        except ValueError as error:
            raise ValueError(f"row {sample.row}: {error}") from error
        for part in recipe:
            source = self.functions.get(part.key) or self.services.get(part.key)
            if source is not None:
                source.check_row(sample)


def plan_rewards(
    options: RewardConfig,
    services: Sequence[RewardSource] = (),
    models: Sequence[str] = (),
    own: RewardFunction | None = None,
) -> RewardPlan:
    """What grades each component of the recipes, or of everything that is configured where there are none.

    Args:
        options: Names functions and recipes.
        services: Sources of components that the flags configure.
        models: Names of local reward models.
        own: A function that the caller has itself, in the place of the one that --reward_fn names.

    Raises:
        ValueError: A component is unknown, configured and not used, or has an option that it does not take; or a
            function cannot be loaded.
    """
    recipes = _recipes(options, services, models, own)
    parts = recipes.parts()
    by_name = {service.name: service for service in services}
    _check_names(parts, [*by_name, *models])
    functions = {
        key: _function(part, options, [*by_name, *models], own)
        for key, part in parts.items()
        if part.component not in (*by_name, *models)
    }
    return RewardPlan(
        recipes,
        functions,
        {key: by_name[part.component] for key, part in parts.items() if part.component in by_name},
        {key: part.component for key, part in parts.items() if part.component in models},
        {
            key: GraderSpec(parts[key].component, parts[key].options)
            for key, function in functions.items()
            if _may_hang(function, own)
        },
    )


def _recipes(
    options: RewardConfig, services: Sequence[RewardSource], models: Sequence[str], own: RewardFunction | None
) -> Recipes:
    name = options.reward_fn if own is None else own.name
    if options.reward_recipe is not None:
        if name is not None:
            raise ValueError(
                f"reward_recipe names the functions itself: reward_fn={name} is given too. Drop one of them."
            )
        return read_recipes(options.reward_recipe)
    configured = [service.name for service in services] + [*models]
    return sum_of([name, *configured] if name is not None else configured or [DEFAULT_REWARD])


def _check_names(parts: Mapping[str, Part], configured: Sequence[str]) -> None:
    """Names that metrics, or two components, would share; and what is configured for nothing."""
    for part in parts.values():
        if part.name in RESERVED_COMPONENTS and not part.is_whole:
            raise ValueError(
                f"a component may not be called as a metric of the score is, {', '.join(RESERVED_COMPONENTS)}: "
                f"{part.component}. Rename the function."
            )
    used = {part.component for part in parts.values()}
    for name in configured:
        if name not in used:
            raise ValueError(
                f"reward_recipe must use what is configured: {name} is in none of its recipes. Add it, or drop the "
                "flag that configures it."
            )
        options = [option for part in parts.values() if part.component == name for option in part.options]
        if options:
            raise ValueError(
                f"{name} takes no options but weight and ungradable: reward_recipe gives it {', '.join(options)}. "
                "Drop them: its flags configure it."
            )


def _function(
    part: Part, options: RewardConfig, configured: Sequence[str], own: RewardFunction | None
) -> RewardFunction:
    if own is not None and part.component == own.name:
        return own
    flag = "reward_fn" if options.reward_recipe is None else "reward_recipe"
    if not is_function_spec(part.component) and part.component not in BUILT_IN:
        known = [*BUILT_IN, *configured]
        raise ValueError(
            f"{flag} must name known components: {part.component} is none of {', '.join(known)}. "
            f"A function of yours is module:function.{_missing_flag(part.component)}"
        )
    check_rule_options(part.component, part.options)
    if part.component == "code":
        _check_code_seconds(part.options.get("seconds", CODE_SECONDS), options.reward_timeout_seconds)
    with module_errors(flag, part.component):
        return resolve_reward(part.component, part.options, flag)


def _check_code_seconds(seconds: float, timeout_seconds: float) -> None:
    # The grader's own limit would end a slow program as ungradable, where the rule's makes it wrong.
    if seconds >= timeout_seconds:
        raise ValueError(
            f"code's seconds must be below reward_timeout_seconds: {seconds:g} and {timeout_seconds:g}. Lower the "
            "rule's, or raise --reward_timeout_seconds."
        )


def _missing_flag(component: str) -> str:
    return f" {component} needs {CONFIGURED_BY[component]}." if component in CONFIGURED_BY else ""


def _may_hang(function: RewardFunction, own: RewardFunction | None) -> bool:
    """Whether it runs in grader processes: a caller's own object may not exist there, and built-in ones are trivial."""
    return function is not own and function.name not in REWARDS and not function.keeps_its_thread
