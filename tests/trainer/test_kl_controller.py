"""The KL coefficient over a run."""

import pytest

from lightrft.trainer.kl_controller import AdaptiveKLController, make_kl_controller


def test_a_fixed_coefficient_stays():
    controller = make_kl_controller(0.01, None, 100)
    controller.update(kl=5.0, num_samples=100)
    assert controller.value == 0.01


@pytest.mark.parametrize(
    "kl, expected",
    [
        (0.11, 0.1 * (1 + 0.1 * 50 / 100)),  # 10 % over the target for half a horizon: 5 % up
        (9.0, 0.1 * (1 + 0.2 * 50 / 100)),  # the error is cut at 20 %
        (0.0, 0.1 * (1 - 0.2 * 50 / 100)),
    ],
)
def test_an_adaptive_coefficient_steers_to_the_target(kl, expected):
    controller = make_kl_controller(0.1, 0.1, 100)
    assert isinstance(controller, AdaptiveKLController)
    controller.update(kl, num_samples=50)
    assert controller.value == pytest.approx(expected)
