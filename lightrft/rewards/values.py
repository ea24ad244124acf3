"""Values: what an answer says, read without a choice: a number, an expression, words, or a structure of such."""

import functools
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from lightrft.rewards.latex import CLOSING, OPENING, closing_of, split_top, tidy
from lightrft.rewards.quantities import Number, read_number
from lightrft.rewards.units import PRODUCTS, scaled, split_unit

MAX_CHARACTERS = 1_000
"""Of an answer that is read; a longer one is right only as the same text."""

MAX_DEPTH = 30
"""Of brackets within brackets."""


@dataclass(frozen=True)
class Scalar:
    """One number or expression with a unit, which may be ''."""

    text: str
    unit: str
    number: Number | None
    """None for an expression."""


@dataclass(frozen=True)
class Words:
    """What is no mathematics."""

    text: str


@dataclass(frozen=True)
class Ordered:
    """A tuple, an interval, a matrix or a ratio: its brackets and its parts in order."""

    brackets: str
    parts: "tuple[Value, ...]"


@dataclass(frozen=True)
class Unordered:
    """A set, a list of solutions or a union."""

    parts: "tuple[Value, ...]"


@dataclass(frozen=True)
class Named:
    """`x = 3`, `y = 2x + 1`, `x \\in [0,1)`, `x > 3`, `x + y = 3`."""

    name: str
    value: "Value"
    equation: tuple[str, str] | None
    """Both sides; None for another relation."""

    @property
    def is_assignment(self) -> bool:
        """Whether the name is one symbol: then its value says the same alone."""
        return SYMBOL.fullmatch(self.name) is not None or SEGMENT.fullmatch(self.name) is not None


@dataclass(frozen=True)
class Equation:
    """An equation of two expressions."""

    left: str
    right: str


Value: TypeAlias = Scalar | Words | Ordered | Unordered | Named | Equation

SYMBOL = re.compile(
    r"(?:[A-Za-z]|\\[A-Za-z]+)(?:'|_\{\s*[A-Za-z0-9]+\s*\})*(?:\s*\(\s*-?[A-Za-z0-9]+(?:\s*,\s*-?[A-Za-z0-9]+)*\s*\))?"
)
SEGMENT = re.compile(r"m?(?:\\(?:angle|triangle|overline\{)\s*)?[A-Z]{1,4}\}?")
"""Of geometry: AB, \\angle ABC."""
EQUALS = re.compile(r"(?<![<>!=:])=(?!=)|\\approx(?![A-Za-z])")
COMPARISON = re.compile(r"<|>|\\[lg]e(?![A-Za-z])")
LIST = re.compile(r"[,;]|,?\s(?:and|or)\s")
SPACED_LIST = re.compile(r"[,;](?![0-9]{3}(?![0-9]))|,?\s(?:and|or)\s")
UNION = re.compile(r"\\cup(?![A-Za-z])")
MEMBER = re.compile(r"\\in(?![A-Za-z])")
RATIO = re.compile(":")
PLUS_MINUS = re.compile(r"\\pm(?![A-Za-z])\s*")
SET = re.compile(r"\\emptyset|\\mathbb\s*\{?[A-Z]\}?(?:\s*\^\s*\{[^{}]*\})?")
"""One that has a name."""
MATRIX = re.compile(r"\\begin\{([pbB]?matrix|array)\}(?:\{[lcr|]+\})?(.*)\\end\{\1\}", re.DOTALL)
BASED = re.compile(r"([0-9A-Za-z]+)_\{\s*([0-9]+)\s*\}")
COMMAND = re.compile(r"\\[A-Za-z]+")
OPERATOR = re.compile(r"\s*([-+/^_(){}\[\]|]|\\[A-Za-z]+)\s*")
WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
LEAD = re.compile(
    r"(?:the\s+)?(?:final\s+)?answer(?:\s+is)?\s*[:=]?\s*|(?:approximately|about|roughly)\s+|(?:\\approx|=)\s*",
    re.IGNORECASE,
)


def read(text: str) -> Value | None:
    """The value that a text is as a whole; None for nothing, or too much of it."""
    return _read(text) if len(text) <= MAX_CHARACTERS else None


