"""Trains a reward model on pairs: `torchrun --nproc_per_node 2 examples/reward_model/train.py --train_data ...`."""

from torch.distributed.elastic.multiprocessing.errors import record

from lightrft.config.preference import parse_reward_model_config
from lightrft.trainer.reward_model_trainer import build_reward_model_trainer


@record
def main() -> None:
    build_reward_model_trainer(parse_reward_model_config()).fit()


if __name__ == "__main__":
    main()
