"""The learning rate's schedule: one step of it for each optimizer step, and the same place after a resume."""

import warnings

import pytest
import torch
from torch.optim import AdamW
from transformers import get_scheduler

from lightrft.strategy.utils.optimization import set_scheduler_steps


def optimizer_and_schedule(name="constant_with_warmup", peak=1e-3):
    optimizer = AdamW([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    return optimizer, get_scheduler(name, optimizer, num_warmup_steps=4, num_training_steps=10)


def rate(optimizer):
    return optimizer.param_groups[0]["lr"]


def test_a_schedule_stands_where_so_many_steps_lead():
    """CKPT-02: warm-up over 4 steps to 1e-3: 2 / 4 of it after 2, all of it after 4."""
    for steps, expected in ((0, 0.0), (1, 2.5e-4), (2, 5e-4), (4, 1e-3), (7, 1e-3)):
        optimizer, scheduler = optimizer_and_schedule()
        set_scheduler_steps(scheduler, steps)
        assert rate(optimizer) == scheduler.get_last_lr()[0] == pytest.approx(expected)


@pytest.mark.parametrize("done", [1, 3, 6])
def test_it_goes_on_as_if_it_had_not_been_left(done):
    """CKPT-02"""
    optimizer, scheduler = optimizer_and_schedule("linear")
    resumed_optimizer, resumed = optimizer_and_schedule("linear")
    rates = []
    for _ in range(10):
        optimizer.step()
        scheduler.step()
        rates.append(rate(optimizer))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        set_scheduler_steps(resumed, done)
    resumed_rates = [rate(resumed_optimizer)]
    for _ in range(done, 10):
        resumed_optimizer.step()
        resumed.step()
        resumed_rates.append(rate(resumed_optimizer))
    assert resumed_rates[:-1] == rates[done - 1 : -1]


def test_the_peak_is_that_of_the_present_flags():
    """A run may go on with another rate."""
    optimizer, scheduler = optimizer_and_schedule(peak=2e-3)
    set_scheduler_steps(scheduler, 4)
    assert rate(optimizer) == pytest.approx(2e-3)
