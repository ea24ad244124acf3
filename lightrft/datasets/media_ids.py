"""Media ids: what a prompt's ids are with its images, from their sizes alone."""

from collections.abc import Mapping, Sequence
from typing import Any

from lightrft.datasets.media_sizes import Size


class ImageIds:
    """What a processor puts in the place of an image: placeholders, as many as it counts, between marks or none.

    Args:
        processor: The model's, of a class that takes images.
        examples: Ids that it makes of an image's placeholder alone, with an image of each size.
    """

    def __init__(self, processor: Any, examples: Mapping[Size, list[int]]) -> None:
        self._processor = processor
        self._placeholder: int = processor.image_token_id
        ids = next(iter(examples.values()))
        first = ids.index(self._placeholder)
        self._before, rest = ids[:first], ids[first:]
        self._after = rest[rest.count(self._placeholder) :]
        self.is_exact = all(self._of(size) == ids for size, ids in examples.items())
        """Whether the counts are those of the examples; otherwise nothing but the processor itself knows."""

    def of(self, text: str, sizes: Sequence[Size]) -> list[int] | None:
        """Ids of a prompt with images of these sizes, as the processor leaves them; None where it has not as many
        places for them."""
        ids: list[int] = self._processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        if ids.count(self._placeholder) != len(sizes):
            return None
        images = iter(sizes)
        return [one for id_ in ids for one in (self._of(next(images)) if id_ == self._placeholder else (id_,))]

    def _of(self, size: Size) -> list[int]:
        # Engines that plan ahead ask processors this too. It counts the marks.
        [count] = self._processor._get_num_multimodal_tokens(image_sizes=[size]).num_image_tokens
        placeholders = count - len(self._before) - len(self._after)
        return [*self._before, *[self._placeholder] * placeholders, *self._after]
