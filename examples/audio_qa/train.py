"""Trains a model that hears: `torchrun --nproc_per_node 8 examples/audio_qa/train.py ...`; see README.md."""

from lightrft.config import parse_config
from lightrft.trainer import build_trainer


def main() -> None:
    config = parse_config()
    # Once the flags are right: it brings torch, and --help answers at once without.
    from torch.distributed.elastic.multiprocessing.errors import record

    record(lambda: build_trainer(config).fit())()


if __name__ == "__main__":
    main()
