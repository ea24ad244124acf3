import asyncio
import inspect

import pytest

from lightrft.config import RewardConfig
from lightrft.config.arguments import RULE_NAMES
from lightrft.rewards.functions import RewardFunction
from lightrft.rewards.recipes import RewardPlan, plan_rewards
from lightrft.rewards.records import Grade, RewardInput
from lightrft.rewards.rule_options import LIMITS
from lightrft.rewards.rules import RULES

MODULE = """
def form(response, size=1): return float(len(response) >= size)
def batch(responses): return [0.0 for _ in responses]
async def later(response): return 0.0
def std(response): return 0.0
def needs(response, answer): return 0.0
"""


class Service:
    name = "judge"

    def check_row(self, sample: RewardInput) -> None:
        if sample.label == "unsendable":
            raise ValueError("label must have a form in JSON")

    def grade(self, inputs: list[RewardInput], runner: asyncio.Runner) -> list[Grade]:
        return [Grade(1.0) for _ in inputs]


@pytest.fixture
def module(tmp_path) -> str:
    (tmp_path / "mine.py").write_text(MODULE)
    return f"{tmp_path}/mine.py"


def plan(recipe: str | None = None, **given) -> RewardPlan:
    return plan_rewards(RewardConfig(reward_recipe=recipe), **given)


def names(plan: RewardPlan) -> list[str]:
    return [part.name for part in plan.recipes.of("any")]


def row(label: str, **extra) -> RewardInput:
    return RewardInput("1+1=", "", label, None, extra, 17, "stop")


def test_without_a_recipe_everything_that_is_configured_counts_once():
    assert names(plan()) == ["exact_match"]
    assert names(plan(services=[Service()], models=["helpful"])) == ["judge", "helpful"]
    own = RewardFunction("mine:f", lambda response: 0)
    assert names(plan(services=[Service()], own=own)) == ["f", "judge"]
    both = plan_rewards(RewardConfig(reward_fn="last_number"), models=["helpful"])
    assert [(part.name, part.weight) for part in both.recipes.of("any")] == [("last_number", 1.0), ("helpful", 1.0)]


def test_the_configuration_knows_the_rules_by_name():
    assert (*RULES,) == RULE_NAMES


def test_functions_of_one_response_run_in_grader_processes_and_all_others_in_the_thread(module):
    """A caller's own object may not exist in another process, and what is built in cannot hang."""
    recipe = f"{{a: {{{module}:form: 1, {module}:batch: 1, {module}:later: 1, exact_match: 1, answer: 1}}}}"
    found = plan(recipe)
    assert [spec.spec for spec in found.graders.values()] == [f"{module}:form", "answer"]
    assert len(found.functions) == 5
    assert plan(own=RewardFunction("mine:f", lambda response: 0)).graders == {}
    assert plan().graders == {}


def test_each_component_is_graded_by_what_has_its_name():
    found = plan("{a: {judge: 0.5, helpful: 0.5, exact_match: {weight: 2}}}", services=[Service()], models=["helpful"])
    parts = {part.name: part.key for part in found.recipes.of("a")}
    assert [*found.services] == [parts["judge"]] and found.models == {parts["helpful"]: "helpful"}
    assert [*found.functions] == [parts["exact_match"]]


def test_a_row_that_a_service_cannot_be_sent_is_found_at_the_start():
    judged = plan('{"*": {judge: 1}}', services=[Service()])
    judged.check_row(RewardInput("p", "", "1", None, {}, row=0, finish_reason="stop"))
    with pytest.raises(ValueError, match="label must have a form"):
        judged.check_row(RewardInput("p", "", "unsendable", None, {}, row=0, finish_reason="stop"))


@pytest.mark.parametrize(("options", "limit"), [("{}", 10.0), ("{seconds: 40}", 30.0)])
def test_a_program_must_have_less_time_than_its_grader(options, limit):
    settings = RewardConfig(reward_recipe=f"{{x: {{code: {options}}}}}", reward_timeout_seconds=limit)
    with pytest.raises(ValueError, match="code's seconds must be below reward_timeout_seconds"):
        plan_rewards(settings)
    plan_rewards(RewardConfig(reward_recipe=f"{{x: {{code: {options}}}}}", reward_timeout_seconds=60.0))


