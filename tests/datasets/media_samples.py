"""Small images, videos and sounds, made when a test asks for them."""

import wave
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from PIL import Image


def image(height: int, width: int, seed: int = 0) -> Image.Image:
    """Of random pixels."""
    generator = np.random.default_rng(seed)
    return Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8))


def save_video(path: Path, levels: Sequence[int], rate: int, height: int = 32, width: int = 48) -> Path:
    """Each frame of one grey level."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=Fraction(rate))
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        stream.bit_rate = 10_000_000
        for level in levels:
            pixels = np.full((height, width, 3), level, dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode(None))
    return path


def save_tone(path: Path, seconds: float, hertz: float, rate: int = 8000, channels: int = 1) -> Path:
    """A sine of half the full scale, as 16-bit WAV."""
    times = np.arange(round(seconds * rate)) / rate
    samples = (0.5 * np.sin(2 * np.pi * hertz * times) * 32767).astype("<i2")
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(np.repeat(samples[:, None], channels, axis=1).tobytes())
    return path
