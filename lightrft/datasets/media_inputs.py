"""Media inputs: what a model's processor makes of a prompt and its media, for engine and trainer alike."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from PIL import Image
from transformers import AutoProcessor, ProcessorMixin

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
from lightrft.datasets.media_ids import ImageIds
from lightrft.datasets.media_sizes import MediaLimits, PixelRange, Size, resized
from lightrft.datasets.prompt_ids import bos_prefix

T = TypeVar("T")
SHORTEST_SOUND_SECONDS = 0.1
"""Shorter ones are filled up with silence: of a single token, models take a path of their own."""
PARTS = {"image_processor": "image", "video_processor": "video", "feature_extractor": "audio"}
"""The kind of media that a part of a processor takes."""
EXAMPLE_SIZES = (64, 64), (640, 1024)
"""Height and width of the images from which it is learned how a processor writes one into a prompt's ids."""


@dataclass(frozen=True)
class MediaRequest:
    """A prompt and where its media are."""

    text: str
    media: Mapping[str, Sequence[Reference]]
    only_ids: bool = False
    """The other inputs are not asked for: of images alone they are not even made, once these were decoded."""


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
        try:
            return self._made(request)
        except MediaError:
            raise
        except ValueError as error:
            raise MediaError(f"the model's processor does not take the prompt: {error}") from error

    def _made(self, request: MediaRequest) -> MediaInputs:
        if request.only_ids and (ids := self._ids_by_size(request)) is not None:
            return MediaInputs(self._bos_before(ids) + ids)
        made = self._processed(request.text, self.items(request.media))
        ids = made.pop("input_ids")[0].tolist()
        made.pop("attention_mask", None)
        prefix = self._bos_before(ids)
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

    def _bos_before(self, ids: list[int]) -> list[int]:
        return [] if ids[: len(self._bos)] == self._bos else self._bos

    def _ids_by_size(self, request: MediaRequest) -> list[int] | None:
        """Those of a prompt whose media are images, decoded and nothing more; None where that does not tell them."""
        if set(request.media) != {"image"} or self._image_ids is None:
            return None
        sizes = [self._read("image", item, self._image_size) for item in request.media["image"]]
        return self._image_ids.of(request.text, sizes)

    @cached_property
    def _image_ids(self) -> ImageIds | None:
        """How images are written into ids; None where the processor counts otherwise than it writes."""
        sizes = [self._sizes["image"].fit(1, size) for size in EXAMPLE_SIZES]
        image_ids = ImageIds(self.processor, {size: self._ids_of_image(size) for size in sizes})
        return image_ids if image_ids.is_exact else None

    def _ids_of_image(self, size: Size) -> list[int]:
        processor: Any = self.processor
        height, width = size
        image = Image.new("RGB", (width, height))
        return self._processed(processor.image_token, {"image": [image]})["input_ids"][0].tolist()

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
        return self._read(kind, item, decode[kind])

    def _read(self, kind: str, item: Reference, decode: Callable[[Reference], T]) -> T:
        try:
            return decode(item)
        except Exception as error:
            # Decoders raise anything for broken data.
            reason = str(error) or type(error).__name__
            raise MediaError(f"{shown(item)}: this {kind} cannot be read: {reason}") from error

    def _image(self, item: Reference) -> Image.Image:
        image = load_image(item, self.limits.allow_urls)
        return resized(image, self._fitted(image))

    def _image_size(self, item: Reference) -> Size:
        # A header would tell it too, but not that the file was cut off behind it.
        return self._fitted(load_image(item, self.limits.allow_urls))

    def _fitted(self, image: Image.Image) -> Size:
        return self._sizes["image"].fit(1, (image.height, image.width))

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


def kinds_of(processor: ProcessorMixin) -> tuple[str, ...]:
    """Kinds of media that a processor takes."""
    return tuple(kind for part, kind in PARTS.items() if part in processor.get_attributes())
