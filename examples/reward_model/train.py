"""Trains a reward model on pairs: `torchrun --nproc_per_node 2 examples/reward_model/train.py --train_data ...`."""

from lightrft.config.preference import parse_reward_model_config
from lightrft.trainer import build_reward_model_trainer
from lightrft.utils.torchrun import record


@record
def main() -> None:
    build_reward_model_trainer(parse_reward_model_config()).fit()


if __name__ == "__main__":
    main()
