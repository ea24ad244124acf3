"""The strategy factory."""

from lightrft.config import Config
from lightrft.strategy.strategy_base import StrategyBase


def get_strategy(args: Config) -> StrategyBase:
    """FSDPV2Strategy with --fsdp, DeepspeedStrategy without."""
    if args.strategy.fsdp:
        from lightrft.strategy.fsdp.fsdpv2 import FSDPV2Strategy

        return FSDPV2Strategy(args)
    from lightrft.strategy.deepspeed.deepspeed import DeepspeedStrategy

    return DeepspeedStrategy(args)
