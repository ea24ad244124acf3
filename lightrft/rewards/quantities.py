"""Quantities: numbers as texts write them, with their units."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

from lightrft.rewards.latex import closing_of

DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
NUMBER = re.compile(
    r"(?:(?<![\w)])[-−])?"  # a minus after a digit, a letter or a bracket is a subtraction or a hyphen
    rf"\$?(?:{DIGITS}(?:\.[0-9]+)?|(?<!\w)\.[0-9]+)"
    r"(?:[eE][-+]?[0-9]{1,3})?"
)

MIN_SIGNIFICANT_DIGITS = 6
"""From which a decimal may stand for a number that has no finite one."""
MAX_POWER_BITS = 20_000


@dataclass(frozen=True)
class Number:
    """An exact value, and how it was written."""

    value: Fraction
    places: int | None = None
    """Digits behind the point of a decimal; None for another form."""

    @property
    def significant_digits(self) -> int:
        if self.places is None:
            return 0
        return len(str(abs(int(self.value * 10 ** max(self.places, 0)))))

    @property
    def is_finite_decimal(self) -> bool:
        denominator = self.value.denominator
        for prime in (2, 5):
            while denominator % prime == 0:
                denominator //= prime
        return denominator == 1

    def rounds(self, exact: Fraction) -> bool:
        """Whether this is a decimal of six significant digits or more within one unit of its last place of `exact`."""
        if self.places is None or self.significant_digits < MIN_SIGNIFICANT_DIGITS:
            return False
        return abs(self.value - exact) < Fraction(1, 10**self.places) if self.places >= 0 else False


def last_number(text: str) -> Decimal | None:
    """The value as written, so that 1,234 and $1,234.00 are equal and nothing is rounded; None without a number."""
    numbers = NUMBER.findall(text)
    return decimal_of(numbers[-1]) if numbers else None


def decimal_of(number: str) -> Decimal:
    """The value of what `NUMBER` matched."""
    return Decimal(re.sub("[$,]", "", number).replace("−", "-"))


def equal_numbers(answer: Number, gold: Number) -> bool:
    """Whether they are the same number: exactly, or one a rounding of the other that no decimal can write out."""
    if answer.value == gold.value:
        return True
    return (not gold.is_finite_decimal and answer.rounds(gold.value)) or (
        not answer.is_finite_decimal and gold.rounds(answer.value)
    )


def read_number(text: str) -> Number | None:
    """The number that a tidy text is, without a unit: 1,234.5, -3/4, \\frac{3}{4}, 1 1/2, 2^{10}, 3 \\cdot 10^{-5}."""
    text = text.strip()
    if not text or not (text[0] in "+-({." or text[0].isdigit() or text[0] == "\\"):
        return None
    if text[0] in "+-":
        number = read_number(text[1:]) if text[1:].lstrip()[:1] not in ("+", "-") else None
        return number and (Number(-number.value, number.places) if text[0] == "-" else number)
    if text[0] in "({" and closing_of(text, 0) == len(text) - 1:
        # (1,234) is a pair.
        return None if "," in text else read_number(text[1:-1])
    return next((number for reader in READERS if (number := reader(text)) is not None), None)


PLAIN = re.compile(rf"(?=\.?[0-9])(?:{DIGITS}|[0-9]{{1,3}}(?: [0-9]{{3}})+)?(?:\.[0-9]*)?(?:[eE][-+]?[0-9]{{1,3}})?")
MIXED = re.compile(r"([0-9]+)\s*(\\frac\{[0-9]+\}\{[0-9]+\})|([0-9]+) ([0-9]+ ?/ ?[0-9]+)")
SCIENTIFIC = re.compile(r"(.+?)\s*\\cdot\s*10\^\{\s*([-+]?[0-9]{1,3})\s*\}")
POWER = re.compile(r"([0-9]{1,9}|\([-0-9.]{1,12}\))\s*\^\{\s*([-+]?[0-9]{1,5})\s*\}")
REPEATING = re.compile(r"([0-9]*)\.([0-9]*)\\(?:overline|bar|dot)\s*\{?([0-9]+)\}?")


def _plain(text: str) -> Number | None:
    if not PLAIN.fullmatch(text):
        return None
    decimal = Decimal(re.sub("[, ]", "", text))
    exponent = decimal.as_tuple().exponent
    assert isinstance(exponent, int)
    return Number(Fraction(decimal), max(-exponent, 0))


def _fraction(text: str) -> Number | None:
    if not text.startswith(r"\frac{"):
        return None
    middle = closing_of(text, 5)
    if middle < 0 or text[middle + 1 : middle + 2] != "{" or closing_of(text, middle + 1) != len(text) - 1:
        return None
    return _ratio(read_number(text[6:middle]), read_number(text[middle + 2 : -1]))


def _slash(text: str) -> Number | None:
    over, slash, under = text.partition("/")
    return _ratio(read_number(over), read_number(under)) if slash and "/" not in under else None


def _mixed(text: str) -> Number | None:
    mixed = MIXED.fullmatch(text)
    if not mixed:
        return None
    whole, part = read_number(mixed[1] or mixed[3]), read_number(mixed[2] or mixed[4])
    return whole and part and Number(whole.value + part.value)


def _scientific(text: str) -> Number | None:
    scientific = SCIENTIFIC.fullmatch(text)
    mantissa = read_number(scientific[1]) if scientific else None
    if not scientific or mantissa is None:
        return None
    exponent = int(scientific[2])
    places = None if mantissa.places is None else mantissa.places - exponent
    return Number(mantissa.value * Fraction(10) ** exponent, places)


def _power(text: str) -> Number | None:
    power = POWER.fullmatch(text)
    base = read_number(power[1]) if power else None
    if not power or base is None:
        return None
    exponent = int(power[2])
    size = max(base.value.numerator.bit_length(), base.value.denominator.bit_length())
    if size * abs(exponent) > MAX_POWER_BITS or (base.value == 0 and exponent <= 0):
        return None
    return Number(base.value**exponent)


def _repeating(text: str) -> Number | None:
    repeating = REPEATING.fullmatch(text)
    if not repeating:
        return None
    whole, fixed, period = repeating.groups()
    value = Fraction(int(whole + fixed + period or "0") - int(whole + fixed or "0"), 10 ** len(period) - 1)
    return Number(value / 10 ** len(fixed))


def _ratio(over: Number | None, under: Number | None) -> Number | None:
    return Number(over.value / under.value) if over and under and under.value else None


READERS: tuple[Callable[[str], Number | None], ...] = (
    _plain,
    _fraction,
    _mixed,
    _slash,
    _scientific,
    _power,
    _repeating,
)
