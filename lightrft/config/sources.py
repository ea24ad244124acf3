"""Sources of prompts as the flags write them: names and shares, separated by commas."""

FILE_ENDINGS = (".jsonl", ".json", ".csv", ".parquet")
"""Endings of the files that are read as data: the keys of `lightrft.datasets.sources.READERS`."""


def source_names(text: str) -> list[str]:
    """Files, folders and hub ids of a flag such as `a.jsonl,b.parquet`."""
    return [name.strip() for name in text.split(",")]


def source_shares(text: str, num_sources: int) -> list[float]:
    """Shares of the sources, which sum to 1.

    Raises:
        ValueError: there is no share for each source, or one is no number above 0.
    """
    try:
        shares = [float(share) for share in text.split(",")]
    except ValueError as error:
        raise ValueError(
            f"prompt_data_probs must be numbers separated by commas: {text!r}. Set, for example, 0.7,0.3."
        ) from error
    if len(shares) != num_sources:
        raise ValueError(
            f"prompt_data_probs must have a share for each source: {len(shares)} shares ({text}), {num_sources} "
            "sources in prompt_data. Change one of them."
        )
    if not all(0 < share < float("inf") for share in shares):
        raise ValueError(f"prompt_data_probs must be finite and above 0: {text}. Drop the source, or change its share.")
    return [share / sum(shares) for share in shares]
