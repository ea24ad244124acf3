"""The adder: a character-level Qwen2 of 0.8M parameters that reads "47+85=" and answers "132"."""

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

Pair = tuple[int, int]
"""The numbers to be added."""

TOKENS = ("<pad>", "<eos>", *"0123456789+=")
PAD, EOS = 0, 1
PROMPT_LEN, ANSWER_LEN = len("47+85="), len("132") + 1


def build_tokenizer() -> Qwen2Tokenizer:
    """One token a character: a byte-level vocabulary without merges.

    It is the class that AutoTokenizer picks for a Qwen2 model; any other would be read back as this one, with a token
    added that the model lacks. Naming the unknown token prevents that as well.
    """
    return Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(TOKENS)},
        merges=[],
        unk_token=TOKENS[PAD],
        pad_token=TOKENS[PAD],
        eos_token=TOKENS[EOS],
        model_max_length=32,
        clean_up_tokenization_spaces=False,
    )


def build_model(seed: int) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(TOKENS),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
    )
    return Qwen2ForCausalLM(config)


def encode(pair: Pair, answer: int) -> list[int]:
    """Ids of "47+85=132<eos>", padded on the right to one length."""
    ids = [TOKENS.index(character) for character in f"{pair[0]}+{pair[1]}={answer}"] + [EOS]
    return ids + [PAD] * (PROMPT_LEN + ANSWER_LEN - len(ids))


def text_loss(model: Qwen2ForCausalLM, ids: Tensor) -> Tensor:
    """Mean cross entropy of whole texts, `<eos>` included.

    The operands are random, so nothing can be learned from them; but a model that has trained on answers alone is far
    harder to train on afterwards: its reward stalls near 0.65 instead of rising past 0.9.
    """
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), ignore_index=PAD)


@torch.no_grad()
def answer_accuracy(model: Qwen2ForCausalLM, pairs: list[Pair], generator: torch.Generator | None = None) -> float:
    """Share of the pairs answered exactly; greedy, or sampled at temperature 1 where a generator is given."""
    right = torch.tensor([encode(pair, sum(pair)) for pair in pairs])
    ids = right[:, :PROMPT_LEN]
    for _ in range(ANSWER_LEN):
        logits = model(input_ids=ids, use_cache=False).logits[:, -1]
        drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator) if generator else logits.argmax(-1, True)
        ids = torch.cat([ids, drawn], dim=1)
    return ((ids == right) | (right == PAD)).all(dim=1).float().mean().item()