@functools.lru_cache(maxsize=4096)
def _read(text: str) -> Value | None:
    text = tidy(text)
    while text.startswith((r"\boxed{", r"\fbox{")) and closing_of(text, text.index("{")) == len(text) - 1:
        text = tidy(text[text.index("{") + 1 : -1])
    if lead := LEAD.match(text):
        text = tidy(text[lead.end() :])
    return _value(text) if text and _depth(text) <= MAX_DEPTH else None


def _depth(text: str) -> int:
    """How many brackets stand within each other at most."""
    return max(itertools.accumulate((letter in OPENING) - (letter in CLOSING) for letter in text))


def scalars(value: Value) -> Iterator[Scalar]:
    """All numbers and expressions in a value."""
    match value:
        case Scalar():
            yield value
        case Ordered() | Unordered():
            for part in value.parts:
                yield from scalars(part)
        case Named():
            yield from scalars(value.value)
        case Equation():
            yield from (Scalar(side, "", None) for side in (value.left, value.right))


def is_prose(value: Value | None) -> bool:
    """Whether a text says something else or more than a value."""
    match value:
        case None | Words():
            return True
        case Unordered() | Ordered():
            return any(map(is_prose, value.parts))
        case Named():
            return is_prose(value.value)
    return False


def _value(text: str) -> Value:
    if not text:
        return Words(text)
    for reader in (_quantity, _matrix, _relation, _list, _group, _plus_minus, _ratio, _based):
        if (value := reader(text)) is not None:
            return value
    body, unit = split_unit(text)
    return Words(text) if SET.fullmatch(text) or _has_words(body) else Scalar(body, unit, None)


def _quantity(text: str) -> Scalar | None:
    if (number := read_number(text)) is not None:
        return Scalar(text, "", number)
    body, unit = split_unit(text)
    body, scale = scaled(body)
    number = read_number(body)
    return number and Scalar(body, unit, number if scale == 1 else Number(number.value * scale))


def _has_words(text: str) -> bool:
    """Whether letters are words rather than symbols: two or more alone, three or more among others."""
    letters = COMMAND.sub(" ", text)
    if re.fullmatch(r"[A-Za-z]{2,}", text) or not re.search(r"[0-9A-Za-z]", text):
        return True
    if any(letter.isalpha() and not letter.isascii() for letter in text):
        return True
    if any(word.lower() not in PRODUCTS for word in WORD.findall(letters)):
        return True
    return " " in OPERATOR.sub(r"\1", text) and re.search(r"[A-Za-z]{2}", letters) is not None


def _relation(text: str) -> Value | None:
    sides = [side.strip() for side in split_top(text, EQUALS)]
    if len(sides) > 1:
        is_one = not _has_list(text) or (len(sides) == 2 and _quantity(sides[1]) is not None)
        return _equation(sides) if all(sides) and is_one else None
    name, *values = (side.strip() for side in split_top(text, MEMBER))
    if len(values) == 1 and SYMBOL.fullmatch(name) and values[0]:
        return Named(name, _value(values[0]), None)
    return _inequality(text) if not _has_list(text) else None


def _equation(sides: list[str]) -> Value:
    first, last = sides[0], sides[-1]
    if SYMBOL.fullmatch(last) and not SYMBOL.fullmatch(first):
        first, last = last, first
    has_letters = re.search("[A-Za-z]", re.sub(r"\\(?:frac|sqrt|cdot|binom)", "", first))
    has_digits = re.search("[0-9]", first)
    if not has_letters or (_has_words(first) and WORD.search(first)):
        # 5 + 3 = 8 and `so the area is 2 + 6 = 8` say 8.
        return _value(last)
    if has_digits and not SYMBOL.fullmatch(first):
        return Equation(first, last)
    return Named("".join(first.split()), _value(last), (first, last))


