"""LightRFT: Ray-free reinforcement fine-tuning of language models under torchrun."""

__version__ = "0.1.0"
