from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from lightrft.trainer.rollouts import make_sample, without_first_token
from lightrft.types import GenerationOutput, PromptExample
from tests import tiny_models


def merging_tokenizer() -> PreTrainedTokenizerFast:
    """`ab` is one token, 2, where text is encoded."""
    core = Tokenizer(BPE({"a": 0, "b": 1, "ab": 2, "</s>": 3}, [("a", "b")]))
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>")


def test_a_sample_has_the_ids_that_the_engine_used_and_not_those_of_its_text():
    """DATA-01, DATA-08: prompt a, b and response a, b stay two ids each, though `ab` is encoded as 2."""
    tokenizer = merging_tokenizer()
    assert tokenizer("ab")["input_ids"] == [2]
    prompt = PromptExample(row=0, prompt="ab", prompt_ids=[0, 1])
    output = GenerationOutput([0, 1, 3], "stop", [-1.0, -2.0, -3.0], weight_version=1)
    sample = make_sample(tokenizer, tiny_models.qwen2(), 0, 0, prompt, output)
    assert sample.input_ids.tolist() == [0, 1, 0, 1, 3]
    assert sample.input_ids[sample.response_start :].tolist() == [0, 1, 3]
    assert sample.action_mask.tolist() == [True, True, True]
    assert sample.response == "ab"


def test_a_first_token_of_another_distribution_leaves_the_loss_alone():
    sample = without_first_token(tiny_models.sample([3], [4, 5, 6]))
    assert sample.action_mask.tolist() == [False, True, True]
    assert without_first_token(tiny_models.sample([3], [4])).action_mask.tolist() == [False]
