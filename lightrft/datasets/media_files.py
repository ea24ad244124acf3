"""Media files: from what a row holds in the place of an image, a video or a sound to its pixels or samples."""

import base64
import binascii
import importlib.util
import io
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard

import httpx
import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

Reference: TypeAlias = Any
"""Where an item is: a path, a URL with http(s) or data, the encoded bytes, or an item that a caller has decoded itself
(an image of PIL, or samples with their rate)."""
Clip: TypeAlias = tuple[np.ndarray, dict[str, Any]]
"""Frames `(frames, height, width, 3)` of 8-bit RGB, and what transformers' VideoMetadata holds of them."""
Sound: TypeAlias = tuple[np.ndarray, int]
"""Samples `(samples,)` of one channel in fp32, and their rate in Hz."""

KINDS = ("image", "video", "audio")
PACKAGES = {"image": (), "video": ("av",), "audio": ("soundfile", "soxr")}
"""What decoding a kind needs, of the extra with its name."""
URL_SECONDS = 60.0
"""A server must answer within it."""
SHORTEST_BASE64 = 64
"""Characters: a shorter text without an ending is a path that does not exist."""
SHOWN_BYTES = 40
"""Of data in a reference, in messages."""
SHOWN_PATH = 300
"""Characters of a path there: what is longer is no path."""
UNKNOWN_LENGTH = 0x7FFF0000
"""Programs that write a WAV file into a pipe claim such a length, or 0, for want of the real one."""


class MediaError(ValueError):
    """An item that cannot be read; the message begins with where it is."""


def check_packages(kinds: Iterable[str]) -> None:
    """Raises ValueError where a package that decodes one of these kinds is not installed."""
    for kind in kinds:
        if missing := [package for package in PACKAGES[kind] if importlib.util.find_spec(package) is None]:
            raise ValueError(
                f"decoding {kind} needs {' and '.join(missing)}, which is not installed. "
                f"Run pip install 'lightrft[{kind}]'."
            )


def references(value: Any, folder: Path | None) -> list[Reference]:
    """References of a column's value: none, one or a list of them; paths are made absolute, from `folder` on.

    Raises:
        ValueError: It is nothing that names media.
    """
    if value is None or value == "":
        return []
    items = value if isinstance(value, list | tuple) else [value]
    return [reference(item, folder) for item in items]


def reference(item: Any, folder: Path | None) -> Reference:
    """One reference, as a file of rows may write it."""
    if isinstance(item, Mapping):
        item = _of_mapping(item)
    if isinstance(item, Path):
        item = str(item)
    if isinstance(item, str) and item:
        return _of_text(item, folder)
    if isinstance(item, bytes | Image.Image):
        return item
    if _is_sound(item):
        return _samples(item[0]), item[1]
    raise ValueError(
        f"media must be paths, encoded bytes, base64 or URLs: got {shown(item)}. "
        "Change the row, or name another column."
    )


def _of_mapping(item: Mapping[str, Any]) -> Any:
    """What stands in a cell of `datasets`, or in a content part as OpenAI writes it."""
    if item.get("array") is not None and item.get("sampling_rate"):
        return np.asarray(item["array"]), int(item["sampling_rate"])
    for key in ("bytes", "path", "url"):
        if item.get(key) is not None:
            return item[key]
    return item


def _samples(array: np.ndarray) -> np.ndarray:
    """Samples of one channel, from an array with one axis, or with one of channels before or behind it."""
    if array.dtype.kind != "f":
        raise ValueError(f"samples must be floating-point numbers from -1 to 1: got {array.dtype}. Divide them first.")
    if array.ndim not in (1, 2):
        raise ValueError(f"samples must have one axis, or one more of channels: got shape {array.shape}.")
    # Libraries differ in which axis comes first; there are fewer channels than samples.
    mono = array if array.ndim == 1 else array.mean(axis=int(np.argmin(array.shape)))
    return mono.astype(np.float32)


def _is_sound(item: Any) -> TypeGuard[Sound]:
    return isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], np.ndarray) and isinstance(item[1], int)


def _of_text(text: str, folder: Path | None) -> Reference:
    if text.startswith(("http://", "https://", "data:")):
        return text
    path = Path(text.removeprefix("file://"))
    path = path if folder is None else folder / path
    # os.path, unlike Path, takes texts that are too long to be a file's name.
    is_long = len(text) >= SHORTEST_BASE64 and not os.path.isfile(path)
    if is_long and (data := _decoded(text)) is not None:
        return data
    return str(path.absolute())


def _decoded(text: str) -> bytes | None:
    """A path has an ending, and its dot is no character of base64. Some encoders break lines."""
    try:
        return base64.b64decode("".join(text.splitlines()), validate=True)
    except (binascii.Error, ValueError):
        return None


def shown(item: Reference) -> str:
    """A reference as messages name it."""
    if isinstance(item, bytes):
        return f"{len(item)} encoded bytes"
    if isinstance(item, str) and item and len(item) <= SHOWN_PATH and not item.startswith("data:"):
        return item
    text = repr(item)
    return text if len(text) <= SHOWN_BYTES else f"{text[:SHOWN_BYTES]}..."


def encoded(item: Reference, allow_urls: bool) -> bytes:
    """The bytes of the file; raises ValueError where there are none."""
    data = _encoded(item, allow_urls)
    if not data:
        raise ValueError("it is empty")
    return data


