"""Grades of mathematical answers."""

import re
from typing import Any

from lightrft.rewards import expressions
from lightrft.rewards.answers import MARKED, OPENED_BOX, after_thinking, answer_of, boxed, tagged
from lightrft.rewards.latex import math_segments, tidy
from lightrft.rewards.quantities import NUMBER, equal_numbers
from lightrft.rewards.records import Ungradable
from lightrft.rewards.units import clash
from lightrft.rewards.values import Equation, Named, Ordered, Scalar, Unordered, Value, Words, is_prose, read, scalars

LETTER = re.compile(r"\(?\s*([A-E])\s*\)?|\(([A-E])\)[\s:.].*|([A-E])[):.]\s.*", re.DOTALL)
GOLD_LETTER = re.compile(r"\(?\s*([A-E])\s*\)?|\(([A-E])\)[\s:.].*", re.DOTALL)
"""E. coli is no choice."""
STATED_LETTER = re.compile(
    r"(?:answer|option|choice)(?:\s+is|\s*[:=])?\s*[\s:*$]*(?:option|choice)?\s*"
    r"(?:\\(?:text|mathrm|textbf|mathbf)\s*\{)?\s*\(?\s*(?P<letter>(?-i:[A-E]))(?![A-Za-z'’])",
    re.IGNORECASE,
)
LAST_LETTER = re.compile(r"(?:^|[\n:(*$]|\b(?:is|be|choose|pick|therefore|thus)\b)[\s(*$]*(?P<letter>[A-E])\W*$")
BRACKETED_LETTER = re.compile(r"\((?P<letter>[A-E])\)")
LETTERS = re.compile(r"(?<![A-Za-z])[A-E]\)?\W{0,3}(?:[,/&]|\b(?:or|and)\b)\W{0,3}[A-E]\W*$")
STATED = re.compile(r"answer\s*(?:is|[:=])\s*:?\s*(?P<answer>[^\n]+)", re.IGNORECASE)
SENTENCE = re.compile(r"(?<![A-Z])[.!?](?=\s|$)")
ALTERNATIVE = re.compile(r"\s*(?:[,;/^*+=:<>–-]|\\[a-z]+|(?:or|and|to)\b)\s*[$\\(]*\s*-?[.0-9\\]")
SCALE = re.compile(r"\s*(?:\\?%|percent\b|hundred\b|thousand\b|million\b|billion\b|trillion\b|dozen\b)", re.IGNORECASE)
INSIDE = re.compile(r"[\\^_{/]\s*[-−]?$")
CALCULATION = re.compile(r"[0-9A-Za-z)}\]!]\s*(?:[-+/]|\\cdot)|[0-9)}]\s*\(")
CALCULATOR = re.compile("<<[^<>\n]*>>")
"""GSM8K's marks: `so 2 + 3 = <<2+3=5>>5 eggs`."""
LONGEST_ANSWER = 300
"""In characters, unless the gold answer is long too."""
TAIL = 2_000
"""Last characters of a response, among which an answer without a mark is looked for."""


def grade(response: str, gold: str) -> float:
    """1 where the answer that a response states is the gold answer, else 0.

    The response states one answer, and it is right or wrong as a whole: what the last \\boxed{} (or \\fbox{}) holds, in
    the last <answer> tags where there are any, else what follows the last ####, else its last number, or for another
    gold answer its last formula or what it says the answer is. Thoughts (<think>) state nothing, nor does a box that
    is not closed.

    It is right where it is the same text but for spelling; the same number, exactly, in any form and with or without
    a unit (two known ones that differ are wrong; a percent sign is a unit too, but 50% is 0.5); the same structure of
    right parts (tuple, interval, matrix; in any order a set or a list of solutions); or an expression that
    `math-verify` finds equal. A calculation is not its result: 5 + 3 is wrong where 8 is right.

    sympy is asked about expressions only, and may take long: call it in a process that can be ended. Numbers that it
    could not write out, such as 9^{9^{9^9}}, are refused before.

    Raises:
        Ungradable: The gold answer cannot be read, and the answer is not the same text.
    """
    expected = gold_text(gold)
    if letter := choice_of(expected, GOLD_LETTER):
        return float(stated_choice(response) == letter)
    answer = stated(response, expected)
    return float(answer is not None and same(answer, expected))


def grade_choice(response: str, gold: str) -> float:
    """1 where the response chooses the gold letter of (A) to (E), else 0.

    Raises:
        Ungradable: The gold answer is no such letter.
    """
    letter = choice_of(gold_text(gold), GOLD_LETTER)
    if letter is None:
        raise Ungradable(f"The gold answer of a choice must be a letter from A to E, such as (B): {gold!r}.")
    return float(stated_choice(response) == letter)


