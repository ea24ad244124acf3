"""Checkpoint folders: their names, the mark of a complete one, and how one takes its place.

Everything is written under a temporary name; the mark comes last, and then the rename. So a folder with its name and
its mark is complete whenever the process or the machine stops.
"""

import json
import os
import re
import shutil
from pathlib import Path

MARK = "complete.json"
"""Holds the size of every other file; a folder without it is half-written."""
PARTIAL = ".partial"
_NAME = re.compile(r"step_(\d{8,})")


def checkpoint_name(step: int) -> str:
    return f"step_{step:08d}"


def step_of(folder: Path) -> int | None:
    """The step of a checkpoint's folder; None for any other name, a half-written one's among them."""
    match = _NAME.fullmatch(folder.name)
    return int(match[1]) if match else None


def partial_of(folder: Path) -> Path:
    return folder.with_name(folder.name + PARTIAL)


def open_partial(folder: Path) -> None:
    """An empty folder under the temporary name of `folder`, whatever an earlier attempt has left there."""
    partial = partial_of(folder)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)


def publish(folder: Path) -> None:
    """Marks what stands under the temporary name, brings it to the disk, and gives it its name.

    A folder that has the name already is replaced; only a broken one can be there.
    """
    partial = partial_of(folder)
    sizes = {str(path.relative_to(partial)): path.stat().st_size for path in _files(partial)}
    (partial / MARK).write_text(json.dumps({"sizes": sizes}, indent=2), encoding="utf-8")
    for path in [*_files(partial), *(path for path in partial.rglob("*") if path.is_dir()), partial]:
        _sync(path)
    if folder.exists():
        shutil.rmtree(folder)
    partial.rename(folder)
    _sync(folder.parent)


def discard(partial: Path) -> None:
    """Frees the space that a failed attempt has taken, as far as that goes."""
    shutil.rmtree(partial, ignore_errors=True)


def fault(folder: Path) -> str | None:
    """Why a checkpoint is not complete; None for a complete one."""
    if folder.name.endswith(PARTIAL) or not (folder / MARK).is_file():
        return "it is half-written"
    sizes = json.loads((folder / MARK).read_text(encoding="utf-8"))["sizes"]
    for name, size in sizes.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes of {size}"
    return None


def checkpoints(root: Path) -> dict[int, Path]:
    """Folders with the name of a checkpoint, complete or not, by their steps and in the order of these."""
    if not root.is_dir():
        return {}
    found = [(step, path) for path in root.iterdir() if path.is_dir() and (step := step_of(path)) is not None]
    return dict(sorted(found))


def complete_checkpoints(root: Path) -> dict[int, Path]:
    """Complete checkpoints by their steps and in the order of these."""
    return {step: folder for step, folder in checkpoints(root).items() if fault(folder) is None}


def newest_complete(root: Path) -> tuple[Path | None, dict[Path, str]]:
    """The newest complete checkpoint, and each later folder, half-written ones too, with its fault."""
    refused = {}
    halves = {(step_of(_whole(partial)) or 0, 0): partial for partial in root.glob(f"step_*{PARTIAL}")}
    wholes = {(step, 1): folder for step, folder in checkpoints(root).items()}
    for _, folder in sorted((halves | wholes).items(), reverse=True):
        reason = fault(folder)
        if reason is None:
            return folder, refused
        refused[folder] = reason
    return None, refused


def delete(folder: Path) -> None:
    """The mark goes first: a deletion that is cut short leaves nothing that looks complete."""
    (folder / MARK).unlink(missing_ok=True)
    shutil.rmtree(folder)


def sweep(root: Path, last_step: int) -> None:
    """Removes what earlier attempts have left half-written, up to the step of the last complete checkpoint."""
    for partial in root.glob(f"step_*{PARTIAL}"):
        shutil.rmtree(partial)
    for step, folder in checkpoints(root).items():
        if step <= last_step and fault(folder) is not None:
            delete(folder)


def _whole(partial: Path) -> Path:
    return partial.with_name(partial.name.removesuffix(PARTIAL))


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
