import base64
import io
import re
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import numpy as np
import pytest
import soundfile
from PIL import Image

from lightrft.datasets.media_files import (
    check_packages,
    encoded,
    load_clip,
    load_image,
    load_sound,
    references,
    shown,
)
from tests.datasets.media_samples import image, save_tone, save_video


def png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


def pixels(item: object, folder: Path | None = None) -> np.ndarray:
    [reference] = references(item, folder)
    return np.asarray(load_image(reference))


def test_an_image_is_the_same_by_path_bytes_base64_data_url_or_as_a_cell_of_datasets(tmp_path):
    picture = image(24, 40)
    picture.save(tmp_path / "a.png")
    data = png(picture)
    text = base64.b64encode(data).decode()
    ways = [
        *("a.png", str(tmp_path / "a.png"), f"file://{tmp_path}/a.png", tmp_path / "a.png"),
        *(data, text, f"data:image/png;base64,{text}", picture),
        *({"bytes": data, "path": None}, {"bytes": None, "path": "a.png"}, {"url": f"data:image/png;base64,{text}"}),
    ]
    for item in ways:
        assert np.array_equal(pixels(item, tmp_path), np.asarray(picture)), item


def test_a_column_holds_nothing_one_item_or_a_list(tmp_path):
    assert [len(references(value, tmp_path)) for value in (None, "", [], "a.png", ["a.png", "b.png"])] == [
        0,
        0,
        0,
        1,
        2,
    ]
    assert references("a.png", tmp_path) == [str(tmp_path / "a.png")]


@pytest.mark.parametrize("value", [7, [""], {"other": 1}, [None]])
def test_what_names_no_media_is_an_error(value):
    with pytest.raises(ValueError, match=r"^media must be paths, encoded bytes, base64 or URLs: got "):
        references(value, None)


def test_a_photograph_on_its_side_is_turned_upright(tmp_path):
    """Orientation 6: the camera was turned, so that the first row of pixels is the right edge."""
    exif = Image.Exif()
    exif[0x0112] = 6
    lying = Image.new("RGB", (4, 2), "black")
    lying.putpixel((0, 0), (255, 255, 255))
    lying.save(tmp_path / "a.png", exif=exif)
    upright = pixels("a.png", tmp_path)
    assert upright.shape == (4, 2, 3)
    assert upright[0, 1].tolist() == [255, 255, 255] and upright.sum() == 3 * 255


def test_what_is_transparent_shows_white():
    """Half of red over white: 255, and 255 - 255 / 2 of green and blue."""
    picture = Image.new("RGBA", (1, 1), (255, 0, 0, 128))
    assert pixels(picture)[0, 0].tolist() == [255, 127, 127]
    assert pixels(Image.new("RGBA", (1, 1), (255, 0, 0, 0)))[0, 0].tolist() == [255, 255, 255]


def test_sixteen_bits_of_grey_become_their_upper_eight():
    """0x8040 >> 8 = 0x80."""
    picture = Image.fromarray(np.full((1, 1), 0x8040, dtype=np.uint16))
    assert pixels(png(picture))[0, 0].tolist() == [0x80] * 3


def test_servers_are_asked_only_with_the_flag(tmp_path):
    image(16, 16).save(tmp_path / "a.png")
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        with pytest.raises(ValueError, match=r"^media are fetched from servers only with --allow_media_urls$"):
            encoded(f"{url}/a.png", allow_urls=False)
        assert encoded(f"{url}/a.png", allow_urls=True) == (tmp_path / "a.png").read_bytes()
        with pytest.raises(httpx.HTTPStatusError, match="404"):
            encoded(f"{url}/b.png", allow_urls=True)
        server.shutdown()


def test_frames_of_a_video_are_those_that_were_chosen(tmp_path):
    path = save_video(tmp_path / "a.mp4", levels=range(0, 200, 10), rate=10)
    asked = []

    def choose(total: int, rate: float, fps: float) -> list[int]:
        asked.append((total, rate, fps))
        return [0, 7, 7, 19]

    frames, metadata = load_clip(str(path), False, 2.0, choose)
    assert asked == [(20, 10.0, 2.0)]
    assert frames.shape == (4, 32, 48, 3) and frames.dtype == np.uint8
    # Levels 0, 70, 70 and 190, but for what the codec loses.
    assert np.abs(frames.mean(axis=(1, 2, 3)) - [0, 70, 70, 190]).max() < 4
    assert (metadata["total_num_frames"], metadata["fps"], metadata["duration"]) == (20, 10.0, 2.0)
    assert metadata["frames_indices"] == [0, 7, 7, 19]


def test_a_video_that_was_cut_off_or_has_no_frames_is_an_error(tmp_path):
    path = save_video(tmp_path / "a.avi", levels=range(0, 200, 10), rate=10)
    path.write_bytes(path.read_bytes()[:4000])
    with pytest.raises(Exception, match=r".+"):
        load_clip(str(path), False, 2.0, lambda total, rate, fps: [19])
    tone = save_tone(tmp_path / "a.wav", 0.1, 440)
    with pytest.raises(ValueError, match=r"^there is no video in it$"):
        load_clip(str(tone), False, 2.0, lambda total, rate, fps: [0])


