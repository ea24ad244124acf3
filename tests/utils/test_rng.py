import random

import numpy as np
import torch

from lightrft.utils.rng import rng_state, set_rng_state


def draw() -> tuple:
    return random.random(), random.gauss(), np.random.rand(), np.random.randn(), torch.rand(()).item()


def test_draws_go_on_from_a_state_that_went_through_a_file(tmp_path):
    cpu = torch.device("cpu")
    draw()
    torch.save(rng_state(cpu), tmp_path / "rng.pt")
    expected = draw()
    assert draw() != expected
    set_rng_state(torch.load(tmp_path / "rng.pt", weights_only=True), cpu)
    assert draw() == expected