def _inequality(text: str) -> Value | None:
    signs = [sign.group().strip() for sign in COMPARISON.finditer(text)]
    sides = [side.strip() for side in split_top(text, COMPARISON)]
    if len(sides) - 1 != len(signs) or len(signs) not in (1, 2) or not all(sides):
        return None
    if len({sign in ("<", r"\le") for sign in signs}) > 1:
        return None
    if signs[0] in (">", r"\ge"):
        signs, sides = [{">": "<", r"\ge": r"\le"}[sign] for sign in reversed(signs)], sides[::-1]
    if len(signs) == 1 and SYMBOL.fullmatch(sides[0]):
        sides, signs = [r"-\infty", *sides], ["<", *signs]
    elif len(signs) == 1 and SYMBOL.fullmatch(sides[1]):
        sides, signs = [*sides, r"\infty"], [*signs, "<"]
    if len(sides) != 3 or not SYMBOL.fullmatch(sides[1]):
        return None
    brackets = ("(" if signs[0] == "<" else "[") + (")" if signs[1] == "<" else "]")
    return Named(sides[1], Ordered(brackets, (_value(sides[0]), _value(sides[2]))), None)


def _list(text: str) -> Value | None:
    for separator in (_separator(text), UNION):
        parts = [part.strip() for part in split_top(text, separator)]
        parts = [re.sub(r"^(?:and|or)\s+", "", part) for part in parts]
        if len(parts) > 1:
            return _unordered(parts) if all(parts) else Words(text)
    return None


def _unordered(parts: Iterable[str]) -> Unordered:
    values = [(part, _value(part)) for part in parts]
    members = [
        value.parts if isinstance(value, Unordered) and PLUS_MINUS.search(part) else (value,) for part, value in values
    ]
    return Unordered(tuple(itertools.chain.from_iterable(members)))


def _plus_minus(text: str) -> Unordered | None:
    if len(PLUS_MINUS.findall(text)) != 1:
        return None
    return Unordered((_value(PLUS_MINUS.sub("+", text).removeprefix("+")), _value(PLUS_MINUS.sub("-", text))))


def _separator(text: str) -> re.Pattern[str]:
    # In `1,234, 5,678` the commas of thousands stand close.
    return SPACED_LIST if re.search(r", |\sand\s|\sor\s", text) else LIST


def _has_list(text: str) -> bool:
    return len(split_top(text, _separator(text))) > 1


def _group(text: str) -> Value | None:
    if text.startswith("\\langle") and text.endswith("\\rangle"):
        return _parts("<>", text[7:-7])
    if text.startswith("\\{") and text.endswith("\\}"):
        return _unordered(part.strip() for part in split_top(text[2:-2], _separator(text[2:-2])))
    if text[0] not in "([{" or closing_of(text, 0) != len(text) - 1:
        return None
    inner = text[1:-1].strip()
    if not inner:
        return Words(text)
    if text[0] == "{":
        # LaTeX's own braces are not seen.
        return _value(inner)
    if text[0] + text[-1] == "()" and not _has_list(inner):
        return _value(inner)
    return _parts(text[0] + text[-1], inner)


def _parts(brackets: str, inner: str) -> Value:
    parts = [part.strip() for part in split_top(inner, _separator(inner))]
    return Ordered(brackets, tuple(map(_value, parts))) if all(parts) else Words(brackets[0] + inner + brackets[1])


def _matrix(text: str) -> Value | None:
    matrix = MATRIX.fullmatch(text.strip("()[] "))
    if not matrix:
        return None
    rows = [row for row in re.split(r"\\\\|\\cr", matrix[2]) if row.strip()]
    cells = [[cell.strip() for cell in row.split("&")] for row in rows]
    if not all(all(row) for row in cells):
        return None
    return Ordered("matrix", tuple(Ordered("row", tuple(map(_value, row))) for row in cells))


def _ratio(text: str) -> Value | None:
    parts = [part.strip() for part in split_top(text, RATIO)]
    is_ratio = len(parts) > 1 and all(parts) and parts[0][-1].isdigit()
    return Ordered(":", tuple(map(_value, parts))) if is_ratio else None


def _based(text: str) -> Value | None:
    based = BASED.fullmatch(text)
    if not based or not based[1][0].isdigit():
        return None
    return Ordered("base", (Words(based[1]), Words(based[2])))
