"""Media inputs: what a model's processor makes of a prompt and its media, in sizes that engine and trainer share."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from PIL import Image
from transformers import AutoProcessor, ProcessorMixin

from lightrft.config.arguments import DataConfig
from lightrft.datasets.media_files import (
    Clip,
    MediaError,
    Reference,
    Sound,
    load_clip,
    load_image,
    load_sound,
    shown,
)
from lightrft.datasets.prompt_ids import bos_prefix

Size: TypeAlias = tuple[int, int]
"""Height and width in pixels."""

SHORTEST_SOUND_SECONDS = 0.1
"""Shorter ones are filled up with silence: of a single token, models take a path of their own."""
NO_LIMIT = 2**62
MAX_ASPECT = 200
MAX_RESIZES = 8
"""A size is settled long before; limits that no size meets would go on for ever."""
PARTS = {"image_processor": "image", "video_processor": "video", "feature_extractor": "audio"}
"""The kind of media that a part of a processor takes."""


@dataclass(frozen=True)
class MediaLimits:
    """Of an item, whoever sees it."""

    image_min_pixels: int | None = None
    image_max_pixels: int | None = None
    video_fps: float = 2.0
    video_max_frames: int = 64
    video_max_pixels: int | None = None
    allow_urls: bool = False

    @classmethod
    def of(cls, data: DataConfig) -> "MediaLimits":
        return cls(
            image_min_pixels=data.image_min_pixels,
            image_max_pixels=data.image_max_pixels,
            video_fps=data.video_fps,
            video_max_frames=data.video_max_frames,
            video_max_pixels=data.video_max_pixels,
            allow_urls=data.allow_media_urls,
        )


@dataclass(frozen=True)
class MediaRequest:
    """A prompt and where its media are."""

    text: str
    media: Mapping[str, Sequence[Reference]]
    only_ids: bool = False
    """The other inputs stay where they were made."""


@dataclass(frozen=True)
class MediaInputs:
    """What Actor and engine take; arrays of numpy, which travel between processes as bytes."""

    prompt_ids: list[int]
    """With as many placeholders for an item as it has pieces."""
    token_inputs: Mapping[str, np.ndarray] = field(default_factory=dict)
    item_inputs: Mapping[str, np.ndarray] = field(default_factory=dict)


class MediaProcessor:
    """Decodes a prompt's media, brings them to size, and has the model's processor make its inputs of them.

    Args:
        processor: The model's.
        limits: Of the flags.

    Raises:
        ValueError: The processor itself does not admit the limits, and would change the sizes again.
    """

    def __init__(self, processor: ProcessorMixin, limits: MediaLimits) -> None:
        self.processor = processor
        self.limits = limits
        self.kinds = kinds_of(processor)
        self._bos = bos_prefix(processor.tokenizer)
        seen = [kind for kind in self.kinds if kind != "audio"]
        self._sizes = {kind: PixelRange.of(processor, kind, limits) for kind in seen}

    @classmethod
    def load(cls, pretrain: str, limits: MediaLimits) -> "MediaProcessor":
        return cls(AutoProcessor.from_pretrained(pretrain), limits)

    def __call__(self, request: MediaRequest) -> MediaInputs:
        """Raises MediaError, with the item, for what cannot be read or is of a size that the model does not take."""
        items = self.items(request.media)
        try:
            made = self._processed(request.text, items)
        except ValueError as error:
            raise MediaError(f"the model's processor does not take the prompt: {error}") from error
        ids = made.pop("input_ids")[0].tolist()
        made.pop("attention_mask", None)
        prefix = [] if ids[: len(self._bos)] == self._bos else self._bos
        num_tokens = len(ids)
        ids = prefix + ids
        if request.only_ids:
            return MediaInputs(ids)
        of_tokens = {name for name, array in made.items() if name.endswith("token_type_ids")}
        assert all(made[name].shape == (1, num_tokens) for name in of_tokens)
        return MediaInputs(
            ids,
            {name: np.pad(made[name][0], (len(prefix), 0)) for name in of_tokens},
            {name: array for name, array in made.items() if name not in of_tokens},
        )

    def items(self, media: Mapping[str, Sequence[Reference]]) -> dict[str, list[Any]]:
        """What the processor gets: images of PIL, clips as `(frames, metadata)`, sounds as `(samples, rate)`, of sizes
        that it leaves as they are.

        Raises:
            MediaError: One cannot be read, or is of a size that the model does not take.
        """
        return {kind: [self._item(kind, item) for item in found] for kind, found in media.items()}

    def _item(self, kind: str, item: Reference) -> Any:
        decode: Mapping[str, Callable[[Reference], Any]] = {
            "image": self._image,
            "video": self._clip,
            "audio": self._sound,
        }
        try:
            return decode[kind](item)
        except Exception as error:
            # Decoders raise anything for broken data.
            reason = str(error) or type(error).__name__
            raise MediaError(f"{shown(item)}: this {kind} cannot be read: {reason}") from error

    def _image(self, item: Reference) -> Image.Image:
        image = load_image(item, self.limits.allow_urls)
        return resized(image, self._sizes["image"].fit(1, (image.height, image.width)))

    def _clip(self, item: Reference) -> Clip:
        frames, metadata = load_clip(item, self.limits.allow_urls, self.limits.video_fps, self._frame_indices)
        size = self._sizes["video"].fit(len(frames), frames.shape[1:3])
        if size != frames.shape[1:3]:
            frames = np.stack([np.asarray(resized(Image.fromarray(frame), size)) for frame in frames])
        return frames, metadata | {"height": size[0], "width": size[1]}

    def _frame_indices(self, total: int, rate: float, fps: float) -> list[int]:
        """Evenly spread; as many as fill whole pieces of time, where there are so many."""
        piece = self._sizes["video"].time_factor
        count = min(max(round(total / rate * fps), piece), self.limits.video_max_frames, total)
        count = max(count // piece * piece, piece)
        return np.linspace(0, total - 1, count).round().astype(int).tolist()

    def _sound(self, item: Reference) -> Sound:
        features = self.processor.feature_extractor
        samples, rate = load_sound(item, self.limits.allow_urls, features.sampling_rate)
        if len(samples) > features.n_samples:
            raise ValueError(
                f"it lasts {len(samples) / rate:.1f} s, and the model hears {features.n_samples / rate:g} s. Cut it"
            )
        return np.pad(samples, (0, max(0, round(SHORTEST_SOUND_SECONDS * rate) - len(samples)))), rate

    def _processed(self, text: str, items: Mapping[str, Sequence[Any]]) -> dict[str, np.ndarray]:
        """What the processor makes of them, with arrays of a batch of one."""
        arguments: dict[str, Any] = {}
        if items.get("image"):
            arguments["images"] = list(items["image"])
        if items.get("video"):
            arguments["videos"] = [frames for frames, _ in items["video"]]
            arguments["video_metadata"] = [metadata for _, metadata in items["video"]]
            arguments["do_sample_frames"] = False
        if items.get("audio"):
            arguments["audio"] = [samples for samples, _ in items["audio"]]
            arguments["sampling_rate"] = items["audio"][0][1]
        arguments |= {"return_tensors": "pt", "add_special_tokens": False}
        made = self.processor(text=[text], **arguments)
        # Seconds between frames are plain numbers in some versions.
        return {name: np.asarray(values) for name, values in made.items()}


@dataclass(frozen=True)
class PixelRange:
    """Which sizes of an image, or of a clip's frames, a processor leaves as they are."""

    low: int
    high: int
    factor: int = 1
    """Height and width are multiples of it."""
    time_factor: int = 1
    """Frames that are one piece."""
    of_clip: bool = False
    """`low` and `high` are of all frames of a clip together."""
    frame_high: int | None = None
    """Pixels of a frame at most, beside those."""
    snaps: bool = True
    """Whether the processor goes by such a range. Others make tiles of whatever size they get."""

    @classmethod
    def of(cls, processor: ProcessorMixin, kind: str, limits: MediaLimits) -> "PixelRange":
        """The processor's own range, narrowed by the flags.

        Raises:
            ValueError: They are outside of it.
        """
        # It brings torchvision, which sounds do not need.
        from transformers import Qwen3VLVideoProcessor

        is_image = kind == "image"
        part = processor.image_processor if is_image else processor.video_processor
        low, high = limits.image_min_pixels, limits.image_max_pixels
        low, high = (low, high) if is_image else (None, limits.video_max_pixels)
        settings = part.to_dict()
        if "merge_size" not in settings:
            return cls(low or 1, high or NO_LIMIT, snaps=False)
        own_low, own_high = settings["size"]["shortest_edge"], settings["size"]["longest_edge"]
        factors = settings["patch_size"] * settings["merge_size"], settings["temporal_patch_size"]
        if isinstance(part, Qwen3VLVideoProcessor):
            return cls(own_low, own_high, *factors, of_clip=True, frame_high=high)
        for name, value in ((f"{kind}_min_pixels", low), (f"{kind}_max_pixels", high)):
            if value is not None and not own_low <= value <= own_high:
                raise ValueError(
                    f"{name} must lie in the range that the model's processor takes: {name}={value}, processor "
                    f"{own_low} to {own_high} pixels. Change --{name}, or the range in the model's folder."
                )
        return cls(low or own_low, high or own_high, *factors)

    def fit(self, num_frames: int, size: Size) -> Size:
        """The size that the processor makes of one, and would not change again."""
        if not self.snaps:
            return self._scaled(size)
        for _ in range(MAX_RESIZES):
            fitting = self._snapped(num_frames, size)
            if fitting == size:
                break
            size = fitting
        return size

    def _scaled(self, size: Size) -> Size:
        height, width = size
        if height * width > self.high:
            scale = math.sqrt(self.high / (height * width))
            return max(1, math.floor(height * scale)), max(1, math.floor(width * scale))
        if height * width < self.low:
            scale = math.sqrt(self.low / (height * width))
            return math.ceil(height * scale), math.ceil(width * scale)
        return size

    def _snapped(self, num_frames: int, size: Size) -> Size:
        """As the Qwen-VL processors do it (`smart_resize`), whose counts of tokens follow from it."""
        height, width = size
        factor, high = self.factor, self.high
        if max(size) > MAX_ASPECT * min(size):
            raise ValueError(f"its sides differ by more than a factor of {MAX_ASPECT}: {width} x {height} pixels")
        frames, whole_frames = 1, 1
        if self.of_clip:
            frames, whole_frames = num_frames, round(num_frames / self.time_factor) * self.time_factor
            enlarged = max(1.0, factor / height, factor / width)
            height, width = int(height * enlarged), int(width * enlarged)
            high = self._clip_high(whole_frames)
        made = round(height / factor) * factor, round(width / factor) * factor
        pixels = whole_frames * made[0] * made[1]
        if pixels > high:
            scale = math.sqrt(high / (frames * height * width))
            made = (max(factor, math.floor(each * scale / factor) * factor) for each in (height, width))
        elif pixels < self.low:
            scale = math.sqrt(self.low / (frames * height * width))
            made = (math.ceil(each * scale / factor) * factor for each in (height, width))
        new_height, new_width = made
        return new_height, new_width

    def _clip_high(self, num_frames: int) -> int:
        if self.frame_high is None:
            return self.high
        if self.frame_high * num_frames < self.low:
            raise ValueError(
                f"video_max_pixels must admit what the model's processor takes of {num_frames} frames, at least "
                f"{self.low} pixels: video_max_pixels={self.frame_high}. Raise --video_max_pixels"
            )
        return min(self.high, self.frame_high * num_frames)


def kinds_of(processor: ProcessorMixin) -> tuple[str, ...]:
    """Kinds of media that a processor takes."""
    return tuple(kind for part, kind in PARTS.items() if part in processor.get_attributes())


def resized(image: Image.Image, size: Size) -> Image.Image:
    height, width = size
    return image if image.size == (width, height) else image.resize((width, height), Image.Resampling.BICUBIC)
