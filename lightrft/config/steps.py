"""Steps that a flag chooses: 3,4,100."""


def chosen_steps(text: str | None) -> frozenset[int]:
    """Numbers of the steps; None chooses none.

    Raises:
        ValueError: some part is no number from 1 on.
    """
    if text is None:
        return frozenset()
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) >= 1 for part in parts):
        raise ValueError(f"steps must be numbers from 1 on, separated by commas: {text!r}.")
    return frozenset(map(int, parts))