def grade_marked(response: str, gold: str) -> float:
    """As `grade`, but only an answer in a box or in <answer> tags counts.

    Raises:
        Ungradable: As for `grade`.
    """
    expected = gold_text(gold)
    marked = marked_answer(response)
    if marked is None:
        return 0.0
    if letter := choice_of(expected, GOLD_LETTER):
        return float(choice_of(marked) == letter)
    return float(same(marked, expected))


def gold_text(gold: Any) -> str:
    """The answer that a gold column states, which may be a whole solution.

    Raises:
        Ungradable: There is none.
    """
    text = "" if gold is None else answer_of(str(gold))
    if len(text) <= LONGEST_ANSWER and not re.search(r"[\w\\]", tidy(text)):
        raise Ungradable(f"A gold answer must not be empty: {gold!r}.")
    return text


def same(answer: str, gold: str) -> bool:
    """Whether two texts are the same answer.

    Raises:
        Ungradable: The gold answer cannot be read, and the texts differ.
    """
    if len(answer) > max(LONGEST_ANSWER, 2 * len(gold)):
        return False
    if _bare(answer) == _bare(gold):
        return True
    expected = read(gold)
    if expected is None or not all(map(_is_readable, scalars(expected))):
        raise Ungradable(f"The gold answer cannot be read: {gold!r}.")
    value = read(answer)
    return value is not None and _same(value, expected)


def stated(response: str, gold: str) -> str | None:
    """The text of the one answer that a response states, in the form of the gold answer; None without one."""
    text = CALCULATOR.sub("", tagged(after_thinking(response)))
    if boxes := [*boxed(text)]:
        return boxes[-1]
    if OPENED_BOX.search(text):
        return None
    is_number = _is_number(read(gold))
    for line in reversed(MARKED.findall(text)):
        if (answer := _marked_line(line, is_number)) is not None:
            return answer
    whole = text.strip()
    if len(whole) <= max(LONGEST_ANSWER, 2 * len(gold)) and (
        _bare(whole) == _bare(gold) or ("\n" not in whole and not is_prose(read(whole)))
    ):
        return whole
    return _last_number(text) if is_number else _last_statement(text)


def marked_answer(response: str) -> str | None:
    """What the last box holds, in the last <answer> tags where there are any, else these tags; None without both."""
    rest = after_thinking(response)
    text = tagged(rest)
    boxes = [*boxed(text)]
    if boxes:
        return boxes[-1]
    return None if text == rest or OPENED_BOX.search(text) else text


def choice_of(text: str, form: re.Pattern[str] = LETTER) -> str | None:
    """The letter of a text that is a choice, such as B, (B), (B) 12 or B. 12."""
    letter = form.fullmatch(tidy(text)) if len(text) <= LONGEST_ANSWER else None
    return next(filter(None, letter.groups())) if letter else None


def stated_choice(response: str) -> str | None:
    """The letter that a response chooses: in its box or tags, or else last."""
    text = after_thinking(response)
    marked = marked_answer(response)
    if marked is not None:
        return choice_of(marked) or (None if OPENED_BOX.search(text) else _last_choice(marked))
    if OPENED_BOX.search(text):
        return None
    lines = MARKED.findall(text)
    return (choice_of(lines[-1]) if lines else None) or _last_choice(text)


def _last_choice(text: str) -> str | None:
    text = text[-TAIL:].strip()
    if LETTERS.search(text):
        return None
    found = [*STATED_LETTER.finditer(text), *LAST_LETTER.finditer(text)]
    if found:
        return max(found, key=lambda letter: letter.start("letter"))["letter"]
    if letter := choice_of(text):
        return letter
    bracketed = [*BRACKETED_LETTER.finditer(text)]
    return bracketed[-1]["letter"] if bracketed else None


def _marked_line(line: str, is_number: bool) -> str | None:
    """The answer behind ####; None where the line is a heading."""
    value = read(line)
    if value is not None and not (is_prose(value) and is_number):
        return line
    # `#### 1,234. This is because ...`
    text = line.lstrip(" $*`\\(:")
    number = NUMBER.match(text)
    if not number or ALTERNATIVE.match(text, number.end()):
        return None
    return text[: _end_of_number(text, number.end())]


def _last_number(text: str) -> str | None:
    """The last number of a text, with the fraction or the formula that it is part of."""
    numbers = [*NUMBER.finditer(text)]
    if not numbers:
        return None
    number = numbers[-1]
    start = max(len(text) - TAIL, 0)
    for segment in math_segments(text[start:]):
        if segment.start() <= number.start() - start < segment.end():
            return segment.group()
    if not INSIDE.search(text[max(number.start() - 8, 0) : number.start()]):
        return text[number.start() : _end_of_number(text, number.end())]
    before, after = re.split(r"[\s=]", text[: number.start()])[-1], re.split(r"\s", text[number.end() :])[0]
    return before + number.group() + after


