"""Expressions: LaTeX as math-verify reads it, and whether two of them are equal."""

import functools
import logging
import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from lightrft.rewards.latex import FUNCTIONS, LETTERS
from lightrft.rewards.quantities import MIN_SIGNIFICANT_DIGITS, Number

logger = logging.getLogger(__name__)

MAX_CHARACTERS = 400
MAX_NODES = 200
MAX_LOG10 = 2_000.0
"""Of a number in an answer: sympy would work out its digits."""
MAX_FACTORIAL = 1_000
MAX_POWER_OF_SUM = 100
POINTS = (Fraction(7, 5), Fraction(31, 9))
STRIDE = Fraction(13, 17)
"""Between the values of two symbols."""
POINT_DIGITS = 25
TOLERANCE = 1e-12
COMMANDS = frozenset((*FUNCTIONS, *LETTERS, "frac", "sqrt", "binom", "cdot", "infty", "overline"))
"""What may stand in an expression: sums, integrals and limits are tasks, no answers, and sympy would work them out."""
COMMAND = re.compile(r"\\([A-Za-z]+|.)")
UNREADABLE = re.compile(r"['$%°&#\"]|[0-9]\s+[0-9]|[A-Za-z]\s*\^\s*\{\s*-1\s*\}\s*\(")
"""Primes would be dropped, `5 6` be a product and the inverse of a function its reciprocal."""
BINOMIAL = re.compile(r"\\binom\{([^{}]*)\}\{([^{}]*)\}")


