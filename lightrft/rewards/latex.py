"""LaTeX: one spelling for the many of an answer."""

import re
import unicodedata
from collections.abc import Iterator

ARGUMENTS = {"frac": 2, "binom": 2, "sqrt": 1}
FUNCTIONS = (
    "arcsin",
    "arccos",
    "arctan",
    "sinh",
    "cosh",
    "tanh",
    "sin",
    "cos",
    "tan",
    "cot",
    "sec",
    "csc",
    "ln",
    "log",
)
LETTERS = ("alpha", "beta", "gamma", "delta", "epsilon", "theta", "lambda", "mu", "pi", "rho", "sigma", "tau", "phi")
LETTERS += ("omega", "Delta", "Omega", "Sigma")
SYMBOLS = dict.fromkeys("−‐‑–﹣－", "-") | {
    "×": r"\cdot ",
    "·": r"\cdot ",
    "⋅": r"\cdot ",
    "∙": r"\cdot ",
    "÷": "/",
    "⁄": "/",
    "√": r"\sqrt ",
    "∞": r"\infty ",
    "≤": r"\le ",
    "⩽": r"\le ",
    "≥": r"\ge ",
    "⩾": r"\ge ",
    "≠": r"\ne ",
    "≈": r"\approx ",
    "±": r"\pm ",
    "∪": r"\cup ",
    "∩": r"\cap ",
    "∈": r"\in ",
    "∅": r"\emptyset ",
    "ℝ": r"\mathbb{R}",
    "α": r"\alpha ",
    "β": r"\beta ",
    "γ": r"\gamma ",
    "δ": r"\delta ",
    "θ": r"\theta ",
    "λ": r"\lambda ",
    "μ": r"\mu ",
    "π": r"\pi ",
    "ρ": r"\rho ",
    "σ": r"\sigma ",
    "φ": r"\phi ",
    "ω": r"\omega ",
    "∠": r"\angle ",
    "，": ",",
    "“": '"',
    "”": '"',
}
TABLE = str.maketrans(SYMBOLS)
RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+")
FRACTION = re.compile("[¼½¾⅐-⅞]")
SPELLINGS = tuple(
    (re.compile(pattern), spelling)
    for pattern, spelling in (
        (r"(?<!\\)\\[,!]", ""),
        (r"(?<!\\)\\[;: ]|~|\\q?quad(?![A-Za-z])", " "),
        (r"\\(?:left|right|[bB]igg?[lrm]?)(?![A-Za-z])\s*\.?", ""),
        (r"\\(?:displaystyle|textstyle|limits|rm|bf|it)(?![A-Za-z])", " "),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
        (r"\\(?:leqslant|leq|le)(?![A-Za-z])|<=", r"\\le "),
        (r"\\(?:geqslant|geq|ge)(?![A-Za-z])|>=", r"\\ge "),
        (r"\\(?:neq|ne)(?![A-Za-z])|(?<![0-9)}])!=", r"\\ne "),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\(?:varnothing|emptyset)(?![A-Za-z])|\\\{\s*\\\}", r"\\emptyset "),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\\[lr]vert(?![A-Za-z])", "|"),
        (r"\\(?:times|cdot|ast)(?![A-Za-z])", r"\\cdot "),
        (r"\\div(?![A-Za-z])", "/"),
        (r"\{\s*,\s*\}", ","),
        (r"(?<!\\)\\([$%#&_])", r"\1"),
        (r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![A-Za-z])", "°"),
        (r"\*\*", "^"),
        (r"\*", r"\\cdot "),
    )
)
TEXT = re.compile(r"\\(?:text(?:bf|it|rm|normal|sf|tt)?|math(?:rm|bf|it|sf|tt)|mbox|operatorname)\s*\{([^{}]*)\}")
NAMED = "|".join((*(name for name in FUNCTIONS if name != "sec"), *LETTERS, "sqrt", "infty"))  # 5 sec is a time
NAMED_PLAINLY = re.compile(rf"(?<![\\A-Za-z])(?:{NAMED})(?![A-Za-z])")
INFINITY = re.compile(r"(?<![\\A-Za-z])infinity(?![A-Za-z])|\+\s*(?=\\infty)")
SPELLED = re.compile(r"[\\*<>!~{]")
DOUBLED = re.compile(r"\\(?=\\[A-Za-z])")
COMMAND = re.compile(rf"\\({'|'.join(ARGUMENTS)})(?![A-Za-z])")
SCRIPT = re.compile(r"([\^_])\s*(?:\{\s*([^{}]*?)\s*\}|(-?[0-9]+(?![0-9.])|\\?[A-Za-z](?![A-Za-z])|\\[A-Za-z]+))")
SEGMENT = re.compile(
    r"\$\$(?P<display>[^$]+)\$\$"
    r"|(?<![\\$])\$(?P<inline>(?![\s$])(?:\\\$|[^$\n])*?(?<![\s\\]))\$(?![0-9])"
    r"|\\\((?P<round>.*?)\\\)"
    r"|\\\[(?P<square>.*?)\\\]",
    re.DOTALL,
)
ROOT = re.compile(r"\s*\[[^\[\]]*\]")
NAME = re.compile(r"\\[A-Za-z]+")
DECIMAL = re.compile(r"[0-9]+(?:\.[0-9]+)?")
DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("__", "__"), ("`", "`"))
QUOTES = (('"', '"'), ("'", "'"))
OPENING, CLOSING = "([{", ")]}"


