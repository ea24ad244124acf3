"""SPMDPPOTrainer: the optimisation of actor and critic, the same on every rank."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lightrft.config.arguments import SAMPLE_LOSSES, AlgorithmConfig
from lightrft.config.functions import is_function_spec
from lightrft.ops.aggregation import AGGREGATIONS, Aggregation, mean_scale
from lightrft.ops.kl import KL_ESTIMATORS
from lightrft.ops.losses import PolicyLoss, PolicyLossInputs, value_loss
from lightrft.ops.segments import masked_sum, zero_masked
from lightrft.strategy.roles import StepResult, TrainedRole
from lightrft.strategy.strategy_base import Plan
from lightrft.trainer.fast_exp_maker import LOG_PROB_MISMATCH
from lightrft.trainer.ppo_trainer import PPOTrainer
from lightrft.trainer.pretraining import PretrainingTexts
from lightrft.trainer.replay_buffer import minibatch_orders
from lightrft.types import Experience, MicroBatch
from lightrft.utils.means import Means


class SPMDPPOTrainer(PPOTrainer):
    """The policy's loss, aggregated by --loss_agg_mode, and the critic's, a mean over an optimizer step's tokens."""

    def ppo_train(self, step: int, means: Means) -> dict[str, float]:
        metrics = {"train/lr": float(self.actor.scheduler.get_last_lr()[0])}
        if self.critic is not None:
            metrics["train/critic_lr"] = float(self.critic.scheduler.get_last_lr()[0])
        trains_actor = step > self.config.algorithm.freezing_actor_steps
        actor = self.actor if trains_actor else None
        critic = None if self.critic is None else self.critic.model
        with self.strategy.critic_on_device(critic), self.strategy.optimizer_on_device(actor, self.critic):
            for i, (samples, plan) in enumerate(self.minibatches(step)):
                self.train_minibatch(samples, plan, actor, means, (step, i))
        return metrics

    def minibatches(self, step: int) -> Iterator[tuple[list[Experience], Plan]]:
        """This rank's samples of each optimizer step, and their plan of forwards."""
        samples = self.replay_buffer.experiences
        orders = self.strategy.collectives.all_gather_objects([sample.order for sample in samples])
        every_order = [order for part in orders for order in part]
        train = self.config.train
        for epoch in range(train.max_epochs):
            minibatches = minibatch_orders(every_order, train.train_batch_size, (train.seed, step, epoch))
            if len(minibatches) == 1:
                # The same forwards as those that gave the old log-probs: ratios start at exactly 1.
                yield samples, self.replay_buffer.plan
                continue
            for part in self.strategy.dealer.deal_minibatches(samples, minibatches):
                yield part, self.strategy.agree_plan(part, self.experience_maker.layout == "padded")

    def train_minibatch(
        self,
        samples: Sequence[Experience],
        plan: Plan,
        actor: TrainedRole | None,
        means: Means,
        place: tuple[int, int],
    ) -> None:
        """One optimizer step of each trained role. Every rank must call it.

        Args:
            samples: This rank's part of the minibatch.
            plan: Their forwards.
            actor: None while it is frozen.
            means: Takes what was seen.
            place: The step, and which of its optimizer steps this is: in the first the actor is still the policy that
                sampled.
        """
        is_first = place[1] == 0
        actor_scale, critic_scale = self.loss_scales(samples)
        means.add("train/micro_batches", len(plan), 1)
        actor_loss = torch.zeros((), device=self.strategy.device)
        critic_loss = torch.zeros((), device=self.strategy.device)
        if actor is not None and self.texts is not None:
            # Before the samples, whose last backward pass ends the optimizer step's.
            actor_loss += self.train_texts(self.texts, actor, means, place)
        for micro, _, is_last in self.experience_maker.micro_batches(samples, plan):
            if actor is not None:
                actor_loss += self.backward(self.actor_loss(micro, means, is_first) * actor_scale, actor, is_last)
            if self.critic is not None:
                critic_loss += self.backward(self.critic_loss(micro, means) * critic_scale, self.critic, is_last)
        self.phases.observe("gradients")
        if is_first and self.config.algorithm.old_log_probs == "engine":
            self.check_mismatch(means)
        if actor is not None:
            self.add_step(means, "train", self.strategy.optimizer_step(actor, actor_loss))
        if self.critic is not None:
            self.add_step(means, "train/critic", self.strategy.optimizer_step(self.critic, critic_loss))

    def train_texts(self, texts: PretrainingTexts, actor: TrainedRole, means: Means, place: tuple[int, int]) -> Tensor:
        """Adds the gradient of the pretraining loss; gives its value. Every rank must call it."""
        train = self.config.train
        rows = texts.rows(train.train_batch_size, (train.seed, *place))
        samples = [texts.sample(rows[i]) for i in self.strategy.local_share(len(rows))]
        [num_tokens] = self.strategy.collectives.all_reduce_sum([sum(s.num_response_tokens for s in samples)])
        scale = self.config.algorithm.ptx_coef * mean_scale(num_tokens, self.strategy.world_size)
        loss = torch.zeros((), device=self.strategy.device)
        plan = self.strategy.agree_plan(samples, self.experience_maker.layout == "padded")
        for micro, _, _ in self.experience_maker.micro_batches(samples, plan):
            with self.strategy.waiting("actor forward"):
                losses = -zero_masked(self.actor.model(micro, 1.0).log_probs, micro.action_mask)
            means.add_masked("train/ptx_loss", losses, micro.action_mask)
            loss += self.backward(masked_sum(losses, micro.action_mask) * scale, actor, is_last=False)
        return loss

    @property
    def aggregation(self) -> Aggregation:
        return AGGREGATIONS[loss_agg_mode(self.config.algorithm)]

    def loss_scales(self, samples: Sequence[Experience]) -> tuple[float, float]:
        """Factors of the actor's and the critic's sums over a micro-batch. Every rank must call it."""
        terms = [self.aggregation.count(sample.action_mask, [sample.num_response_tokens]) for sample in samples]
        tokens = [int(sample.action_mask.sum()) for sample in samples]
        num_terms, num_tokens = self.strategy.collectives.all_reduce_sum([sum(terms), sum(tokens)])
        world_size = self.strategy.world_size
        return mean_scale(num_terms, world_size), mean_scale(num_tokens, world_size)

    def check_mismatch(self, means: Means) -> None:
        """Compares the engine's log-probs, which were taken as they are, with those of the update's first forwards."""
        total, count = means.sums.get(LOG_PROB_MISMATCH, (0.0, 0.0))
        self.experience_maker.mismatch.add_difference(total, int(count), self.strategy.weight_version)

    def backward(self, loss: Tensor, role: TrainedRole, is_last: bool) -> Tensor:
        self.strategy.backward(loss, role, is_last)
        return loss.detach()

    def add_step(self, means: Means, prefix: str, result: StepResult) -> None:
        separator = "_" if prefix != "train" else "/"
        if not result.skipped:
            means.add(f"{prefix}{separator}grad_norm", result.grad_norm, 1)
        means.add(f"{prefix}{separator}skipped_steps", result.skipped, 1)

    def actor_loss(self, micro: MicroBatch, means: Means, is_first: bool = False) -> Tensor:
        """Weighted sum over kept tokens of the policy loss, with KL and entropy terms where asked for."""
        algorithm = self.config.algorithm
        with self.strategy.waiting("actor forward"):
            output = self.actor.model(micro, self.config.rollout.temperature)
        assert micro.action_log_probs is not None and micro.advantages is not None
        # Masked tokens may hold anything; an infinite term would reach the gradient through the mask as NaN.
        log_probs = zero_masked(output.log_probs, micro.action_mask)
        old_log_probs = zero_masked(micro.action_log_probs, micro.action_mask)
        rollout_log_probs = micro.rollout_log_probs
        if rollout_log_probs is not None:
            rollout_log_probs = zero_masked(rollout_log_probs, micro.action_mask)
        policy = self.policy_loss(
            PolicyLossInputs(
                log_probs=log_probs,
                old_log_probs=old_log_probs,
                rollout_log_probs=rollout_log_probs,
                advantages=micro.advantages,
                action_mask=micro.action_mask,
                lengths=micro.lengths,
                eps_low=algorithm.eps_clip,
                eps_high=algorithm.eps_clip if algorithm.eps_clip_high is None else algorithm.eps_clip_high,
                dual_clip=algorithm.dual_clip,
                tau_positive=algorithm.sapo_tau_pos,
                tau_negative=algorithm.sapo_tau_neg,
                drift_coef=algorithm.policy_drift_coef,
            )
        )
        losses = policy.losses
        if algorithm.use_kl_loss and micro.base_action_log_probs is not None:
            base_log_probs = zero_masked(micro.base_action_log_probs, micro.action_mask)
            kl = KL_ESTIMATORS[algorithm.kl_estimator](log_probs, base_log_probs)
            losses = losses + self.kl_controller.value * kl
            means.add_masked("train/kl_loss", kl, micro.action_mask)
        if algorithm.entropy_coef:
            losses = losses - algorithm.entropy_coef * output.entropy
        means.add_masked("train/policy_loss", policy.losses, micro.action_mask)
        means.add_masked("train/ppo_kl", old_log_probs - log_probs, micro.action_mask)
        clipped = {"low": policy.clipped_low, "high": policy.clipped_high, "dual": policy.clipped_dual}
        for name, is_clipped in clipped.items():
            if is_clipped is not None:
                means.add_masked(f"train/clip_{name}", is_clipped, micro.action_mask)
        if is_first and algorithm.old_log_probs == "engine":
            means.add_masked(LOG_PROB_MISMATCH, (old_log_probs - log_probs).abs(), micro.action_mask)
        means.add_masked("train/entropy", output.entropy, micro.action_mask)
        weights = self.aggregation.weights(micro.action_mask, micro.lengths, self.config.rollout.generate_max_len)
        return masked_sum(weights * losses, micro.action_mask)

    def policy_loss(self, inputs: PolicyLossInputs) -> PolicyLoss:
        """The loss that `--policy_loss` names. Every rank must call it equally often."""
        if not is_function_spec(self.config.algorithm.policy_loss):
            return self.policy_loss_function(inputs)
        # A user's own may fail on one rank alone, where the backward pass of the others would wait for it.
        with self.strategy.collectives.collect("policy loss"):
            policy = self.policy_loss_function(inputs)
        return policy

    def critic_loss(self, micro: MicroBatch, means: Means) -> Tensor:
        """Sum over kept tokens of the value loss."""
        assert self.critic is not None and micro.values is not None and micro.returns is not None
        with self.strategy.waiting("critic forward"):
            values = self.critic.model(micro).values
        losses = value_loss(values, micro.values, micro.returns, self.config.algorithm.value_clip)
        means.add_masked("train/value_loss", losses, micro.action_mask)
        means.add_masked("train/values", values, micro.action_mask)
        return masked_sum(losses, micro.action_mask)


def loss_agg_mode(algorithm: AlgorithmConfig) -> str:
    """The mode that is set, or that of the policy loss."""
    if algorithm.loss_agg_mode is not None:
        return algorithm.loss_agg_mode
    return "seq-mean-token-mean" if algorithm.policy_loss in SAMPLE_LOSSES else "token-mean"


SPMDPPOTrainerVL = SPMDPPOTrainer
"""The spec's name for a trainer of models that see images: text is the case without media."""
