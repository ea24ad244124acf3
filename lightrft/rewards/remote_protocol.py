"""Protocol of remote rewards: what a server is sent for some responses, and what it replies.

`docs/rewards.md` shows it. It is OpenRLHF's, with further fields.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lightrft.rewards.json_service import Body
from lightrft.rewards.records import RESERVED_COMPONENTS, Fault, Grade, RewardInput, finite_float

# The client's half


def body_of(inputs: Sequence[RewardInput]) -> Body:
    """The request; of the rows' further columns, those that JSON has a form for.

    Raises:
        ValueError: It has none for a label, a reference or messages.
    """
    for sample in inputs:
        for name, value in (("label", sample.label), ("reference", sample.reference), ("messages", sample.messages)):
            if not is_json(value):
                raise ValueError(
                    f"{name} must have a form in JSON to be sent to a reward server: row {sample.row} has "
                    f"{value!r:.100}. Write it as a text or a number."
                )
    names = dict.fromkeys(name for sample in inputs for name in sample.extra)
    extra = {name: [sample.extra.get(name) for sample in inputs] for name in names}
    return {
        "query": [sample.prompt + sample.response for sample in inputs],
        "prompts": [sample.prompt for sample in inputs],
        "messages": [sample.messages for sample in inputs],
        "responses": [sample.response for sample in inputs],
        "labels": [sample.label for sample in inputs],
        "references": [sample.reference for sample in inputs],
        "finish_reasons": [sample.finish_reason for sample in inputs],
        "response_lengths": [sample.response_length for sample in inputs],
        "rows": [sample.row for sample in inputs],
        "extra": {name: values for name, values in extra.items() if is_json(values)},
    }


def is_json(value: Any) -> bool:
    """Whether JSON has a form for a value, as it has not for dates, bytes, NaN and half of a surrogate pair."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def read_grades(answer: Any, count: int) -> list[Grade]:
    """One grade for each of `count` responses, in order.

    Raises:
        ValueError: The reply is not one of the protocol's, all of it.
    """
    match answer:
        case {"rewards": [*rewards]}:
            pass
        case _:
            raise ValueError("it must be an object with a list `rewards`.")
    if len(rewards) != count:
        raise ValueError(f"rewards must have one entry for each of {count} responses: it has {len(rewards)}.")
    return [_grade(reward) for reward in rewards]


def _grade(reward: Any) -> Grade:
    if not isinstance(reward, dict):
        return Grade(None if reward is None else _number(reward))
    if "score" not in reward:
        raise ValueError(f"a reward that is an object must have a `score`: {reward!s:.100}.")
    message = reward.get("ungradable")
    if isinstance(message, str):
        return Grade(None, fault=Fault("ungradable", message))
    if reserved := [name for name in RESERVED_COMPONENTS if name in reward]:
        raise ValueError(f"a reward may not name its numbers as metrics of the score: {', '.join(reserved)}.")
    score = reward["score"]
    details = {name: _number(value) for name, value in reward.items() if name != "score"}
    return Grade(None if score is None else _number(score), details)


def _number(value: Any) -> float:
    number = finite_float(value)
    if number is None:
        raise ValueError(
            "a reward must be a finite number, null, or an object with a score and further finite numbers: "
            f"{value!r:.100}."
        )
    return number


# The server's half


def inputs_of(body: Any) -> list[RewardInput]:
    """What a request asks to be graded.

    Raises:
        ValueError: It is none of the protocol's.
    """
    if not isinstance(body, dict):
        raise ValueError(f"the body must be a JSON object: it is {type(body).__name__}.")
    prompts = _texts(body, "prompts")
    responses = _texts(body, "responses") if "responses" in body else _ends(_texts(body, "query"), prompts)
    count = len(responses)
    labels, references, messages = (_list(body, name, count) for name in ("labels", "references", "messages"))
    if not all(turns is None or isinstance(turns, list) for turns in messages):
        raise ValueError(f"messages must have a list of messages, or null, for each response: {messages!s:.100}.")
    finish_reasons = _list(body, "finish_reasons", count, "stop")
    response_lengths, rows = (_list(body, name, count) for name in ("response_lengths", "rows"))
    extra = _extra(body)
    for name, values in {"prompts": prompts, **extra}.items():
        _check_count(name, values, count)
    return [
        RewardInput(
            prompt=prompts[i],
            response=responses[i],
            label=labels[i],
            reference=references[i],
            extra={name: values[i] for name, values in extra.items()},
            row=i if rows[i] is None else rows[i],
            finish_reason=finish_reasons[i],
            messages=messages[i],
            response_length=response_lengths[i],
        )
        for i in range(count)
    ]


def reply_of(grades: Sequence[Grade]) -> Mapping[str, Any]:
    """The reply for grades none of which is an error."""
    return {"rewards": [_reward(grade) for grade in grades]}


def _reward(grade: Grade) -> Any:
    if grade.fault is not None:
        assert grade.fault.kind == "ungradable", "an error has no place in a reply"
        return {"score": None, "ungradable": grade.fault.message}
    return {"score": grade.value, **grade.details} if grade.details else grade.value


def _list(body: Mapping[str, Any], name: str, count: int, default: Any = None) -> list[Any]:
    """A list that a request may lack."""
    values = body.get(name)
    if values is None:
        return [default] * count
    if not isinstance(values, list):
        raise ValueError(f"{name} must be a list: it is {type(values).__name__}.")
    _check_count(name, values, count)
    return values


def _check_count(name: str, values: Sequence[Any], count: int) -> None:
    if len(values) != count:
        raise ValueError(f"{name} must have one entry a response: {len(values)} for {count} responses.")


def _texts(body: Mapping[str, Any], name: str) -> list[str]:
    if name not in body:
        known = ", ".join(body) or "nothing"
        raise ValueError(f"the body must have prompts, and responses or query: {name} is not in it, but {known}.")
    values = body[name]
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"{name} must be a list of texts: {values!s:.100}.")
    return values


def _ends(queries: list[str], prompts: list[str]) -> list[str]:
    """What follows the prompt in each query: clients other than ours send no responses."""
    if len(queries) != len(prompts):
        raise ValueError(f"query and prompts must be equally long: {len(queries)} and {len(prompts)}.")
    for index, (query, prompt) in enumerate(zip(queries, prompts, strict=True)):
        if not query.startswith(prompt):
            raise ValueError(f"query must begin with its prompt where there are no responses: entry {index} does not.")
    return [query.removeprefix(prompt) for query, prompt in zip(queries, prompts, strict=True)]


def _extra(body: Mapping[str, Any]) -> dict[str, list[Any]]:
    extra = body.get("extra")
    if extra is None:
        return {}
    if not isinstance(extra, dict) or not all(isinstance(values, list) for values in extra.values()):
        raise ValueError(f"extra must be an object of lists: {extra!s:.100}.")
    return extra
