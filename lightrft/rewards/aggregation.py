"""Aggregation: what a response is worth, from the grades of its components."""

import math
from collections.abc import Mapping

from lightrft.config.recipes import Part, Recipe
from lightrft.rewards.records import Grade, RewardOutput


def weighted_sum(recipe: Recipe, grades: Mapping[str, Grade]) -> RewardOutput:
    """Sum over the parts of a recipe of weight times value; excluded where a part has no value.

    Args:
        grades: By the parts' keys. A part that is ungradable has the value that the recipe gives it.
    """
    values = {part.name: _value(part, grades[part.key]) for part in recipe}
    components: dict[str, float] = {}
    for part in recipe:
        details = grades[part.key].details
        value = values[part.name]
        if value is not None and not part.is_whole:
            components[part.name] = value
        components |= {name if part.is_whole else f"{part.name}/{name}": detail for name, detail in details.items()}
    faults = {part.name: fault for part in recipe if (fault := grades[part.key].fault) is not None}
    weighted = [part.weight * value for part in recipe if (value := values[part.name]) is not None]
    # Weights of 0.7, 0.2 and 0.1 add up to 1, which is what passes an evaluation.
    score = math.fsum(weighted) if len(weighted) == len(recipe) else None
    return RewardOutput(score, components, faults)


def _value(part: Part, grade: Grade) -> float | None:
    is_ungradable = grade.fault is not None and grade.fault.kind == "ungradable"
    return part.ungradable if is_ungradable else grade.value
