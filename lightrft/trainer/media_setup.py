"""Media setup: what decodes the images, clips and sounds of a run, and which kinds there are."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from lightrft.config import Config
from lightrft.config.cli import MISTAKES
from lightrft.datasets.media import MediaLoader
from lightrft.datasets.media_shares import READING
from lightrft.models.loading import LoadedConfig, load_processor
from lightrft.models.multimodal import family_of
from lightrft.strategy.strategy_base import StrategyBase
from lightrft.strategy.utils.collectives import Collectives, PhaseError
from lightrft.types import PromptExample

MEDIA_WORKERS_PER_RANK = 4
"""At most, unless the flag says otherwise."""


def media_loader(config: Config, actor: LoadedConfig) -> MediaLoader | None:
    """What decodes the media of the run, with this rank's share of the node's processes; None for a text model.

    Raises:
        ValueError: The model's folder has no processor, or one that does not admit the flags' limits.
    """
    processor = load_processor(actor)
    if processor is None:
        return None
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    wanted = config.data.media_workers
    if wanted is None:
        wanted = min((os.cpu_count() or 1) // 2, MEDIA_WORKERS_PER_RANK * local_world_size) or 1
    share = max(1, wanted // local_world_size) if wanted else 0
    return MediaLoader(actor.pretrain, processor, config.data, share)


@contextmanager
def shared_check(strategy: StrategyBase, media: MediaLoader | None) -> Iterator[None]:
    """Context in which the ranks share the decoding of a data set's media. Every rank must enter and leave it.

    Where some ranks fail, all do: those with their own error, the others with the first rank's mistake of the user, or
    with what else it was.

    Raises:
        ValueError: on a rank without a mistake, where another has one.
        PhaseError: on such a rank, where another fails in another way.
    """
    if media is None or os.environ.get("WORLD_SIZE", "1") == "1":
        yield
        return
    with strategy.process_groups.early_collectives() as ranks, media.shared_by(ranks):
        own: BaseException | None = None
        try:
            yield
        except PhaseError as failure:
            # In a phase of the check, where all ranks met.
            raise _told(ranks, failure.__cause__, failure) from None
        except Exception as error:
            own = error
        try:
            ranks.agree(own, READING)
        except PhaseError as failure:
            raise _told(ranks, own, failure) from None
        except RuntimeError as lost:
            # Another has ended, and cannot be told. Of this one, its own error says most.
            raise own or lost from None


def _told(ranks: Collectives, own: BaseException | None, failure: PhaseError) -> BaseException:
    """What a rank raises after all have learned of a failure. Every rank must call it."""
    found = ranks.all_gather_objects(None if own is None else (isinstance(own, MISTAKES), str(own)))
    if own is not None:
        return own
    failed = [(rank, *each) for rank, each in enumerate(found) if each is not None]
    if not all(is_mistake for _, is_mistake, _ in failed):
        return failure
    rank, _, message = failed[0]
    return ValueError(f"on rank {rank}: {message}")


def check_placeholders(prompts: Iterable[PromptExample], actor: LoadedConfig) -> None:
    """Raises ValueError for a prompt of text that has a placeholder for media, which stands for nothing there."""
    config = actor.hf_config
    placeholders = {getattr(config, name) for name in family_of(config).placeholders.values()}
    for example in prompts if placeholders else ():
        if not example.media and not placeholders.isdisjoint(example.prompt_ids):
            raise ValueError(
                f"row {example.row}: a prompt without media must not have the token that stands for them: it has "
                f"{sum(i in placeholders for i in example.prompt_ids)}. Change its text, or name its media; where the "
                "row has neither, the model's chat template makes them of plain text, and messages must have parts."
            )


def media_kinds(prompts: Iterable[PromptExample], actor: LoadedConfig) -> list[str]:
    """Kinds of media that the prompts have.

    Raises:
        ValueError: The model does not take one of them.
    """
    kinds = sorted({kind for example in prompts for kind in example.media})
    known = family_of(actor.hf_config).smallest
    if unknown := [kind for kind in kinds if kind not in known]:
        raise ValueError(
            f"the model must take the media of the prompts: {actor.pretrain} ({actor.hf_config.model_type}) takes "
            f"{', '.join(known) or 'text alone'}, and prompts have {', '.join(unknown)}. Choose another --pretrain."
        )
    return kinds