def _end_of_number(text: str, end: int) -> int:
    scale = SCALE.match(text, end)
    return scale.end() if scale else end


def _last_statement(text: str) -> str | None:
    """What a text last says that the answer is, or else its last formula, or else its last line."""
    text = text[-TAIL:]
    if phrases := [*STATED.finditer(text)]:
        phrase = phrases[-1]["answer"].strip()
        formula = next(math_segments(phrase), None)
        return formula.group() if formula and formula.start() == 0 else SENTENCE.split(phrase)[0]
    if segments := [*math_segments(text)]:
        return segments[-1].group()
    lines = text.strip().splitlines()
    return lines[-1] if lines else None


def _bare(text: str) -> str:
    return "".join(tidy(text).split())


def _is_number(value: Value | None) -> bool:
    match value:
        case Scalar():
            return value.number is not None
        case Named():
            return _is_number(value.value)
    return False


def _is_readable(scalar: Scalar) -> bool:
    return scalar.number is not None or expressions.parse(scalar.text) is not None


def _same(answer: Value, gold: Value) -> bool:
    match gold, answer:
        case Named(), Named():
            return _same_named(answer, gold)
        case Named(), _ if gold.is_assignment and not isinstance(answer, Equation):
            return _same(answer, gold.value)
        case _, Named() if not isinstance(gold, Equation):
            return _same(answer.value, gold)
        case ((Named() | Equation()), (Named() | Equation())):
            return _same_equation(answer, gold)
        case Scalar(), Scalar():
            return _same_scalar(answer, gold)
        case Words(), Words():
            return _words(answer.text) == _words(gold.text)
        case Ordered(), Ordered():
            return (
                answer.brackets == gold.brackets
                and len(answer.parts) == len(gold.parts)
                and all(map(_same, answer.parts, gold.parts))
            )
        case Unordered(), Unordered():
            return len(answer.parts) == len(gold.parts) and _same_members(list(answer.parts), gold.parts)
    return False


def _same_members(answers: list[Value], golds: tuple[Value, ...]) -> bool:
    """Whether each gold part has an answer of its own."""
    for gold in golds:
        found = next((index for index, answer in enumerate(answers) if _same(answer, gold)), None)
        if found is None:
            return False
        del answers[found]
    return True


def _same_named(answer: Named, gold: Named) -> bool:
    if answer.name == gold.name:
        return _same(answer.value, gold.value)
    return _same_equation(answer, gold)


def _same_equation(answer: Named | Equation, gold: Named | Equation) -> bool:
    sides = [*_sides(answer), *_sides(gold)]
    parsed = [expressions.parse(side) for side in sides]
    if len(parsed) != 4 or any(side is None for side in parsed):
        return False
    left, right, gold_left, gold_right = parsed
    return expressions.equal_equations((left, right), (gold_left, gold_right))


def _sides(value: Named | Equation) -> tuple[str, ...]:
    return (value.left, value.right) if isinstance(value, Equation) else value.equation or ()


def _same_scalar(answer: Scalar, gold: Scalar) -> bool:
    if clash(answer.unit, gold.unit):
        return False
    if answer.number and gold.number:
        return _same_number(answer, gold)
    if answer.text == gold.text:
        return True
    if gold.number and CALCULATION.search(answer.text):
        return False
    if "%" in (answer.unit, gold.unit) and answer.unit != gold.unit:
        return False
    return _same_expression(answer, gold)


def _same_number(answer: Scalar, gold: Scalar) -> bool:
    assert answer.number and gold.number
    if answer.unit == "%" != gold.unit and 0 < abs(gold.number.value) < 1:
        return answer.number.value == 100 * gold.number.value
    if equal_numbers(answer.number, gold.number):
        return True
    return gold.unit == "%" != answer.unit and 100 * answer.number.value == gold.number.value


def _same_expression(answer: Scalar, gold: Scalar) -> bool:
    parsed = [
        expressions.rational(scalar.number.value) if scalar.number else expressions.parse(scalar.text)
        for scalar in (answer, gold)
    ]
    if parsed[0] is None or parsed[1] is None:
        return False
    if answer.number and expressions.rounds(answer.number, parsed[1]):
        return True
    if gold.number and expressions.rounds(gold.number, parsed[0]):
        return True
    return _letters(answer.text) == _letters(gold.text) and expressions.equal(parsed[0], parsed[1])


def _letters(text: str) -> set[str]:
    return set(re.findall("[A-Za-z]", re.sub(r"\\[A-Za-z]+", " ", text)))


def _words(text: str) -> str:
    return "".join(re.split(r"[\s.,;:!?'\"]+", text.casefold()))
