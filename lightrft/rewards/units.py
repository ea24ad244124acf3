"""Units: what stands behind, or as a currency before, a number."""

import re

from lightrft.rewards.latex import FUNCTIONS

SPELLINGS = {
    "%": "% percent percentage pct",
    "°": "° degree degrees deg",
    "radian": "radian radians rad",
    "$": "$ dollar dollars usd us$",
    "€": "€ euro euros eur",
    "£": "£ gbp",
    "¢": "¢ cent cents",
    "₹": "₹ rupee rupees rs inr",
    "¥": "¥ yen yuan",
    "m": "m meter meters metre metres",
    "cm": "cm centimeter centimeters centimetre centimetres",
    "mm": "mm millimeter millimeters millimetre millimetres",
    "km": "km kilometer kilometers kilometre kilometres",
    "in": "in inch inches",
    "ft": "ft foot feet",
    "yd": "yd yard yards",
    "mi": "mi mile miles",
    "g": "g gram grams",
    "kg": "kg kilogram kilograms",
    "mg": "mg milligram milligrams",
    "lb": "lb lbs pound pounds",
    "oz": "oz ounce ounces",
    "s": "s sec secs second seconds",
    "min": "min mins minute minutes",
    "h": "h hr hrs hour hours",
    "day": "day days",
    "week": "week weeks",
    "month": "month months",
    "year": "year years yr yrs",
    "L": "L l liter liters litre litres",
    "mL": "mL ml milliliter milliliters millilitre millilitres",
    "gal": "gal gallon gallons",
    "mph": "mph",
    "kmh": "kmh kph kmph",
    "N": "N newton newtons",
    "J": "J joule joules",
    "W": "W watt watts",
    "°C": "°C",
    "°F": "°F",
    "unit": "unit units un",
}
SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
KNOWN = {word: unit for unit, words in SPELLINGS.items() for word in words.split()}
POWERS = {"square": "2", "sq": "2", "cubic": "3", "cu": "3"}
JOINTS = frozenset(("a", "an", "the", "of", "in", "per", "each"))
"""Words between the words of a unit."""
NO_UNITS = frozenset(("or", "and", "to", "is", "are", "not", "than", "less", "more", "times", "plus", "minus", "over"))
NO_UNITS |= {"by", "if", "squared", "cubed", "factorial", "mod", "half", "halves", "third", "thirds", "quarter"}
NO_UNITS |= {"quarters", "fourths", "fifths", "sixths", "eighths", "tenths", "hundredths", "thousandths"}
"""Words after a number that say more than what it counts."""
ORDINALS = frozenset(("st", "nd", "rd", "th"))
MAX_WORDS = 4
SHORTEST_WORD = 3
"""Of letters that are no product; these are known as mathematics."""
PRODUCTS = frozenset((*FUNCTIONS, "xyz", "abc"))

PREFIX = re.compile(r"([-+]?)\s*(?:(US\$|[$€£₹¥])|((?:rs|usd|eur|inr)(?![a-z])\.?))\s*(?=[-+.0-9\\(])", re.IGNORECASE)
SIGN_TAIL = re.compile(r"(?P<body>.*[0-9})°!a-zA-Z])\s*(?P<unit>%|°\s*[CF]?|[$€£¢₹¥])")
UNIT_WORD = r"[A-Za-z]+\.?(?:\s*\^\s*\{[23]\})?"
WORD_TAIL = re.compile(
    rf"(?P<body>.*?(?:[0-9}})!]|\\pi(?=\s)))(?P<gap>\s*)-?(?P<unit>{UNIT_WORD}(?:(?:\s*[/,-]\s*|\s*\\cdot\s*|\s+){UNIT_WORD})*)"
)
WORD = re.compile(r"([A-Za-z]+)\.?(?:\s*\^\s*\{([23])\})?|/")
SCALE = re.compile(rf"(?P<body>.*)\s(?P<scale>{'|'.join(SCALES)})", re.IGNORECASE)
SCALE_HEAD = re.compile(rf"({'|'.join(SCALES)})\s+", re.IGNORECASE)


def split_unit(text: str) -> tuple[str, str]:
    """A tidy number or expression and its unit, '' where it has none.

    A unit is a sign, a word of the table, or behind a bare number up to four words, for it may count anything. A single
    letter is one only behind a space: 5m is a product. In `5 million dollars` the million stays with the number.
    """
    prefix = PREFIX.match(text)
    unit = KNOWN.get((prefix[2] or prefix[3]).lower().rstrip("."), "") if prefix else ""
    body = prefix[1] + text[prefix.end() :] if prefix else text
    if tail := SIGN_TAIL.fullmatch(body):
        return tail["body"].strip(), unit or canonical(tail["unit"])
    tail = WORD_TAIL.fullmatch(body)
    if not tail:
        return body, unit
    head = SCALE_HEAD.match(tail["unit"])
    words = tail["unit"][head.end() :] if head else tail["unit"]
    if not _is_unit(words, tail["body"], is_apart=bool(tail["gap"])):
        return body, unit
    return f"{tail['body']} {head[1] if head else ''}".strip(), unit or canonical(words)


def canonical(unit: str) -> str:
    """One spelling for the units of the table: `square centimeters` and `cm^{2}` are alike."""
    sign = unit.replace(" ", "")
    if sign in KNOWN:
        return KNOWN[sign]
    parts, power = [], ""
    for word in WORD.finditer(unit):
        name = word[1] or "/"
        if name in POWERS:
            power = POWERS[name]
        elif name in ("per", "/"):
            parts.append("/")
        else:
            known = KNOWN.get(name) or KNOWN.get(name.lower(), name.lower())
            parts.append(known + (word[2] or power))
            power = ""
    return "".join(parts)


def clash(unit: str, other: str) -> bool:
    """Whether two units are of the table and differ; any word that counts things fits any other."""
    return unit != other and _is_known(unit) and _is_known(other)


def scaled(text: str) -> tuple[str, int]:
    """`5 million` as ("5", 1000000); a text without such a word as it is, with 1."""
    scale = SCALE.fullmatch(text)
    return (scale["body"], SCALES[scale["scale"].lower()]) if scale else (text, 1)


def _is_known(unit: str) -> bool:
    names = [name.rstrip("23") for name in unit.split("/")]
    return all(name in SPELLINGS and name != "unit" for name in names)


def _is_unit(unit: str, body: str, is_apart: bool) -> bool:
    first, *others = words = [word[1] for word in WORD.finditer(unit) if word[1]]
    if len(words) > MAX_WORDS or any(word.lower() in NO_UNITS or word.lower() in SCALES for word in words):
        return False
    words = [first, *(word for word in others[:-1] if word not in JOINTS), *others[-1:]]
    is_number = not re.search("[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", body))
    if all(map(_is_known_word, words)):
        return len(first) > 1 or (is_apart and is_number and not body.endswith(r"\pi"))
    if not is_number or not is_apart:
        return is_number and first.lower() in ORDINALS and not others
    return all(_is_known_word(word) or (len(word) >= SHORTEST_WORD and word not in PRODUCTS) for word in words)


def _is_known_word(word: str) -> bool:
    return word in KNOWN or word in POWERS or word == "per" or (len(word) > 1 and word.lower() in KNOWN)
