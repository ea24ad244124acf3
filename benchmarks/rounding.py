"""Rounding: how far bf16 takes log-probs of random decoders from fp32's, and two ways to round from each other.

    python -m benchmarks.rounding --sizes 0.5b 3b 7b audio-7b      # a CPU; minutes for each 7B

Engine and actor compute the same model in bf16 and round at other places, so that their log-probs differ where both
are right. Hugging Face rounds after each operation; engines' kernels after several: `kernels` here rounds once in a
norm, in attention, in the MLP's gate and in the rotary embedding, whose sines stay in fp32, as SGLang's do; `kernels,
HF's rope` turns queries and keys as Hugging Face does, as vLLM does. A layer at a time, so that 7B fits anywhere.
Numbers are mean absolute differences in nats, of tokens drawn from the fp32 model's distribution.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RotaryEmbedding

from benchmarks.cases import Row, markdown
from benchmarks.models import SIZES

Waves: TypeAlias = tuple[Tensor, Tensor]
"""Cosines and sines, `(1, T, D)`."""

OTHERS: dict[str, dict[str, Any]] = {
    "audio-7b": SIZES["7b"]
    | {
        "vocab_size": 156032,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
    },
}
"""The decoder of Qwen2-Audio-7B, all of whose prompt is text here; that of Qwen2.5-VL-3B is Qwen2.5-3B's."""
STD = 0.02
"""Of the weights, as models are initialised."""
DRAWS = 8
"""Tokens drawn at each place."""
COLUMNS = 8192
"""Of the vocabulary, whose head's weights exist at a time."""


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=[*SIZES, *OTHERS], default=["tiny"])
    parser.add_argument("--tokens", type=int, default=192)
    args = parser.parse_args()
    rows = [{"decoder": size} | measure((SIZES | OTHERS)[size], args.tokens) for size in args.sizes]
    sys.stdout.write(
        f"\n{time.strftime('%Y-%m-%d')}, CPU, {args.tokens} tokens, torch {torch.__version__}\n\n{markdown(rows)}\n"
    )


@torch.no_grad()
def measure(size: dict[str, Any], num_tokens: int) -> Row:
    config = Qwen2Config(**size, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    config._attn_implementation = "sdpa"
    numbers = torch.Generator().manual_seed(0)
    embeddings = draw_weights(numbers, 1, num_tokens, config.hidden_size)
    hidden = {"fp32": embeddings.float(), "hf": embeddings}
    streams = {"kernels": (None, embeddings), "hf rope": (None, embeddings)}
    waves = Qwen2RotaryEmbedding(config)(embeddings.float(), torch.arange(num_tokens)[None])
    low = tuple(wave.bfloat16() for wave in waves)
    mask = torch.full((1, 1, num_tokens, num_tokens), -torch.inf).triu(1)
    for index in range(config.num_hidden_layers):
        layer = random_layer(config, index, numbers)
        hidden["fp32"] = layer(hidden["fp32"], attention_mask=mask, position_embeddings=waves)
        layer.bfloat16()
        hidden["hf"] = layer(hidden["hf"], attention_mask=mask.bfloat16(), position_embeddings=low)
        streams = {
            "kernels": through_kernels(layer, *streams["kernels"], once_rounded_rope(waves)),
            "hf rope": through_kernels(layer, *streams["hf rope"], rounded_rope(low)),
        }
    ends = {name: normed(value).to(value.dtype)[0] for name, value in hidden.items()}
    ends |= {name: normed(added(*stream)).bfloat16()[0] for name, stream in streams.items()}
    heads = list(head_weights(config, numbers))
    # Logits are in bf16, too, where the model is.
    logits = {name: torch.cat([(end.float() @ w.T).to(end.dtype) for w in heads], -1) for name, end in ends.items()}
    drawn = torch.multinomial(logits["fp32"].softmax(-1), DRAWS, replacement=True, generator=numbers)
    log_probs = {name: value.float().log_softmax(-1).gather(-1, drawn) for name, value in logits.items()}

    def apart(first: str, second: str) -> float:
        return float((log_probs[first] - log_probs[second]).abs().mean())

    return {
        "HF - fp32": apart("hf", "fp32"),
        "kernels - fp32": apart("kernels", "fp32"),
        "kernels - HF": apart("kernels", "hf"),
        "kernels, HF's rope - HF": apart("hf rope", "hf"),
    }


def draw_weights(numbers: torch.Generator, *shape: int) -> Tensor:
    return (STD * torch.randn(shape, generator=numbers)).bfloat16()


def random_layer(config: Qwen2Config, index: int, numbers: torch.Generator) -> Any:
    """With weights that bf16 can hold, in fp32."""
    layer = Qwen2DecoderLayer(config, index)
    for name, parameter in layer.named_parameters():
        if parameter.ndim == 2:
            parameter.copy_(draw_weights(numbers, *parameter.shape))
        else:
            parameter.fill_(1.0 if "norm" in name else 0.0)
    return layer


def head_weights(config: Qwen2Config, numbers: torch.Generator) -> Iterator[Tensor]:
    for start in range(0, config.vocab_size, COLUMNS):
        yield draw_weights(numbers, min(COLUMNS, config.vocab_size - start), config.hidden_size).float()


def through_kernels(
    layer: Any, residual: Tensor | None, hidden: Tensor, rope: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """The residual and what the layer adds to it, each rounded where a fused kernel writes it."""
    residual = added(residual, hidden)
    attention, mlp = layer.self_attn, layer.mlp
    attended = attend(attention, normed(residual).bfloat16(), rope)
    residual = added(residual, attention.o_proj(attended))
    inner = normed(residual).bfloat16()
    gate = F.silu(mlp.gate_proj(inner).float())
    return residual, mlp.down_proj((gate * mlp.up_proj(inner).float()).bfloat16())


def attend(attention: nn.Module, hidden: Tensor, rope: Callable[[Tensor], Tensor]) -> Tensor:
    module: Any = attention
    _, num_tokens, _ = hidden.shape
    projections = (module.q_proj, module.k_proj, module.v_proj)
    q, k, v = (each(hidden).view(1, num_tokens, -1, module.head_dim).transpose(1, 2) for each in projections)
    out = F.scaled_dot_product_attention(
        rope(q).float(), rope(k).float(), v.float(), is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.bfloat16().transpose(1, 2).reshape(1, num_tokens, -1)


def added(residual: Tensor | None, hidden: Tensor) -> Tensor:
    return hidden if residual is None else (residual.float() + hidden.float()).bfloat16()


def normed(hidden: Tensor, eps: float = 1e-6) -> Tensor:
    wide = hidden.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)


def once_rounded_rope(waves: Waves) -> Callable[[Tensor], Tensor]:
    return lambda heads: turned(heads.float(), waves).bfloat16()


def rounded_rope(waves: Waves) -> Callable[[Tensor], Tensor]:
    return lambda heads: turned(heads, waves)


def turned(heads: Tensor, waves: Waves) -> Tensor:
    cosines, sines = (wave[:, None] for wave in waves)
    first, second = heads.chunk(2, -1)
    return heads * cosines + torch.cat([-second, first], -1) * sines


if __name__ == "__main__":
    main()
