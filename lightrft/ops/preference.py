"""Preference: the loss of a model that scores the better of two answers higher."""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def bradley_terry_loss(
    chosen: Float[Tensor, "pairs"], rejected: Float[Tensor, "pairs"], margins: Float[Tensor, "pairs"]
) -> Float[Tensor, "pairs"]:
    """Negative log-probability that the chosen answer wins by its margin, in nats.

    Formula: -log sigmoid(chosen - rejected - margin)

    Source: Bradley and Terry, "Rank Analysis of Incomplete Block Designs" (1952); as a loss: Ouyang et al., "Training
    language models to follow instructions with human feedback" (2022), eq. 1; margin: Touvron et al., "Llama 2" (2023),
    eq. 2.
    """
    return -F.logsigmoid(chosen - rejected - margins)
