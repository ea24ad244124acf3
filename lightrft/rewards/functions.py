"""Reward functions: built-in ones and the user's own, called with the columns that they ask for."""

import asyncio
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

from lightrft.config.functions import is_function_spec, load_function
from lightrft.rewards.builtin import REWARDS
from lightrft.rewards.records import RESERVED_COMPONENTS, RewardInput, RewardOutput

NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class RewardFunction:
    """A function of one `response` or of a batch of `responses`, plain or async, as a function of RewardInputs.

    The name of the first parameter says which it is. By keyword come those of `prompt`, `label`, `reference`,
    `finish_reason` (for a batch, lists with these names in the plural) and the row's further columns (under their own
    names, for a batch as lists) that the signature accepts. It gives, for each sample, a number, None for a sample to
    leave out, or a mapping with `score` and further numbers. What it raises propagates.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name = name
        self.function = function
        parameters = list(inspect.signature(function).parameters.values())
        first = parameters[0].name if parameters else "none"
        if first not in ("response", "responses"):
            raise ValueError(
                f"A reward function's first parameter must be response or responses: {name} has {first}. "
                "Name it response to be given one sample at a time, responses to be given a list."
            )
        self.is_batch = first == "responses"
        self.parameters = {parameter.name: parameter for parameter in parameters[1:] if parameter.kind in NAMED}
        self.takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)

    def __call__(self, inputs: Sequence[RewardInput], runner: asyncio.Runner) -> list[RewardOutput]:
        """One output for each input, in order.

        Args:
            runner: Whose event loop runs what is async: a run's one loop, for a user's client or lock is bound to it.

        Raises:
            ValueError: a required parameter has no column, or a result is missing, of a wrong type, not finite or
                named like a metric of the score.
        """
        if not inputs:
            return []
        results = self._call_batch(inputs, runner) if self.is_batch else self._call_singles(inputs, runner)
        return [self._output(result, sample.row) for result, sample in zip(results, inputs, strict=True)]

    def check_columns(self, sample: RewardInput) -> None:
        """Raises ValueError where a required parameter has no column in the sample's row."""
        columns = _columns(sample)
        self._accepted(_plural_names(columns) if self.is_batch else columns, sample.row)

    def _call_singles(self, inputs: Sequence[RewardInput], runner: asyncio.Runner) -> list[Any]:
        # All arguments first: an error among them must not leave coroutines that nobody awaits.
        arguments = [self._accepted(_columns(sample), sample.row) for sample in inputs]
        results = [
            self.function(sample.response, **keywords) for sample, keywords in zip(inputs, arguments, strict=True)
        ]
        return runner.run(_gather(results)) if any(map(inspect.isawaitable, results)) else results

    def _call_batch(self, inputs: Sequence[RewardInput], runner: asyncio.Runner) -> list[Any]:
        rows = [_columns(sample) for sample in inputs]
        for columns, sample in zip(rows, inputs, strict=True):
            self._accepted(_plural_names(columns), sample.row)
        names = dict.fromkeys(name for columns in rows for name in columns)
        lists = {_plural(name): [columns.get(name) for columns in rows] for name in names}
        results = self.function([sample.response for sample in inputs], **self._accepted(lists, inputs[0].row))
        if inspect.isawaitable(results):
            (results,) = runner.run(_gather([results]))
        if not isinstance(results, Iterable) or isinstance(results, str | Mapping):
            raise ValueError(f"A batch reward must return a list: {self.name} returned {type(results).__name__}.")
        results = list(results)
        if len(results) != len(inputs):
            raise ValueError(
                f"A batch reward must return one result for each response: {self.name} returned {len(results)} "
                f"for {len(inputs)} responses."
            )
        return results

    def _accepted(self, columns: Mapping[str, Any], row: int) -> dict[str, Any]:
        required = [name for name, parameter in self.parameters.items() if parameter.default is parameter.empty]
        missing = [name for name in required if name not in columns]
        if missing:
            raise ValueError(
                f"A reward function's parameters must be columns or have defaults: {self.name} needs "
                f"{', '.join(missing)}, row {row} has {', '.join(columns)}. Rename the parameter or give it a default."
            )
        # A column may well be called response: the generated one comes before it.
        others = columns.keys() - {"response", "responses"} if self.takes_all else set()
        return {name: value for name, value in columns.items() if name in self.parameters or name in others}

    def _output(self, result: Any, row: int) -> RewardOutput:
        numbers = result if isinstance(result, Mapping) else {"score": result}
        if "score" not in numbers:
            raise ValueError(f"A reward mapping needs `score`: {self.name} returned {result!r} for row {row}.")
        reserved = [name for name in RESERVED_COMPONENTS if name in numbers]
        if reserved:
            raise ValueError(
                f"A reward mapping may not use the names of the score's own metrics, {', '.join(RESERVED_COMPONENTS)}: "
                f"{self.name} returned {', '.join(reserved)} in {result!r} for row {row}. Rename it."
            )
        components = {name: self._number(value, result, row) for name, value in numbers.items() if name != "score"}
        score = numbers["score"]
        return RewardOutput(None if score is None else self._number(score, result, row), components)

    def _number(self, value: Any, result: Any, row: int) -> float:
        if not isinstance(value, Real) or not math.isfinite(value):
            raise ValueError(
                f"A reward must be a finite number, None, or a mapping of names to finite numbers: {self.name} "
                f"returned {result!r} ({type(value).__name__}) for row {row}. Return None to leave a sample out."
            )
        return float(value)


def resolve_reward(spec: str) -> RewardFunction:
    """The reward that `--reward_fn` names: built in, `module:function` or `path/to/file.py:function`.

    Raises:
        ValueError: there is no such reward, module or function, or its first parameter is neither of the two names.
    """
    if is_function_spec(spec):
        return RewardFunction(spec, load_function("reward_fn", spec))
    if spec not in REWARDS:
        raise ValueError(f"Unknown reward: {spec}. Built in are {', '.join(REWARDS)}; yours is module:function.")
    return RewardFunction(spec, REWARDS[spec])


def _columns(sample: RewardInput) -> dict[str, Any]:
    return {
        **sample.extra,
        "prompt": sample.prompt,
        "label": sample.label,
        "reference": sample.reference,
        "finish_reason": sample.finish_reason,
    }


def _plural_names(columns: Mapping[str, Any]) -> dict[str, Any]:
    return {_plural(name): value for name, value in columns.items()}


def _plural(name: str) -> str:
    """Name of a column's list: only the four of every sample change, a row's own columns keep their names."""
    return f"{name}s" if name in ("prompt", "label", "reference", "finish_reason") else name


async def _gather(results: Sequence[Any]) -> list[Any]:
    """Results in order, awaiting at the same time those that have to be."""
    awaitables = {index: result for index, result in enumerate(results) if inspect.isawaitable(result)}
    values = dict(zip(awaitables, await asyncio.gather(*awaitables.values()), strict=True))
    return [values.get(index, result) for index, result in enumerate(results)]
