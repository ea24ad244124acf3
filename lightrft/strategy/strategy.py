"""The strategy factory."""

from lightrft.config import Config
from lightrft.strategy.strategy_base import StrategyBase


def get_strategy(args: Config) -> StrategyBase:
    """FSDPV2Strategy with --fsdp, DeepspeedStrategy without.

    Raises:
        NotImplementedError: Without --fsdp, until the DeepSpeed backend exists.
    """
    if not args.strategy.fsdp:
        raise NotImplementedError(
            "training without --fsdp needs the DeepSpeed backend, which is not there yet. Add --fsdp."
        )
    from lightrft.strategy.fsdp.fsdpv2 import FSDPV2Strategy

    return FSDPV2Strategy(args)