@pytest.mark.parametrize("ending", ["wav", "flac"])
def test_a_sound_comes_at_the_models_rate_with_one_channel(tmp_path, ending):
    """0.25 s at 8 kHz are 2,000 samples, at 16 kHz 4,000; the tone stays at 440 Hz, bin 110 of 4 Hz each."""
    path = save_tone(tmp_path / "a.wav", 0.25, 440, rate=8000, channels=2)
    if ending == "flac":
        samples, rate = soundfile.read(path)
        path = tmp_path / "a.flac"
        soundfile.write(path, samples, rate)
    samples, rate = load_sound(str(path), False, 16_000)
    assert (samples.shape, samples.dtype, rate) == ((4000,), np.float32, 16_000)
    assert np.abs(np.fft.rfft(samples)).argmax() == 110
    assert np.abs(samples).max() == pytest.approx(0.5, abs=0.05)


def test_samples_that_the_caller_has_decoded_are_taken_as_they_are():
    cell = {"array": [0.0, 0.5, -0.5], "sampling_rate": 16_000, "path": None}
    [reference] = references(cell, None)
    assert load_sound(reference, False, 16_000)[0].tolist() == [0.0, 0.5, -0.5]


@pytest.mark.parametrize("is_first", [True, False])
def test_channels_of_decoded_samples_are_averaged_whichever_axis_they_are(is_first):
    """(0.0 + 0.5) / 2, (0.5 + 0.5) / 2, (-1.0 + 0.0) / 2."""
    array = np.array([[0.0, 0.5, -1.0], [0.5, 0.5, 0.0]])
    [reference] = references({"array": array if is_first else array.T, "sampling_rate": 16_000}, None)
    samples, _ = load_sound(reference, False, 16_000)
    assert samples.tolist() == [0.25, 0.5, -0.5] and samples.dtype == np.float32


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array([0, 16_384], dtype=np.int16), "from -1 to 1: got int16. Divide them first"),
        (np.zeros((2, 2, 8)), "or one more of channels: got shape (2, 2, 8)"),
    ],
)
def test_decoded_samples_of_another_form_are_refused(array, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        references({"array": array, "sampling_rate": 16_000}, None)


@pytest.mark.parametrize("samples", [[], [0.5, float("nan")], [float("inf"), 0.5]])
def test_no_samples_and_such_that_are_no_numbers_are_errors(samples):
    """Those of a file of floating-point numbers too: a NaN would make every log-prob one."""
    [reference] = references({"array": np.array(samples, dtype=np.float32), "sampling_rate": 16_000}, None)
    with pytest.raises(ValueError, match=r"^(there is no sound in it|it has samples that are no finite numbers)$"):
        load_sound(reference, False, 16_000)


def test_a_sound_without_samples_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"^there is no sound in it$"):
        load_sound(str(save_tone(tmp_path / "a.wav", 0.0, 440)), False, 16_000)


def test_a_wav_file_that_was_cut_off_is_an_error_but_one_of_unknown_length_is_not(tmp_path):
    """0.1 s at 8 kHz are 800 samples of 2 bytes behind a head of 44: 1,644 bytes. A pipe's head claims 2**32 - 1."""
    data = save_tone(tmp_path / "a.wav", 0.1, 440).read_bytes()
    with pytest.raises(ValueError, match=r"^it ends early: 1000 of 1644 bytes are there$"):
        load_sound(data[:1000], False, 8000)
    piped = data[:4] + b"\xff" * 4 + data[8:]
    assert len(load_sound(piped, False, 8000)[0]) == 800


@pytest.mark.parametrize(
    ("data", "load", "message"),
    [
        (b"", load_image, "it is empty"),
        (b"no picture", load_image, "it is of no format that Pillow knows"),
        (b"no sound", partial(load_sound, rate=16_000), "libsndfile says: Format not recognised"),
    ],
)
def test_what_is_no_picture_or_sound_is_said_without_an_object_in_memory(data, load, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        load(data, allow_urls=False)


def test_an_image_of_too_many_pixels_is_an_error_with_a_remedy(monkeypatch):
    """Pillow opens twice its limit, with a warning from there on."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(ValueError, match=r"^it has more pixels than Pillow opens, which is 200\. Scale it down$"):
        load_image(png(image(15, 15)))


def test_base64_may_have_line_breaks_and_long_or_empty_text_is_not_shown_whole():
    data = png(image(16, 16))
    assert references(base64.encodebytes(data).decode(), None) == [data]
    assert shown("") == "''" and shown("/a/b.png") == "/a/b.png"
    assert len(shown("/" + "a" * 5000)) < 60


def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr("lightrft.datasets.media_files.PACKAGES", {"image": (), "video": ("no_such_package",)})
    check_packages(["image"])
    with pytest.raises(ValueError, match=r"^decoding video needs no_such_package.*pip install 'lightrft\[video\]'\.$"):
        check_packages(["image", "video"])
