"""A run stops when its engine does not sample from the model that is trained."""

import logging
import math

import pytest
import torch

from lightrft.strategy.utils.collectives import Collectives
from lightrft.trainer import build_trainer
from lightrft.trainer.mismatch import MIN_TOKENS, MismatchCheck
from lightrft.utils.means import Means
from tests.distributed.runs import make_config, save_task
from tests.tiny_models import sample

CPU = torch.device("cpu")


def scored(num_tokens, difference):
    """A sample whose log-probs by the actor differ from the engine's, and those."""
    log_probs = torch.full((num_tokens,), -1.0)
    return sample([5], [6] * num_tokens, rollout_log_probs=log_probs + difference), log_probs


def judge(rollouts):
    """What each rollout made of the check; `rollouts` has (tokens, difference) of the samples of each rank."""
    check = MismatchCheck(Collectives(CPU), "torch")
    outcomes = []
    for version, by_rank in enumerate(rollouts):
        pairs = [scored(*one) for one in by_rank[check.collectives.rank]]
        try:
            check.add([s for s, _ in pairs], [p for _, p in pairs], version)
            outcomes.append(None)
        except RuntimeError as error:
            outcomes.append(str(error))
    return outcomes


def test_the_mean_is_over_the_tokens_of_all_ranks_and_of_rollouts_until_there_are_256(two_ranks):
    # 100 x 0.1 + 155 x 0.3 are 255 tokens: not judged yet. One more makes (10 + 46.5 + 0.3) / 256 = 0.222.
    first = [[(100, 0.1)], [(100, -0.3), (55, 0.3)]]
    outcomes = two_ranks.run(judge, [first, [[], [(1, 0.3)]]])
    assert outcomes[0] == outcomes[1]
    before, after = outcomes[0]
    assert before is None
    assert "torch engine at weight version 1 is off by 0.222 nats on average over 256 response tokens" in after


def test_each_judgement_starts_anew(two_ranks):
    # 0.1 is above 0.05 and below 0.2; together with the first, the second would be (25.6 + 128) / 512 = 0.3.
    good, bad = [[(256, 0.1)], []], [[(256, 0.5)], []]
    assert [[o is None for o in outcomes] for outcomes in two_ranks.run(judge, [good, bad, good])] == [
        [True, False, True]
    ] * 2


@pytest.mark.parametrize("difference", [math.nan, math.inf])
def test_a_mean_that_is_not_a_number_stops_too(two_ranks, difference):
    [[first], [second]] = two_ranks.run(judge, [[[(MIN_TOKENS, 0.0)], [(1, difference)]]])
    assert first == second and "off by" in first


def without_log_probs():
    check = MismatchCheck(Collectives(CPU), "torch")
    check.add([sample([5], [6] * 300)], [torch.zeros(300)], 1)
    return check._tokens


def test_an_engine_without_log_probs_is_not_judged(two_ranks):
    assert two_ranks.run(without_log_probs) == [0, 0]


def judged_without_first_token():
    """What the check counts of a sample whose first token was drawn from another distribution, as --use_fire does."""
    check = MismatchCheck(Collectives(CPU), "torch")
    one, log_probs = scored(101, 0.01)
    assert one.rollout_log_probs is not None
    one.rollout_log_probs[0] = -torch.inf
    one.action_mask[0] = False
    check.add([one], [log_probs], 1)
    return check._total, check._tokens


def test_tokens_that_are_masked_are_not_judged(two_ranks):
    # Two ranks with 100 tokens each, which are off by 0.01.
    assert two_ranks.run(judged_without_first_token) == [(pytest.approx(2.0, rel=1e-4), 200)] * 2


def warned():
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("lightrft.trainer.mismatch")
    logger.addHandler(handler)
    judge([[[(256, 0.1)], []]])
    logger.removeHandler(handler)
    return lines


def test_a_warning_says_once_how_far_apart_they_are(two_ranks):
    [[line], others] = two_ranks.run(warned)
    assert "torch engine at weight version 0 is off by 0.1 nats on average over 256 response tokens" in line
    assert "expected below 0.05; it stops above 0.2" in line
    assert others == []


def rollout_with_scaled_weights(config, factor):
    """A rollout of an engine whose weights are not quite those that it was sent."""
    trainer = build_trainer(config)
    trainer.update_engine_weights()
    with torch.no_grad():
        for weight in trainer.strategy.engine.engine.model.parameters():
            weight.mul_(factor)
    maker = trainer.experience_maker
    try:
        maker.make_experience_list(trainer.share(trainer.prompts, range(12)), 1, 0.0, Means())
        return None
    except RuntimeError as error:
        return str(error)
    finally:
        trainer.strategy.close()


@pytest.mark.parametrize("factor, stops", [(1.0, False), (1.5, True)])
def test_a_rollout_with_other_weights_than_the_actors_stops_the_run_on_all_ranks(two_ranks, tmp_path, factor, stops):
    save_task(tmp_path)
    rollout = {"rollout_batch_size": 12, "n_samples_per_prompt": 8, "enable_engine_sleep": False}
    train = {"train_batch_size": 96}
    config = make_config(tmp_path, tmp_path / "run", rollout=rollout, train=train)
    for message in two_ranks.run(rollout_with_scaled_weights, config, factor):
        assert (message is not None) is stops
        assert not stops or "torch engine at weight version 1 is off by" in message
