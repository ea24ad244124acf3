"""Trains a model on GSM8K: `torchrun --nproc_per_node 8 examples/gsm8k_geo3k/train_colocate.py ...`; see README.md."""

from lightrft.config import parse_config
from lightrft.trainer import build_trainer
from lightrft.utils.torchrun import record


@record
def main() -> None:
    build_trainer(parse_config()).fit()


if __name__ == "__main__":
    main()
