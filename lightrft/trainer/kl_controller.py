"""KL controllers: the weight of the KL divergence over the run."""


class FixedKLController:
    """The coefficient stays what it was."""

    def __init__(self, coefficient: float) -> None:
        self.value = coefficient

    def update(self, kl: float, num_samples: int) -> None:
        """Does nothing."""


class AdaptiveKLController:
    """Proportional control towards a target divergence.

    Source: Ziegler et al., "Fine-Tuning Language Models from Human Preferences" (2019), section 2.2.
    """

    def __init__(self, coefficient: float, target: float, horizon: int) -> None:
        self.value = coefficient
        self.target = target
        self.horizon = horizon

    def update(self, kl: float, num_samples: int) -> None:
        """Moves the coefficient after `num_samples` samples with a mean divergence of `kl` nats per token."""
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * num_samples / self.horizon


def make_kl_controller(
    init_kl_coef: float, kl_target: float | None, kl_horizon: int
) -> FixedKLController | AdaptiveKLController:
    if kl_target is None:
        return FixedKLController(init_kl_coef)
    return AdaptiveKLController(init_kl_coef, kl_target, kl_horizon)