def _encoded(item: Reference, allow_urls: bool) -> bytes:
    if isinstance(item, bytes):
        return item
    if item.startswith("data:"):
        head, _, body = item.partition(",")
        if not head.endswith(";base64"):
            raise ValueError("a data URL must hold base64")
        return base64.b64decode(body, validate=True)
    if item.startswith(("http://", "https://")):
        if not allow_urls:
            raise ValueError("media are fetched from servers only with --allow_media_urls")
        return httpx.get(item, follow_redirects=True, timeout=URL_SECONDS).raise_for_status().content
    return Path(item).read_bytes()


def load_image(item: Reference, allow_urls: bool = False) -> Image.Image:
    """The image upright and in RGB; what is transparent shows white.

    Raises:
        Exception: Whatever the decoder makes of broken data.
    """
    image = item if isinstance(item, Image.Image) else _opened(encoded(item, allow_urls))
    image.load()
    image = ImageOps.exif_transpose(image)
    if image.mode == "I;16":
        # Converting cuts 16 bits off at 255.
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")


def _opened(data: bytes) -> Image.Image:
    """Pillow's own messages name an object in memory, or an attack."""
    try:
        return Image.open(io.BytesIO(data))
    except UnidentifiedImageError as error:
        raise ValueError("it is of no format that Pillow knows") from error
    except Image.DecompressionBombError as error:
        most = 2 * (Image.MAX_IMAGE_PIXELS or 0)
        raise ValueError(f"it has more pixels than Pillow opens, which is {most:,}. Scale it down") from error


def load_clip(
    item: Reference, allow_urls: bool, fps: float, choose: Callable[[int, float, float], Sequence[int]]
) -> Clip:
    """Frames of a video in RGB, at full size.

    Args:
        fps: Frames a second to be chosen.
        choose: Gives their indices, in order, from the number of frames, their rate and `fps`.

    Raises:
        Exception: Whatever the decoder makes of broken data.
    """
    import av

    with av.open(io.BytesIO(encoded(item, allow_urls)), "r") as container:
        if not container.streams.video:
            raise ValueError("there is no video in it")
        stream = container.streams.video[0]
        total = stream.frames or sum(1 for packet in container.demux(stream) if packet.size)
        rate = float(stream.average_rate or stream.guessed_rate or fps)
        if total == 0:
            raise ValueError("there is no frame in it")
        indices = list(choose(total, rate, fps))
        container.seek(0)
        frames = _frames(container.decode(stream), indices)
    if len(frames) < len(indices):
        raise ValueError(f"it ends early: {len(frames)} of {len(indices)} chosen frames are there")
    metadata = {
        "total_num_frames": total,
        "fps": rate,
        "duration": total / rate,
        "frames_indices": indices,
        "height": frames[0].shape[0],
        "width": frames[0].shape[1],
        "video_backend": "pyav",
    }
    return np.stack(frames), metadata


def _frames(decoded: Any, indices: Sequence[int]) -> list[np.ndarray]:
    """The frames at `indices`, which may be given twice; fewer where the video ends before."""
    frames: dict[int, np.ndarray] = {}
    for i, frame in enumerate(decoded):
        if i in indices:
            # A telephone held upright films on its side, and says so.
            frames[i] = np.rot90(frame.to_ndarray(format="rgb24"), frame.rotation // 90)
        if i >= indices[-1]:
            break
    return [frames[i] for i in indices if i in frames]


def load_sound(item: Reference, allow_urls: bool, rate: int) -> Sound:
    """Samples at `rate`; channels are averaged.

    Raises:
        Exception: Whatever the decoder makes of broken data.
    """
    samples, given_rate = item if _is_sound(item) else _decoded_sound(encoded(item, allow_urls))
    if not len(samples):
        raise ValueError("there is no sound in it")
    if not np.isfinite(samples).all():
        raise ValueError("it has samples that are no finite numbers")
    if given_rate != rate:
        samples = _resampled(samples, given_rate, rate)
    return np.ascontiguousarray(samples, dtype=np.float32), rate


def _decoded_sound(data: bytes) -> Sound:
    """Samples at the file's own rate."""
    import soundfile

    check_whole(data)
    try:
        file = soundfile.SoundFile(io.BytesIO(data))
    except soundfile.LibsndfileError as error:
        # Its message as a whole names an object in memory.
        raise ValueError(f"libsndfile says: {error.error_string.rstrip('.')}") from error
    with file:
        samples, rate = file.read(dtype="float32", always_2d=True), file.samplerate
        # A file that was cut off reads as far as it goes.
        if len(samples) < file.frames:
            raise ValueError(f"it ends early: {len(samples)} of {file.frames} samples are there")
    return samples.mean(axis=1), rate


def check_whole(data: bytes) -> None:
    """Raises ValueError for a WAV file that was cut off, which libsndfile takes for a shorter one."""
    if data[:4] != b"RIFF" or len(data) < 8:
        return
    length = int.from_bytes(data[4:8], "little") + 8
    # Some programs count a last byte that they leave out.
    if len(data) + 1 < length and 8 < length < UNKNOWN_LENGTH:
        raise ValueError(f"it ends early: {len(data)} of {length} bytes are there")


def _resampled(samples: np.ndarray, given_rate: int, rate: int) -> np.ndarray:
    """As transformers does it: `ceil(samples * rate / given_rate)` of them."""
    import soxr

    length = math.ceil(len(samples) * rate / given_rate)
    made = soxr.resample(samples, given_rate, rate, quality="soxr_hq")[:length]
    return np.pad(made, (0, length - len(made)))
