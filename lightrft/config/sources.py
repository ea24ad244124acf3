"""Sources of prompts, and servers, as the flags write them: names, shares and URLs, separated by commas."""

import re
from urllib.parse import urlsplit

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


def server_urls(text: str) -> list[str]:
    """Servers of a flag such as `http://a:8000,http://b:8000`, without a slash at the end."""
    return [url.strip().rstrip("/") for url in text.split(",")]


def is_server_url(url: str) -> bool:
    """Whether it is scheme, host and port, and perhaps a path: no login, which would be a secret on a command line."""
    try:
        parts = urlsplit(url)
        # Reading the port is what checks it.
        has_host = bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and has_host and not (set("@?#") & set(url)) and url.isprintable()


def shown_url(url: str) -> str:
    """A URL as a message may quote it: without a login or a query, which may hold a secret."""
    address, *rest = re.split("[?#]", url)
    # An @ behind them: they may be of a password, and the address but its beginning.
    return "..." if "@" in "".join(rest) else address.rpartition("@")[2]