def fails_as(default: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a function give the default where sympy fails: with what a policy writes it raises errors of any kind."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def guarded(*args: Any) -> Any:
            try:
                return function(*args)
            except MemoryError:
                raise
            except Exception:
                # Not its arguments: to write them out may take for ever.
                logger.debug("sympy failed in %s", function.__name__, exc_info=True)
                return default

        return guarded

    return decorate


@functools.lru_cache(maxsize=2048)
@fails_as(None)
def parse(latex: str) -> Any:
    """The sympy expression of a tidy text, not worked out; None where it is none, or one too large to work out."""
    if len(latex) > MAX_CHARACTERS or not _is_readable(latex):
        return None
    verifier = _math_verify()
    # One expression between delimiters and nothing to choose from: an answer is never one of several that were found.
    # No time limits of its own: they are signals, which only a main thread can take.
    found = verifier.parse(
        f"${latex}$", verifier.config, fallback_mode="no_fallback", extraction_mode="first_match", parsing_timeout=0
    )
    if len(found) != 1 or not isinstance(found[0], verifier.sympy.Expr):
        return None
    return None if _is_explosive(found[0]) or found[0].has(verifier.sympy.nan, verifier.sympy.zoo) else found[0]


@fails_as(False)
def equal(answer: Any, gold: Any) -> bool:
    """Whether two expressions are the same function of the same symbols.

    Numbers are given as exact rationals, never as floats, which math-verify rounds: 2e-7 would be 1e-7.
    """
    verifier = _math_verify()
    if answer.free_symbols != gold.free_symbols or _differ_at_a_point(answer, gold):
        return False
    return verifier.verify(gold, answer, float_rounding=12, timeout_seconds=None)


def _differ_at_a_point(answer: Any, gold: Any) -> bool:
    """Whether two expressions differ where their symbols have some values, relative to their size.

    Most wrong answers are found out by this in no time; and math-verify takes any two numbers for equal that differ by
    less than 1e-15.
    """
    symbols = sorted(gold.free_symbols, key=str)
    for start in POINTS:
        point = {symbol: start + index * STRIDE for index, symbol in enumerate(symbols)}
        values = [expression.subs(point).evalf(POINT_DIGITS) for expression in (answer, gold)]
        if not all(value.is_number and value.is_finite for value in values):
            continue
        sizes = [abs(value).evalf(POINT_DIGITS) for value in values]
        difference = abs(values[0] - values[1]).evalf(POINT_DIGITS)
        if all(size.is_Float or size.is_Integer for size in (*sizes, difference)) and difference > TOLERANCE * max(
            sizes
        ):
            return True
    return False


@fails_as(False)
def equal_equations(answer: tuple[Any, Any], gold: tuple[Any, Any]) -> bool:
    """Whether two equations are the same but for a factor: y = 3 - 2x and 4x + 2y = 6."""
    sympy = _math_verify().sympy
    answer_difference, gold_difference = (sympy.expand(left - right) for left, right in (answer, gold))
    if answer_difference.free_symbols != gold_difference.free_symbols or not gold_difference.free_symbols:
        return False
    factor = sympy.simplify(answer_difference / gold_difference)
    return bool(factor.is_number and factor.is_finite and not factor.is_zero)


@fails_as(False)
def rounds(number: Number, expression: Any) -> bool:
    """Whether a decimal of six significant digits or more is the value of an expression, to its last place."""
    if number.places is None or number.significant_digits < MIN_SIGNIFICANT_DIGITS or expression.free_symbols:
        return False
    value = expression.evalf(number.significant_digits + 15)
    if not value.is_Float:
        return False
    return number.rounds(Fraction(str(value)))


def rational(value: Fraction) -> Any:
    return _math_verify().sympy.Rational(value.numerator, value.denominator)


class _MathVerify:
    """math-verify and the one way in which it is asked here; it takes half a second to import."""

    def __init__(self) -> None:
        import sympy
        from latex2sympy2_extended import NormalizationConfig
        from math_verify import LatexExtractionConfig, parse, verify

        # It warns of time limits that are off: the pool of graders has its own.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        # Its own clean-up takes 2c for 2 cents and x' for x.
        untouched = NormalizationConfig(
            basic_latex=False, units=False, malformed_operators=False, nits=False, boxed="none", equations=False
        )
        self.config = [LatexExtractionConfig(boxed_match_priority=-1, normalization_config=untouched)]
        self.sympy, self.parse, self.verify = sympy, parse, verify


@functools.cache
def _math_verify() -> _MathVerify:
    return _MathVerify()


def preload() -> None:
    """Imports what reading LaTeX takes, before the first answer is timed."""
    parse("x^{2}")


def _is_readable(latex: str) -> bool:
    if UNREADABLE.search(latex):
        return False
    if any(command not in COMMANDS for command in COMMAND.findall(latex)):
        return False
    if any(len(argument) > 3 for arguments in BINOMIAL.findall(latex) for argument in arguments):
        return False
    # math-verify makes R and r one symbol, so that R - r would be 0.
    letters = set(re.sub(r"\\[A-Za-z]+", " ", latex))
    return not any(letter.isupper() and letter.lower() in letters for letter in letters)


def _is_explosive(expression: Any) -> bool:
    """Whether to work it out could take sympy minutes: 9^{9^{9^9}}, 100000!, (x + y)^{500}."""
    sympy = _math_verify().sympy
    for index, node in enumerate(sympy.preorder_traversal(expression)):
        if index >= MAX_NODES:
            return True
        if isinstance(node, sympy.factorial) and not _log10(node.args[0]) <= math.log10(MAX_FACTORIAL):
            return True
        if isinstance(node, sympy.Pow | sympy.exp) and not _log10(node) <= MAX_LOG10:
            return True
        if isinstance(node, sympy.Pow) and node.base.is_Add and not _log10(node.exp) <= math.log10(MAX_POWER_OF_SUM):
            return True
    return False


def _log10(node: Any) -> float:
    """An upper bound of the decimal logarithm of a number's size, near enough to refuse by; 0 for a symbol's."""
    if node.is_Number:
        return math.log10(abs(int(node)) + 1) if node.is_finite else 0.0
    if isinstance(node, _math_verify().sympy.Pow | _math_verify().sympy.exp):
        base, exponent = node.as_base_exp()
        size = abs(_log10(base)) + 1.0 if base.is_number else 1.0
        if not exponent.is_number:
            return 0.0
        return math.inf if _log10(exponent) > 6 else size * 10 ** _log10(exponent)
    parts = [_log10(part) for part in node.args]
    return sum(parts) + len(parts) if parts else 0.0
