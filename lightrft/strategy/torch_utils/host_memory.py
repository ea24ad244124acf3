"""Host memory that is left to this process: the machine's, or less where its control groups set a limit."""

from collections.abc import Iterator
from pathlib import Path

import psutil

V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
"""Files of limit and use, and the line of memory.stat that says how much of the use is file cache to be dropped."""


def host_free_bytes() -> int:
    membership = Path("/proc/self/cgroup")
    limits = cgroup_free_bytes(membership.read_text(), Path("/sys/fs/cgroup")) if membership.is_file() else []
    return min([psutil.virtual_memory().available, *limits])


def cgroup_free_bytes(membership: str, root: Path) -> list[int]:
    """What each limit on the process leaves: any of its groups may set one, and so may those above them.

    Args:
        membership: Text of /proc/self/cgroup, lines of `number:controllers:/path`.
        root: Where the control groups are mounted.

    Source: the kernel's cgroup-v1/memory.rst and cgroup-v2.rst.
    """
    free = []
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            free += _free_along(root, path, V2)
        elif "memory" in controllers.split(","):
            free += _free_along(root / "memory", path, V1)
    return free


def _free_along(mount: Path, path: str, names: tuple[str, str, str]) -> Iterator[int]:
    # A container may see its own group as the mount itself, and a path that is the host's.
    group = mount / path.lstrip("/")
    for folder in (group, *group.parents):
        yield from _free_in(folder, *names)
        if folder == mount:
            return


def _free_in(folder: Path, limit_name: str, use_name: str, cache_name: str) -> Iterator[int]:
    if not (folder / limit_name).is_file():
        return
    limit = (folder / limit_name).read_text().strip()
    if limit == "max":
        return
    use = int((folder / use_name).read_text()) - _statistics(folder).get(cache_name, 0)
    yield max(0, int(limit) - use)


def _statistics(folder: Path) -> dict[str, int]:
    path = folder / "memory.stat"
    lines = path.read_text().splitlines() if path.is_file() else []
    return {name: int(value) for name, value in map(str.split, lines)}
