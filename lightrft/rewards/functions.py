"""Reward functions: built-in ones and the user's own, called with the columns that they ask for."""

import asyncio
import inspect
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any

from lightrft.config.functions import is_function_spec, load_function
from lightrft.rewards.builtin import REWARDS
from lightrft.rewards.records import RESERVED_COMPONENTS, Fault, Grade, RewardInput, Ungradable, finite_float
from lightrft.rewards.rules import RULES

NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
COLUMNS = ("prompt", "label", "reference", "finish_reason")
"""What every row has."""
BUILT_IN: dict[str, Callable[..., Any]] = {**REWARDS, **RULES}
FRAMES = 12
"""Of a traceback that tells of a failure, the innermost: a recursion has a thousand."""
LONGEST_TEXT = 8000
"""Of what tells of a failure, in characters: samples.jsonl has it for each response, an exception may quote pages."""
LONGEST_QUOTE = 500


class RewardFunction:
    """A function of one `response` or of a batch of `responses`, plain or async, as a component of the reward.

    The name of the first parameter says which it is. By keyword come those of `prompt`, `label`, `reference`,
    `finish_reason` (for a batch, lists with these names in the plural), `gold`, `media`, `response_length` (in tokens)
    and the row's further columns (under their own names, for a batch as lists) that the signature accepts. It gives,
    for each sample, a number, None for a sample to leave out, or a mapping with `score` and further numbers.

    Args:
        name: What messages call it.
        function: The function itself.
        options: Further keyword arguments, the same for every sample.

    Raises:
        ValueError: The first parameter has another name, or an option is no parameter.
    """

    def __init__(
        self, name: str, function: Callable[..., Any], options: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        self.name = name
        self.function = function
        self.options = dict(options)
        parameters = list(inspect.signature(function).parameters.values())
        first = parameters[0].name if parameters else "none"
        if first not in ("response", "responses"):
            raise ValueError(
                f"A reward function's first parameter must be response or responses: {name} has {first}. "
                "Name it response to be given one sample at a time, responses to be given a list."
            )
        unnamed = [p.name for p in parameters[1:] if p.kind is inspect.Parameter.POSITIONAL_ONLY]
        if unnamed:
            raise ValueError(
                f"A reward function's parameters must have names that a call can use: {name} has {', '.join(unnamed)} "
                "before `/`. Drop the `/`."
            )
        self.is_batch = first == "responses"
        self.parameters = {parameter.name: parameter for parameter in parameters[1:] if parameter.kind in NAMED}
        self.takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
        self._check_options()

    @property
    def keeps_its_thread(self) -> bool:
        """Whether it sees all samples together, or waits for something: it is of no use one sample at a time."""
        return self.is_batch or inspect.iscoroutinefunction(self.function)

    @property
    def takes_media(self) -> bool:
        return "media" in self.parameters or self.takes_all

    def grade(self, inputs: Sequence[RewardInput], runner: asyncio.Runner) -> list[Grade]:
        """One grade for each input, in order; what the function raises or gives by mistake is a fault.

        Args:
            runner: Whose event loop runs what is async: a run's one loop, for a user's client or lock is bound to it.

        Raises:
            MemoryError: There is no memory left, which only who has set a limit can judge.
        """
        if not inputs:
            return []
        results = self._call_batch(inputs, runner) if self.is_batch else self._call_singles(inputs, runner)
        return [self._grade(result, sample.row) for result, sample in zip(results, inputs, strict=True)]

    def check_row(self, sample: RewardInput) -> None:
        """Raises ValueError where a required parameter has no column in the sample's row."""
        columns = _columns(sample)
        self._accepted(_plural_names(columns) if self.is_batch else columns, sample.row)

    def _check_options(self) -> None:
        columns = (*COLUMNS, *map(_plural, COLUMNS), "gold", "media", "response_length")
        known = [name for name in self.parameters if name not in columns]
        for name in self.options:
            if name in columns or not (name in known or self.takes_all):
                raise ValueError(
                    f"an option must be a parameter of the function: {self.name} has no {name}. "
                    f"Its options are {', '.join(known) or 'none'}."
                )

    def _call_singles(self, inputs: Sequence[RewardInput], runner: asyncio.Runner) -> list[Any]:
        results = [self._call_single(sample) for sample in inputs]
        if not any(map(inspect.isawaitable, results)):
            return results
        awaited = runner.run(_gather(results))
        return [
            self._fault(result, f"row {sample.row}") if isinstance(result, BaseException) else result
            for result, sample in zip(awaited, inputs, strict=True)
        ]

    def _call_single(self, sample: RewardInput) -> Any:
        try:
            return self.function(sample.response, **self._accepted(_columns(sample), sample.row))
        except Exception as error:
            return self._fault(error, f"row {sample.row}")

    def _call_batch(self, inputs: Sequence[RewardInput], runner: asyncio.Runner) -> list[Any]:
        try:
            return self._batch_results(inputs, runner)
        except Exception as error:
            where = f"a batch of {len(inputs)} samples from row {inputs[0].row} on"
            # Of the whole batch nobody can say which response it is.
            fault = self._fault(error, where)
            return [Fault("error", fault.message)] * len(inputs)

    def _batch_results(self, inputs: Sequence[RewardInput], runner: asyncio.Runner) -> list[Any]:
        rows = [_columns(sample) for sample in inputs]
        for columns, sample in zip(rows, inputs, strict=True):
            self._accepted(_plural_names(columns), sample.row)
        names = dict.fromkeys(name for columns in rows for name in columns)
        lists = {_plural(name): [columns.get(name) for columns in rows] for name in names}
        results = self.function([sample.response for sample in inputs], **self._accepted(lists, inputs[0].row))
        if inspect.isawaitable(results):
            (results,) = runner.run(_gather([results]))
        if isinstance(results, BaseException):
            raise results
        if not isinstance(results, Iterable) or isinstance(results, str | Mapping | Set):
            raise RewardMistake(f"A batch reward must return a list: {self.name} returned {type(results).__name__}.")
        results = list(results)
        if len(results) != len(inputs):
            raise RewardMistake(
                f"A batch reward must return one result for each response: {self.name} returned {len(results)} "
                f"for {len(inputs)} responses."
            )
        return results

    def _accepted(self, columns: Mapping[str, Any], row: int) -> dict[str, Any]:
        columns = {**columns, **self.options}
        required = [name for name, parameter in self.parameters.items() if parameter.default is parameter.empty]
        missing = [name for name in required if name not in columns]
        if missing:
            raise RewardMistake(
                f"A reward function's parameters must be columns or have defaults: {self.name} needs "
                f"{', '.join(missing)}, row {row} has {', '.join(columns)}. Rename the parameter, give it a default, "
                "or set it in --reward_recipe."
            )
        # A column may well be called response: the generated one comes before it.
        others = columns.keys() - {"response", "responses"} if self.takes_all else set()
        return {name: value for name, value in columns.items() if name in self.parameters or name in others}

    def _fault(self, error: BaseException, where: str) -> Fault:
        """Why there is no grade.

        Raises:
            MemoryError: `error` is one.
        """
        if isinstance(error, MemoryError):
            raise error
        if isinstance(error, Ungradable):
            return Fault("ungradable", f"{self.name}, {where}: {error}")
        if isinstance(error, RewardMistake):
            return Fault("error", str(error))
        return Fault("error", f"{self.name} failed on {where}:\n{traceback_text(error)}")

    def _grade(self, result: Any, row: int) -> Grade:
        if isinstance(result, Fault):
            return Grade(None, fault=result)
        try:
            return self._checked(result, row)
        except RewardMistake as error:
            return Grade(None, fault=Fault("error", str(error)))

    def _checked(self, result: Any, row: int) -> Grade:
        numbers = result if isinstance(result, Mapping) else {"score": result}
        if "score" not in numbers:
            raise RewardMistake(f"A reward mapping needs `score`: {self.name} returned {_shown(result)} for row {row}.")
        reserved = [name for name in RESERVED_COMPONENTS if name in numbers]
        if reserved:
            raise RewardMistake(
                f"A reward mapping may not use the names of the score's own metrics, {', '.join(RESERVED_COMPONENTS)}: "
                f"{self.name} returned {', '.join(reserved)} in {_shown(result)} for row {row}. Rename it."
            )
        details = {str(name): self._number(value, result, row) for name, value in numbers.items() if name != "score"}
        score = numbers["score"]
        return Grade(None if score is None else self._number(score, result, row), details)

    def _number(self, value: Any, result: Any, row: int) -> float:
        number = finite_float(value)
        if number is None:
            raise RewardMistake(
                f"A reward must be a finite number, None, or a mapping of names to finite numbers: {self.name} "
                f"returned {_shown(result)} ({type(value).__name__}) for row {row}. Return None to leave a sample out."
            )
        return number


class RewardMistake(ValueError):
    """A mistake in a function's signature or result, which its message tells without a traceback."""


def resolve_reward(
    spec: str, options: Mapping[str, Any] = MappingProxyType({}), flag: str = "reward_fn"
) -> RewardFunction:
    """The reward that a flag names: built in, `module:function` or `path/to/file.py:function`.

    Raises:
        ValueError: there is no such reward, module or function, its first parameter is neither of the two names, or an
            option is no parameter of it.
    """
    if is_function_spec(spec):
        return RewardFunction(spec, load_function(flag, spec), options)
    if spec not in BUILT_IN:
        raise ValueError(f"Unknown reward: {spec}. Built in are {', '.join(BUILT_IN)}; yours is module:function.")
    return RewardFunction(spec, BUILT_IN[spec], options)


def traceback_text(error: BaseException) -> str:
    """The innermost frames and the error, without the frames of this module that lead there."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames, limit=-FRAMES)).rstrip()
    return text if len(text) <= LONGEST_TEXT else f"{text[: LONGEST_TEXT // 2]}\n...\n{text[-LONGEST_TEXT // 2 :]}"


def _shown(value: Any) -> str:
    """What a function has returned, for a message, whatever it is."""
    try:
        text = repr(value)
    except Exception as error:
        return f"something of which repr raises {type(error).__name__}"
    return text if len(text) <= LONGEST_QUOTE else f"{text[:LONGEST_QUOTE]}..."


def _columns(sample: RewardInput) -> dict[str, Any]:
    return {
        # A row's own column of such a name comes before what stands for it.
        "gold": sample.label if sample.reference is None else sample.reference,
        "media": sample.media,
        "response_length": sample.response_length,
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
    return f"{name}s" if name in COLUMNS else name


async def _gather(results: Sequence[Any]) -> list[Any]:
    """Results in order, awaiting at the same time those that have to be; what one raises stands in its place."""
    awaitables = {index: result for index, result in enumerate(results) if inspect.isawaitable(result)}
    awaited = await asyncio.gather(*awaitables.values(), return_exceptions=True)
    values = dict(zip(awaitables, awaited, strict=True))
    return [values.get(index, result) for index, result in enumerate(results)]
