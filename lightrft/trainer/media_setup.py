"""Media setup: what decodes the images, clips and sounds of a run, and which kinds there are."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from lightrft.config import Config
from lightrft.datasets.media import MediaLoader
from lightrft.models.loading import LoadedConfig, load_processor
from lightrft.models.multimodal import family_of
from lightrft.strategy.strategy_base import StrategyBase
from lightrft.strategy.utils.collectives import PhaseError
from lightrft.types import PromptExample

MEDIA_WORKERS_PER_RANK = 4
"""At most, unless the flag says otherwise."""
READING = "reading prompts"


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

    Raises:
        PhaseError: on this rank, where others fail in it and it does not.
    """
    if media is None or os.environ.get("WORLD_SIZE", "1") == "1":
        yield
        return
    with strategy.process_groups.early_collectives() as ranks, media.shared_by(ranks):
        try:
            yield
        except PhaseError:
            raise
        except Exception as error:
            # Ranks that do not fail as well learn it here. Of this one, its own error says most.
            with suppress(PhaseError):
                ranks.agree(error, READING)
            raise
        ranks.agree(None, READING)


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