def test_an_unknown_component_is_an_error_with_the_known_ones():
    with pytest.raises(ValueError) as caught:
        plan("{a: {accurate: 1, judge: 1}}", services=[Service()])
    message = str(caught.value)
    assert message.startswith(
        "reward_recipe must name known components: accurate is none of exact_match, contains_answer"
    )
    assert "judge" in message and message.endswith("A function of yours is module:function.")
    with pytest.raises(ValueError, match=r"judge is none of .* judge needs --judge_url\.$"):
        plan("{a: {judge: 1}}")


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("exact: {ignore_case: maybe}", "ignore_case must be true or false: reward_recipe has 'maybe' for exact"),
        ("fuzzy: {threshold: '0.5'}", "threshold must be a number from 0 to 1: reward_recipe has '0.5' for fuzzy"),
        ("fuzzy: {threshold: .nan}", "threshold must be a number from 0 to 1: reward_recipe has nan for fuzzy"),
        ("fuzzy: {threshold: 5}", "threshold must be a number from 0 to 1: reward_recipe has 5 for fuzzy"),
        # Letter by letter it would be six tags.
        ("format: {tags: think}", "tags must be a list of different names, without < and >: reward_recipe has 'think'"),
        ("format: {tags: []}", r"reward_recipe has \[\] for format"),
        ("format: {tags: [a, a]}", r"reward_recipe has \['a', 'a'\] for format"),
        ("format: {tags: [<a>]}", r"reward_recipe has \['<a>'\] for format"),
        ("length: {max_length: ten}", "max_length must be a whole number of at least 0: reward_recipe has 'ten'"),
        ("length: {max_length: 2, min_length: 5}", "min_length must not exceed max_length: reward_recipe has 5 and 2"),
        ("overlong: {max_length: 9, buffer: 0}", "buffer must be a whole number above 0: reward_recipe has 0"),
        ("overlong: {max_length: 9, buffer: 10}", "buffer must not exceed max_length, .* reward_recipe has 10 and 9"),
        ("overlong: {max_length: null, buffer: 1}", "max_length must be a whole number above 0: .* has None"),
        ("code: {seconds: -1}", "seconds must be a number above 0: reward_recipe has -1 for code. Change it."),
        ("code: {memory_mib: 1.5}", "memory_mib must be a whole number above 0: reward_recipe has 1.5 for code"),
    ],
)
def test_an_option_that_its_rule_cannot_use_is_refused_before_anything_is_sampled(rule, message):
    with pytest.raises(ValueError, match=message):
        plan(f"{{a: {{{rule}}}}}")


def test_the_options_of_every_rule_have_limits_and_may_be_their_defaults():
    row = ("response", "response_length", "prompt", "gold", "tests", "numbers")
    for name, rule in RULES.items():
        parameters = inspect.signature(rule).parameters
        options = {name: parameter.default for name, parameter in parameters.items() if name not in row}
        assert options.keys() == LIMITS.get(name, {}).keys()
        for option, default in options.items():
            value = list(default) if isinstance(default, tuple) else default
            assert default is inspect.Parameter.empty or LIMITS[name][option].holds(value)


def test_what_a_recipe_may_not_do_is_refused_by_name(module):
    mine = RewardFunction("mine:f", lambda response: 0)
    for recipe, given, message in [
        (f"{{a: {{{module}:gone: 1}}}}", {}, "reward_recipe must name a function: "),
        (f"{{a: {{{module}:form: {{length: 3}}}}}}", {}, r":form has no length\. Its options are size\."),
        (f"{{a: {{{module}:std: 1}}}}", {}, "may not be called as a metric of the score is"),
        ("{a: {exact_match: 1}}", {"models": ["safe"]}, "safe is in none of its recipes"),
        ("{a: {judge: {max: 1}}}", {"services": [Service()]}, "judge takes no options but weight and ungradable"),
        ("{a: {exact_match: 1}}", {"own": mine}, "reward_fn=mine:f is given too"),
    ]:
        with pytest.raises(ValueError, match=message):
            plan(recipe, **given)


def test_a_row_whose_label_or_columns_do_not_fit_is_named_before_anything_is_sampled(module):
    """DATA-04"""
    found = plan(f"{{a: {{exact_match: 1}}, b: {{{module}:needs: 1}}}}")
    found.check_row(row("a"))
    found.check_row(row("b", answer=2))
    with pytest.raises(ValueError, match=r"row 17: a label must have a recipe: 'c' has none, reward_recipe has a, b\."):
        found.check_row(row("c"))
    with pytest.raises(ValueError, match="needs answer, row 17 has gold"):
        found.check_row(row("b"))
