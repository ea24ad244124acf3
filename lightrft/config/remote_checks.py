"""Checks of the flags of rewards that servers give, made before anything is loaded."""

import re
from collections.abc import Iterator
from pathlib import Path

from lightrft.config.arguments import Config, RewardConfig
from lightrft.config.sources import is_server_url, server_urls, shown_url

EXAMPLES = {"remote_rm_url": "http://host:5000/get_reward", "judge_url": "http://host:8000"}
KEYS = {"remote_rm_url": "LIGHTRFT_REWARD_API_KEY", "judge_url": "LIGHTRFT_JUDGE_API_KEY"}


def remote_reward_errors(config: Config) -> Iterator[str]:
    """What is wrong with the flags of `--remote_rm_url` and `--judge_url`."""
    options = config.reward
    for flag, text in (("remote_rm_url", options.remote_rm_url), ("judge_url", options.judge_url)):
        if text is not None:
            yield from _urls(flag, text)
    if options.reward_requests != RewardConfig().reward_requests and not (options.remote_rm_url or options.judge_url):
        yield (
            f"reward_requests is a setting of remote_rm_url and judge_url: reward_requests={options.reward_requests}, "
            "and neither is set. Set one of them, or drop --reward_requests."
        )
    if options.judge_url is not None:
        yield from _judge(options)


def _urls(flag: str, text: str) -> Iterator[str]:
    for url in server_urls(text):
        if not is_server_url(url):
            yield (
                f"{flag} must be as {EXAMPLES[flag]}, without login or query (a key goes into {KEYS[flag]}): "
                f"{shown_url(url)!r}. Change --{flag}."
            )


def _judge(options: RewardConfig) -> Iterator[str]:
    if not options.judge_model:
        yield "a judge needs a model's name: judge_url is set, and judge_model is not. Set --judge_model."
    if options.judge_prompt is not None:
        yield from _prompt(options.judge_prompt)
    if options.judge_pattern is not None:
        yield from _pattern(options.judge_pattern)


def _prompt(path: str) -> Iterator[str]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        yield f"judge_prompt must be a file of text: {path}: {error}. Change --judge_prompt."
        return
    if "{response}" not in text:
        yield f"judge_prompt must say where the response goes: {path} has no {{response}}. Write it into the file."


def _pattern(pattern: str) -> Iterator[str]:
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        yield f"judge_pattern must be a regular expression: {pattern!r}: {error}. Change --judge_pattern."
        return
    if groups != 1:
        yield (
            f"judge_pattern must have one group, the score: {pattern!r} has {groups}. "
            "Write --judge_pattern 'Grade: ([0-9]+)', with (?:...) around what is no score."
        )
