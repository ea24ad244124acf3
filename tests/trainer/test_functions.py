import math

import pytest
import torch

from lightrft.ops.advantages import AdvantageInputs, group_norm_advantages
from lightrft.ops.losses import PolicyLoss, PolicyLossInputs, ppo_clip
from lightrft.trainer.functions import checked_advantages, checked_policy_loss, load_estimator, load_policy_loss

MASK = torch.tensor([True, False, True])


def advantage_inputs(lengths: list[int]) -> AdvantageInputs:
    """Samples of one group, of which only the second token is masked."""
    tokens = sum(lengths)
    return AdvantageInputs(
        scores=torch.ones(len(lengths)),
        groups=torch.zeros(len(lengths), dtype=torch.long),
        valid=torch.ones(len(lengths), dtype=torch.bool),
        action_mask=MASK[:tokens],
        lengths=lengths,
        kl=None,
        kl_coef=0.0,
        values=None,
        bootstrap_values=None,
        gamma=1.0,
        lambd=1.0,
    )


def loss_inputs(*log_probs: float) -> PolicyLossInputs:
    return PolicyLossInputs(
        log_probs=torch.tensor(log_probs, requires_grad=True),
        old_log_probs=torch.zeros(len(log_probs)),
        rollout_log_probs=None,
        advantages=torch.ones(len(log_probs)),
        action_mask=torch.ones(len(log_probs), dtype=torch.bool),
        lengths=[len(log_probs)],
        eps_low=0.2,
        eps_high=0.2,
    )


def test_names_stand_for_the_built_in_functions():
    assert load_estimator("group_norm") is group_norm_advantages
    assert load_policy_loss("ppo_clip") is ppo_clip


def test_a_users_numbers_at_masked_tokens_do_not_count():
    values = torch.tensor([1.0, math.nan, 3.0], dtype=torch.float64)
    advantages, returns = checked_advantages("my:f", (values, values + 1), advantage_inputs([3]))
    assert (advantages.tolist(), returns.tolist()) == ([1.0, 0.0, 3.0], [2.0, 0.0, 4.0])
    assert advantages.dtype == torch.float32


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (torch.ones(3), " must return two tensors, advantages and returns: my:f returned Tensor."),
        ((torch.ones(3), None), "'s returns must be a tensor of shape (3,), one a token: my:f returned NoneType."),
        (
            (torch.ones(1), torch.ones(1)),
            "'s advantages must be a tensor of shape (3,), one a token: my:f returned shape (1,).",
        ),
        (
            (torch.tensor([math.nan, math.nan, 1.0]), torch.ones(3)),
            "'s advantages must be finite: my:f returned 1 that are not.",
        ),
    ],
)
def test_a_users_advantages_that_cannot_be_used_are_told_with_the_function(result, message):
    with pytest.raises(ValueError) as caught:
        checked_advantages("my:f", result, advantage_inputs([3]))
    assert str(caught.value) == f"advantage_estimator{message}"


def test_a_users_estimator_is_not_called_on_a_rank_without_samples(tmp_path):
    (tmp_path / "mine.py").write_text("def f(inputs):\n    return inputs.scores.max(), None\n")
    advantages, returns = load_estimator(f"{tmp_path}/mine.py:f")(advantage_inputs([]))
    assert advantages.shape == returns.shape == (0,)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: -x.log_probs, " must return a PolicyLoss: my:f returned Tensor."),
        (
            lambda x: PolicyLoss(-x.log_probs.mean()[None]),
            "'s losses must be a tensor of shape (2,), one a token: my:f returned shape (1,).",
        ),
        (lambda x: PolicyLoss(-x.log_probs / 0), "'s losses must be finite: my:f returned 2 that are not."),
        (
            lambda x: PolicyLoss(-x.log_probs.detach()),
            " must be a function of the log-probs that learn: my:f returned losses without a gradient. "
            "Compute them from inputs.log_probs, and do not detach those.",
        ),
    ],
)
def test_a_users_loss_that_cannot_be_used_is_told_with_the_function(function, message):
    inputs = loss_inputs(-1.0, -2.0)
    with pytest.raises(ValueError) as caught:
        checked_policy_loss("my:f", function(inputs), inputs)
    assert str(caught.value) == f"policy_loss{message}"


def test_a_loss_of_a_policy_that_is_not_finite_is_a_step_to_skip():
    inputs = loss_inputs(math.nan, -1.0)
    losses = PolicyLoss(-inputs.log_probs)
    assert checked_policy_loss("my:f", losses, inputs) is losses


@pytest.mark.parametrize(("flag", "load"), [("advantage_estimator", load_estimator), ("policy_loss", load_policy_loss)])
def test_a_users_function_takes_the_record_of_its_inputs(flag, load, tmp_path):
    (tmp_path / "mine.py").write_text("def f(scores, groups):\n    pass\n")
    with pytest.raises(ValueError) as caught:
        load(f"{tmp_path}/mine.py:f")
    assert str(caught.value) == (
        f"{flag} must name a function of one argument, the record of its inputs: {tmp_path}/mine.py:f takes "
        "(scores, groups). Change its parameters."
    )
