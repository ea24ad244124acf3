"""Lengths that a response is asked to have, in tokens."""


def within_length(response: str, response_length: int, max_length: int, min_length: int = 0) -> float:
    """1 where the response has `min_length` to `max_length` tokens, else 0."""
    return float(min_length <= response_length <= max_length)


def overlong_penalty(response: str, response_length: int, max_length: int, buffer: int) -> float:
    """What a response that comes near the limit loses: 0 down to -1, over the last `buffer` tokens before it.

    Formula: clip((max_length - buffer - length) / buffer, -1, 0)

    Source: Yu et al., "DAPO" (2025), eq. 13.

    Args:
        response: The generated text, which is not looked at.
        response_length: Its tokens.
        max_length: The limit, L_max.
        buffer: L_cache.
    """
    if buffer <= 0:
        raise ValueError(f"buffer must be positive: {buffer}. Leave the rule out for no penalty.")
    return min(max((max_length - buffer - response_length) / buffer, -1.0), 0.0)
