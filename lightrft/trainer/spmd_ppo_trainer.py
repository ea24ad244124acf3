"""SPMDPPOTrainer: the optimisation of actor and critic, the same on every rank."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lightrft.models.collate import micro_batches
from lightrft.ops.kl import KL_ESTIMATORS
from lightrft.ops.losses import ppo_clip_loss, token_mean_scale, value_loss
from lightrft.ops.segments import masked_sum, zero_masked
from lightrft.strategy.strategy_base import Plan, StepResult, TrainedRole
from lightrft.trainer.ppo_trainer import PPOTrainer
from lightrft.trainer.replay_buffer import minibatch_orders
from lightrft.types import Experience, MicroBatch
from lightrft.utils.means import Means


class SPMDPPOTrainer(PPOTrainer):
    """Clipped policy and value losses, each a mean over the tokens of an optimizer step on all ranks."""

    def ppo_train(self, step: int, means: Means) -> dict[str, float]:
        metrics = {"train/lr": float(self.actor.scheduler.get_last_lr()[0])}
        if self.critic is not None:
            metrics["train/critic_lr"] = float(self.critic.scheduler.get_last_lr()[0])
        trains_actor = step > self.config.algorithm.freezing_actor_steps
        actor = self.actor if trains_actor else None
        with self.strategy.optimizer_on_device(actor, self.critic):
            for samples, plan in self.minibatches(step):
                self.train_minibatch(samples, plan, actor, means)
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
        self, samples: Sequence[Experience], plan: Plan, actor: TrainedRole | None, means: Means
    ) -> None:
        """One optimizer step of each trained role. Every rank must call it."""
        local_tokens = sum(int(sample.action_mask.sum()) for sample in samples)
        [num_tokens] = self.strategy.collectives.all_reduce_sum([local_tokens])
        scale = token_mean_scale(num_tokens, self.strategy.world_size)
        means.add("train/micro_batches", len(plan), 1)
        actor_loss = torch.zeros((), device=self.strategy.device)
        critic_loss = torch.zeros((), device=self.strategy.device)
        layout = self.experience_maker.layout
        for micro, _, is_last in micro_batches(samples, plan, layout, self.strategy.device):
            if actor is not None:
                actor_loss += self.backward(self.actor_loss(micro, means) * scale, actor, is_last)
            if self.critic is not None:
                critic_loss += self.backward(self.critic_loss(micro, means) * scale, self.critic, is_last)
        if actor is not None:
            self.add_step(means, "train", self.strategy.optimizer_step(actor, actor_loss))
        if self.critic is not None:
            self.add_step(means, "train/critic", self.strategy.optimizer_step(self.critic, critic_loss))

    def backward(self, loss: Tensor, role: TrainedRole, is_last: bool) -> Tensor:
        self.strategy.backward(loss, role, is_last)
        return loss.detach()

    def add_step(self, means: Means, prefix: str, result: StepResult) -> None:
        separator = "_" if prefix != "train" else "/"
        if not result.skipped:
            means.add(f"{prefix}{separator}grad_norm", result.grad_norm, 1)
        means.add(f"{prefix}{separator}skipped_steps", result.skipped, 1)

    def actor_loss(self, micro: MicroBatch, means: Means) -> Tensor:
        """Sum over kept tokens of the policy loss, with KL and entropy terms where asked for."""
        algorithm = self.config.algorithm
        with self.strategy.waiting("actor forward"):
            output = self.actor.model(micro, self.config.rollout.temperature)
        assert micro.action_log_probs is not None and micro.advantages is not None
        # Masked tokens may hold anything; an infinite term would reach the gradient through the mask as NaN.
        log_probs = zero_masked(output.log_probs, micro.action_mask)
        old_log_probs = zero_masked(micro.action_log_probs, micro.action_mask)
        policy = ppo_clip_loss(log_probs, old_log_probs, micro.advantages, algorithm.eps_clip, algorithm.eps_clip)
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
        means.add_masked("train/clip_low", policy.clipped_low, micro.action_mask)
        means.add_masked("train/clip_high", policy.clipped_high, micro.action_mask)
        means.add_masked("train/entropy", output.entropy, micro.action_mask)
        return masked_sum(losses, micro.action_mask)

    def critic_loss(self, micro: MicroBatch, means: Means) -> Tensor:
        """Sum over kept tokens of the value loss."""
        assert self.critic is not None and micro.values is not None and micro.returns is not None
        with self.strategy.waiting("critic forward"):
            values = self.critic.model(micro).values
        losses = value_loss(values, micro.values, micro.returns, self.config.algorithm.value_clip)
        means.add_masked("train/value_loss", losses, micro.action_mask)
        means.add_masked("train/values", values, micro.action_mask)
        return masked_sum(losses, micro.action_mask)
