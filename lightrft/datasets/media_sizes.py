"""Media sizes: to which an image or a clip's frames are brought, once, so that a processor changes nothing again."""

import math
from dataclasses import dataclass
from typing import TypeAlias

from PIL import Image
from transformers import ProcessorMixin

from lightrft.config.arguments import DataConfig

Size: TypeAlias = tuple[int, int]
"""Height and width in pixels."""

NO_LIMIT = 2**62
MAX_ASPECT = 200
MAX_RESIZES = 8
"""A size is settled long before; limits that no size meets would go on for ever."""


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


def resized(image: Image.Image, size: Size) -> Image.Image:
    height, width = size
    return image if image.size == (width, height) else image.resize((width, height), Image.Resampling.BICUBIC)
