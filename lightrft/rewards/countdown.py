"""Countdown: an expression that reaches a number with given ones."""

import ast
import re
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

from lightrft.rewards.answers import answer_of
from lightrft.rewards.latex import tidy
from lightrft.rewards.records import Ungradable

MAX_CHARACTERS = 300
OPERATIONS = {
    ast.Add: lambda left, right: left + right,
    ast.Sub: lambda left, right: left - right,
    ast.Mult: lambda left, right: left * right,
    ast.Div: lambda left, right: left / right if right else None,
}


def countdown(response: str, gold: Any, numbers: Iterable[int] | str) -> float:
    """1 where the answer is an expression of + - * / and brackets that has the value `gold` and uses each number once.

    What follows an equals sign in it is not looked at; the value is exact.

    Args:
        response: The generated text.
        gold: The number to reach.
        numbers: Those to use, as a list or in a text.

    Raises:
        Ungradable: `gold` or `numbers` are no integers.
    """
    target, given = (
        _integers(str(gold)),
        _integers(numbers if isinstance(numbers, str) else " ".join(map(str, numbers))),
    )
    if len(target) != 1 or not given:
        raise Ungradable(f"countdown needs a number to reach and numbers to use: gold={gold!r}, numbers={numbers!r}.")
    tree = _parsed(answer_of(response))
    used: list[int] = []
    value = None if tree is None else _value(tree.body, used)
    return float(value == target[0] and sorted(used) == sorted(given))


def _parsed(answer: str) -> ast.Expression | None:
    if len(answer) > MAX_CHARACTERS:
        return None
    expression = re.sub(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", r"((\1)/(\2))", tidy(answer)).replace(r"\cdot", "*")
    expression = expression.partition("=")[0].strip()
    if not re.fullmatch(r"[-+*/() 0-9]+", expression):
        return None
    try:
        return ast.parse(expression, mode="eval")
    except (SyntaxError, RecursionError, MemoryError):
        # Brackets within brackets without end are no expression either.
        return None


def _value(node: ast.expr, used: list[int]) -> Fraction | None:
    """What the expression is worth, None where it has no value; the numbers in it are added to `used`."""
    match node:
        case ast.Constant(value=int() as number):
            used.append(number)
            return Fraction(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = _value(operand, used)
            return None if value is None else -value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
            values = _value(left, used), _value(right, used)
            return None if None in values else OPERATIONS[type(op)](*values)
    return None


def _integers(text: str) -> list[int]:
    """Those that a text lists, 24.0 among them; none where something else stands there."""
    text = re.sub(r"\.0*(?![0-9])", "", text)
    return [int(number) for number in re.findall(r"-?[0-9]+", text)] if re.fullmatch(r"[-0-9,\s\[\]()]*", text) else []