def tidy(text: str) -> str:
    """The text without delimiters, dressing and a full stop at its end, each symbol in one spelling.

    Words keep their spaces; `\\text{}` and its like become words. Arguments and exponents have braces.
    """
    text = undress(text)
    text = RAISED.sub(lambda digits: f"^{{{_plain(digits.group())}}}", text)
    text = FRACTION.sub(lambda half: _vulgar(half.group()), text).translate(TABLE)
    text = unicodedata.normalize("NFKC", text)
    if "matrix" not in text:
        text = DOUBLED.sub("", text)
    if SPELLED.search(text):
        for pattern, spelling in SPELLINGS:
            text = pattern.sub(spelling, text)
        while (plain := TEXT.sub(r" \1 ", text)) != text:
            text = plain
    text = NAMED_PLAINLY.sub(r"\\\g<0>", INFINITY.sub(lambda found: r"\infty" if found.group()[0] == "i" else "", text))
    text = with_braces(text)
    text = SCRIPT.sub(lambda script: f"{script[1]}{{{script[2] or script[3] or ''}}}", text)
    return " ".join(undress(text).split())


def undress(text: str) -> str:
    """The text without what only sets it off: white space, math delimiters, bold type, quotes, a full stop."""
    before = None
    while text != before:
        before = text
        text = text.strip().rstrip(".,;:。").strip()
        for opening, closing in (*DELIMITERS, *QUOTES):
            inner = text[len(opening) : -len(closing)]
            if text.startswith(opening) and text.endswith(closing) and inner and opening not in inner:
                text = inner if closing not in inner else text
    return text


def with_braces(text: str) -> str:
    """The text with braces around each argument: \\frac12 is \\frac{1}{2}, \\sqrt(x) is \\sqrt{x}."""
    parts, end = [], 0
    while command := COMMAND.search(text, end):
        parts.append(text[end : command.end()])
        end = command.end()
        if command[1] == "sqrt" and (root := ROOT.match(text, end)):
            parts.append(root.group().strip())
            end = root.end()
        for _ in range(ARGUMENTS[command[1]]):
            argument, end = _argument(text, end, takes_number=command[1] == "sqrt")
            parts.append(f"{{{with_braces(argument)}}}")
    return "".join([*parts, text[end:]])


def split_top(text: str, separator: re.Pattern[str]) -> list[str]:
    """What stands between the separators that no bracket encloses; [text] where there are none."""
    parts, start, depth = [], 0, 0
    found = {match.start(): match.end() for match in separator.finditer(text)}
    index = 0
    while index < len(text):
        if depth == 0 and index in found:
            parts.append(text[start:index])
            start = index = found[index]
            continue
        depth += (text[index] in OPENING) - (text[index] in CLOSING)
        index += 1
    return [*parts, text[start:]]


def closing_of(text: str, start: int) -> int:
    """Index of the bracket that closes the one at `start`, of whatever kind, for (1,2] is an interval; -1 without."""
    depth = 0
    for index in range(start, len(text)):
        depth += (text[index] in OPENING) - (text[index] in CLOSING)
        if depth == 0:
            return index
    return -1


def math_segments(text: str) -> Iterator[re.Match[str]]:
    """Each $...$, $$...$$, \\(...\\) and \\[...\\] of prose, where a dollar sign may also be money."""
    return SEGMENT.finditer(text)


def _argument(text: str, start: int, takes_number: bool) -> tuple[str, int]:
    """The argument from `start` on without its braces, and where it ends.

    Args:
        takes_number: Whether it is all digits: \\frac12 is a half, but \\sqrt12 in a model's words the root of 12.
    """
    while start < len(text) and text[start].isspace():
        start += 1
    if start >= len(text):
        return "", start
    if text[start] in "{(" and (end := closing_of(text, start)) > 0:
        return text[start + 1 : end], end + 1
    word = NAME.match(text, start) or (DECIMAL.match(text, start) if takes_number else None)
    end = word.end() if word else start + 1
    return text[start:end], end


def _plain(raised: str) -> str:
    return unicodedata.normalize("NFKC", raised).replace("−", "-")


def _vulgar(character: str) -> str:
    numerator, _, denominator = unicodedata.normalize("NFKC", character).partition("⁄")
    return rf"\frac{{{numerator}}}{{{denominator}}}"
