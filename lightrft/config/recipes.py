"""Recipes: the components, with their weights, that the reward of a row is made of, by the row's label."""

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from lightrft.config.functions import is_function_spec

ANY_LABEL = "*"
"""Stands for every label that has no recipe of its own."""
ENDINGS = (".yaml", ".yml", ".json")
LONGEST_QUOTE = 80
REWRITTEN_TAGS = tuple(f"tag:yaml.org,2002:{kind}" for kind in ("bool", "int", "float", "timestamp"))
"""Of plain scalars that YAML makes values of."""


@dataclass(frozen=True)
class Part:
    """One component's share of a reward."""

    component: str
    """As the recipe writes it: a known name, or a user's function."""
    weight: float = 1.0
    ungradable: float = 0.0
    """Value of a response that cannot be graded."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the rule."""
    is_whole: bool = False
    """It is all of the reward, and its own further numbers are the components."""

    @property
    def name(self) -> str:
        """Name in metrics: a user's function is called by its own."""
        return self.component.rpartition(":")[2] if is_function_spec(self.component) else self.component

    @property
    def key(self) -> str:
        """Equal for parts that give the same response the same grade."""
        return json.dumps([self.component, self.options], sort_keys=True, default=repr)


Recipe: TypeAlias = tuple[Part, ...]


@dataclass(frozen=True)
class Recipes:
    by_label: Mapping[str, Recipe]

    def of(self, label: Any) -> Recipe:
        """The recipe of a row with this label.

        Raises:
            ValueError: There is none.
        """
        found = self.by_label.get(str(label), self.by_label.get(ANY_LABEL))
        if found is None:
            raise ValueError(
                f"a label must have a recipe: {_quoted(label)} has none, reward_recipe has "
                f"{', '.join(self.by_label)}. Add it, or {ANY_LABEL!r} for all others."
            )
        return found

    def parts(self) -> dict[str, Part]:
        """One part for each key."""
        return {part.key: part for recipe in self.by_label.values() for part in recipe}


class _Loader(yaml.SafeLoader):
    """Knows 1e-2, which JSON takes for a number and PyYAML for a text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def sum_of(components: Sequence[str]) -> Recipes:
    """The recipe of all rows that adds up components; a single one is the whole reward.

    Raises:
        ValueError: two have the same name in metrics.
    """
    recipes = Recipes({ANY_LABEL: tuple(Part(name, is_whole=len(components) == 1) for name in components)})
    _check_names(recipes, "the flags name")
    return recipes


def read_recipes(text: str) -> Recipes:
    """Recipes of --reward_recipe: those of a file, or those that the text itself is.

    Raises:
        ValueError: the file is missing, or what stands there is no mapping of labels to weighted components.
    """
    source = _source(text)
    try:
        node = yaml.compose(source, Loader=_Loader)
        values = yaml.load(source, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"reward_recipe must be YAML or JSON: {' '.join(str(error).split())}.") from error
    if repeated := list(_repeated_keys(node)):
        raise ValueError(f"reward_recipe may have a key once: {', '.join(repeated)}. Drop all but one.")
    if not isinstance(values, Mapping) or not values:
        raise ValueError(
            f"reward_recipe must map labels to components: {_quoted(text)}. Write, for example, "
            "{gsm8k: {answer: 0.9, format: 0.1}}, or name a file, which ends with "
            f"{', '.join(ENDINGS)}."
        )
    _check_labels(node)
    recipes = Recipes({str(label): _recipe(str(label), components) for label, components in values.items()})
    _check_names(recipes, "reward_recipe has")
    return recipes


def _source(text: str) -> str:
    if text.lstrip().startswith("{") or "\n" in text or not text.endswith(ENDINGS):
        return text
    if not Path(text).is_file():
        raise ValueError(f"reward_recipe must name an existing file: {text} is no file. Change --reward_recipe.")
    return Path(text).read_text(encoding="utf-8")


def _repeated_keys(node: yaml.Node | None) -> Iterator[str]:
    """PyYAML keeps the last of several equal keys without a word."""
    if isinstance(node, yaml.MappingNode):
        keys = Counter(str(key.value) for key, _ in node.value)
        yield from (key for key, count in keys.items() if count > 1)
        for _, value in node.value:
            yield from _repeated_keys(value)


def _check_labels(node: yaml.Node | None) -> None:
    """YAML reads yes as true and 010 as 8, which no row would have for a label."""
    assert isinstance(node, yaml.MappingNode)
    for key, _ in node.value:
        if key.tag not in REWRITTEN_TAGS:
            continue
        label = yaml.load(key.value, Loader=_Loader)
        if str(label).lower() != key.value.lower():
            raise ValueError(
                f"a label must be what is written: reward_recipe has {key.value}, which YAML reads as {label}. "
                "Put it in quotes."
            )


def _recipe(label: str, components: Any) -> Recipe:
    if not isinstance(components, Mapping) or not components:
        raise ValueError(
            f"a recipe must map components to weights: reward_recipe has {_quoted(components)} for {label}. "
            f"Write {{{label}: {{component: weight}}}}."
        )
    return tuple(_part(label, str(component), settings) for component, settings in components.items())


def _part(label: str, component: str, settings: Any) -> Part:
    options = dict(settings) if isinstance(settings, Mapping) else {"weight": settings}
    if not all(isinstance(name, str) for name in options):
        raise ValueError(f"options must have names: reward_recipe has {_quoted(settings)} for {component} of {label}.")
    return Part(
        component,
        _number(label, component, "weight", options.pop("weight", 1.0)),
        _number(label, component, "ungradable", options.pop("ungradable", 0.0)),
        options,
    )


def _number(label: str, component: str, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise ValueError(
            f"{name} must be a finite number: reward_recipe has {_quoted(value)} for {component} of {label}. Change it."
        )
    return float(value)


def _check_names(recipes: Recipes, says: str) -> None:
    """Metrics of two components under one name would be averaged into each other."""
    components: dict[str, str] = {}
    for part in (part for recipe in recipes.by_label.values() for part in recipe):
        other = components.setdefault(part.name, part.component)
        if other != part.component:
            raise ValueError(
                f"components must have different names in metrics: {says} {other} and {part.component}. "
                "Rename one of them."
            )


def _quoted(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST_QUOTE else f"{text[:LONGEST_QUOTE]}..."
