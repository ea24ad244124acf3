"""Trains a reward model on pairs: `torchrun --nproc_per_node 2 examples/reward_model/train.py --train_data ...`."""

from lightrft.config.preference import parse_reward_model_config
from lightrft.trainer import build_reward_model_trainer


def main() -> None:
    config = parse_reward_model_config()
    # Once the flags are right: it brings torch, and --help answers at once without.
    from torch.distributed.elastic.multiprocessing.errors import record

    record(lambda: build_reward_model_trainer(config).fit())()


if __name__ == "__main__":
    main()
