"""MismatchCheck: is the model that the engine sampled from the one that is trained?"""

from collections.abc import Sequence

from torch import Tensor

from lightrft.strategy.utils.collectives import Collectives
from lightrft.types import Experience
from lightrft.utils.logging import get_logger

logger = get_logger(__name__)

MIN_TOKENS = 256
"""Response tokens of all ranks that it takes to judge: fewer are kept for the next rollout."""
WARN_ABOVE = 0.05
STOP_ABOVE = 0.2
"""Mean absolute difference of log-probs, in nats. The kernels of two implementations part by about 0.01 in bf16."""


class MismatchCheck:
    """Compares log-probs of the engine with the actor's, on the rollout that follows a weight sync."""

    def __init__(self, collectives: Collectives, engine_type: str) -> None:
        self.collectives = collectives
        self.engine_type = engine_type
        self._total = 0.0
        self._tokens = 0

    def add(self, samples: Sequence[Experience], log_probs: Sequence[Tensor], weight_version: int) -> None:
        """Takes this rank's samples into account, whose log-probs by the actor are given. Every rank must call it.

        Samples of an engine that gives no log-probs count for nothing.

        Raises:
            RuntimeError: On all ranks, if engine and actor are too far apart to be the same model.
        """
        local = [_difference(sample, scores) for sample, scores in zip(samples, log_probs, strict=True)]
        self.add_difference(sum(t for t, _ in local), sum(n for _, n in local), weight_version)

    def add_difference(self, total: float, tokens: int, weight_version: int) -> None:
        """Takes the sum of this rank's absolute differences over so many tokens into account. As `add`."""
        everywhere = self.collectives.all_reduce_sum([total, tokens])
        self._total += everywhere[0]
        self._tokens += int(everywhere[1])
        if self._tokens < MIN_TOKENS:
            return
        mean, num_tokens = self._total / self._tokens, self._tokens
        self._total, self._tokens = 0.0, 0
        message = (
            f"engine and actor must give a response the same log-probs: the {self.engine_type} engine at weight "
            f"version {weight_version} is off by {mean:.3g} nats on average over {num_tokens} response tokens"
        )
        # A mean that is not a number is above every limit.
        if not mean <= STOP_ABOVE:
            raise RuntimeError(
                f"{message} (limit {STOP_ABOVE}). They are not the same model: a weight is missing or stale, or they "
                "differ in attention, rotary embedding, quantisation or dtype. Try --weight_check full."
            )
        if mean > WARN_ABOVE and self.collectives.rank == 0:
            logger.warning("%s (expected below %s; it stops above %s)", message, WARN_ABOVE, STOP_ABOVE)


def _difference(sample: Experience, log_probs: Tensor) -> tuple[float, int]:
    """Sum of the absolute differences over the response's kept tokens, and their number."""
    if sample.rollout_log_probs is None:
        return 0.0, 0
    # A masked token may have been drawn from another distribution than the policy's.
    differences = (sample.rollout_log_probs - log_probs).abs()[sample.action_mask]
    return float(differences.double().sum()), len(differences)
