"""Trains the model that prepare.py made, by reinforcement learning. `make look` and `make listen` run both."""

from lightrft.config import parse_config
from lightrft.trainer import build_trainer
from lightrft.utils.torchrun import record


@record
def main() -> None:
    build_trainer(parse_config()).fit()


if __name__ == "__main__":
    main()
