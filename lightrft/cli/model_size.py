"""The size of a model: its numbers of parameters and its widths, and what a token costs in it.

The formulas are those of a decoder layer with RMSNorm, rotary attention and a gated MLP (Llama, Qwen, Mistral).
"""

from dataclasses import dataclass

from transformers import PreTrainedModel

from lightrft.strategy.roles import decoder_layers

FP32 = 4
"""Bytes of a number."""


@dataclass(frozen=True)
class ModelSize:
    """Numbers of parameters, and widths."""

    total: int
    learned: int
    """Fewer with an adapter, whose model is frozen."""
    root: int
    """Outside of the decoder layers: gathered for the whole of a forward."""
    layer: int
    """In the largest decoder layer."""
    largest: int
    """In the largest weight."""
    layers: int
    hidden: int
    intermediate: int
    query: int
    key: int
    heads: int
    vocabulary: int
    """0 without an LM head."""

    @classmethod
    def of(cls, model: PreTrainedModel, has_lm_head: bool, learned: int | None = None) -> "ModelSize":
        """`model` may be on the meta device."""
        text = model.config.get_text_config()
        values = text.to_dict() | {name: getattr(text, name) for name in text.attribute_map}
        hidden, heads = values["hidden_size"], values["num_attention_heads"]
        head_dim = values.get("head_dim") or hidden // heads
        counts = [sum(p.numel() for p in layer.parameters()) for layer in decoder_layers(model)]
        total = sum(p.numel() for p in model.parameters())
        return cls(
            total=total,
            learned=total if learned is None else learned,
            root=total - sum(counts),
            layer=max(counts, default=0),
            largest=max(p.numel() for p in model.parameters()),
            layers=values["num_hidden_layers"],
            hidden=hidden,
            intermediate=values.get("intermediate_size") or 4 * hidden,
            query=heads * head_dim,
            key=(values.get("num_key_value_heads") or heads) * head_dim,
            heads=heads,
            vocabulary=values["vocab_size"] if has_lm_head else 0,
        )

    def saved_per_token(self, itemsize: int) -> int:
        """Bytes that a layer keeps of a token for its backward pass.

        Each norm keeps its input in fp32, the normed input, and its output, which the next product keeps too; attention
        keeps q, k, v, its output and a log-sum-exp per head; the MLP keeps gate, its activation, up and their product.
        """
        norms = 2 * (FP32 + 2 * itemsize) * self.hidden
        attention = 2 * itemsize * (self.query + self.key) + FP32 * self.heads
        return norms + attention + 4 * itemsize * self.intermediate

    def scratch_per_token(self, itemsize: int) -> int:
        """Bytes that a layer needs of a token for a moment: three of the MLP's wide tensors, three of the narrow."""
        return 3 * itemsize * (self.intermediate + self.hidden)

    def cache_per_token(self, itemsize: int) -> int:
        return 2 * self.layers * self.key * itemsize
