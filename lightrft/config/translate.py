"""Translation of a command line from upstream's flags into ours."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightrft.config.flags import is_flag, spelling
from lightrft.config.upstream import FATES, Accepted, Refused, Renamed, Switch, Valued, choices

TRUTH_WORDS = ("", "0", "1", "true", "false", "yes", "no", "on", "off")
"""Never what upstream gives a flag that is a switch here, but a mistake: they stay, and are a usage error."""


@dataclass(frozen=True)
class Translation:
    """A command line in the flags that are here."""

    tokens: list[str]
    warnings: list[str]


def translate(argv: Sequence[str]) -> Translation:
    """Puts upstream's flags into ours: renamed ones are replaced and accepted ones dropped, with one warning each.

    Raises:
        ValueError: a flag is refused, or has a value where it takes none; one line for each.
    """
    translation, errors = Translation([], []), []
    for group in _by_flag(argv):
        try:
            tokens, warning = _translated(group)
        except ValueError as error:
            errors.append(str(error))
            continue
        translation.tokens.extend(tokens)
        if warning is not None and warning not in translation.warnings:
            translation.warnings.append(warning)
    if errors:
        raise ValueError("\n".join(errors))
    return translation


def _by_flag(argv: Sequence[str]) -> Iterator[list[str]]:
    """The tokens, each flag in a list with what follows it up to the next."""
    group: list[str] = []
    for token in argv:
        if is_flag(token) and group:
            yield group
            group = []
        group.append(token)
    if group:
        yield group


def _translated(group: list[str]) -> tuple[list[str], str | None]:
    """Tokens for one flag and its values, and a warning or None."""
    flag = spelling(group[0])
    fate = FATES.get(flag.removeprefix("--")) if flag.startswith("--") else None
    _, equals, inline = group[0].partition("=")
    values = [inline, *group[1:]] if equals else group[1:]
    match fate:
        case Renamed(to, takes_value):
            _check_count(flag, values, int(takes_value))
            tokens = [token for new in to for token in (new, values[0])] if takes_value else [*to]
            return tokens, f"{flag} is {' '.join(to)} here."
        case Switch(note) if values and values[0].lower() not in TRUTH_WORDS:
            return [flag, *values[1:]], f"{flag} takes no value here, and its value is ignored: {note}."
        case Switch() if values == [""]:
            return [], None
        case Valued(why) if not values:
            return [], f"{flag} has no effect: {why}."
        case Accepted():
            _check_count(flag, values, int(fate.takes_value))
            if fate.only is not None and values[0] not in fate.only:
                raise ValueError(f"{flag} must be {choices(fate.only)}: {values[0]!r} is not supported yet. Drop it.")
            return [], f"{flag} has no effect: {fate.why}."
        case Refused(remedy, why):
            raise ValueError(f"{flag} {why}. {remedy}")
        case _:
            return group, None


def _check_count(flag: str, values: list[str], count: int) -> None:
    if len(values) != count:
        rule, remedy = ("one value", "Give it one, or drop the flag") if count else ("no value", "Drop the value")
        raise ValueError(f"{flag} takes {rule}: {' '.join([flag, *values])}. {remedy}.")
