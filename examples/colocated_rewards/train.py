"""Trains the policy that prepare.py made on the sum of three reward models and a rule. `make colocated` runs both."""

from lightrft.config import parse_config
from lightrft.trainer import build_trainer
from lightrft.utils.torchrun import record


@record
def main() -> None:
    build_trainer(parse_config()).fit()


if __name__ == "__main__":
    main()
