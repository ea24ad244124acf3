"""Trains the model that prepare.py made, by reinforcement learning. `make quickstart` runs both."""

from lightrft.config import parse_config
from lightrft.trainer import build_trainer


def main() -> None:
    config = parse_config()
    # Once the flags are right: it brings torch, and --help answers at once without.
    from torch.distributed.elastic.multiprocessing.errors import record

    record(lambda: build_trainer(config).fit())()


if __name__ == "__main__":
    main()
