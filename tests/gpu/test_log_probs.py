"""The LM head's gradients on a GPU, whose matrix products may round alike numbers otherwise in other shapes."""

import pytest
import torch

from benchmarks.models import SIZES
from tests.ops.test_log_probs import leak

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("size", ["0.5b", "7b"])
@pytest.mark.parametrize("num_tokens", [200, 1000, 16384])
def test_a_token_s_gradients_of_logits_add_up_to_nothing(size: str, num_tokens: int) -> None:
    assert leak(num_tokens, SIZES[size]["vocab_size"], SIZES[size]["hidden_size"], "cuda") < 0.05
