from lightrft.strategy.vllm_utils.vllm_engine import request_params
from lightrft.types import SamplingParams


def test_ids_that_are_never_drawn_get_the_lowest_bias():
    """100 below, at most a share of e^-100 is left of a probability."""
    params = request_params(SamplingParams(max_new_tokens=1, suppressed_ids=(5, 7)), 0)
    assert params["logit_bias"] == {5: -100.0, 7: -100.0}
    assert request_params(SamplingParams(max_new_tokens=1), 0)["logit_bias"] is None
