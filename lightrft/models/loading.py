"""Loading: from a Hugging Face folder to a model whose weights are not there yet, and to the weights."""

from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoModelForSequenceClassification,
    AutoProcessor,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lightrft.config import Config
from lightrft.config.arguments import Packing
from lightrft.models.attention import VARLEN, supports_varlen
from lightrft.models.collate import Layout
from lightrft.models.lora import Adapter, add_adapter, fill_adapter, make_adapter
from lightrft.models.multimodal import FAMILIES, family_of, suppressed_ids
from lightrft.models.tower_attention import use_attention_by_length
from lightrft.models.weights import persistent_tensors

Kind: TypeAlias = Literal["causal_lm", "trunk", "classifier"]
_AUTO_CLASSES = {
    "causal_lm": AutoModelForCausalLM,
    "trunk": AutoModel,
    "classifier": AutoModelForSequenceClassification,
}
SCORE_HEAD = "score"
"""Name of the head of a classifier that reads its label at the last token."""

# Each changes the logits after hidden @ weight.T, which LogProbHead does not know.
_UNSUPPORTED_LOGIT_RULES = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")


@dataclass(frozen=True)
class LoadedConfig:
    """What the folder of a model says, and the layout of micro-batches that its attention takes."""

    pretrain: str
    hf_config: PretrainedConfig
    layout: Layout
    attention: str
    adapter: Adapter | None = None
    """What is added to the model, and then learns alone."""
    weights: Callable[[torch.dtype], dict[str, Tensor]] | None = None
    """Gives the weights in the place of the folder's, where those are not there: random ones of a benchmark."""
    new_head: bool = False
    """The folder has no head of this kind: a classifier is to learn one, which starts at 0."""
    suppressed_ids: tuple[int, ...] = ()
    """Ids of media placeholders, and those that no token has: a response never has them."""

    @property
    def tower(self) -> str | None:
        """The part of the configuration that is of what reads media; None for a text model."""
        return family_of(self.hf_config).tower

    @property
    def attn_implementation(self) -> str | dict[str, str]:
        """As transformers takes it: what reads media sees whole images, not the samples of a packed row."""
        return self.attention if self.tower is None else {"text_config": self.attention, self.tower: "sdpa"}


def load_config(pretrain: str, packing: Packing, kind: Kind = "causal_lm") -> LoadedConfig:
    """Reads a model's configuration and checks that it is a causal language model that we can train, with media or not.

    A trunk may come from a model with another head, such as a reward model, and so may a classifier.

    Raises:
        ValueError: The folder is absent, has no configuration, or holds another kind of model.
        NotImplementedError: Its head does more than a matrix product.
    """
    hf_config = _read_config(pretrain)
    if not _is_causal(hf_config, kind):
        raise ValueError(
            f"the model must be a causal language model: {pretrain} holds a {hf_config.model_type} "
            f"({', '.join(hf_config.architectures or ['no architecture named'])}). Choose another folder; those that "
            f"take media are {', '.join(FAMILIES)}."
        )
    rules = hf_config.get_text_config().to_dict()
    if odd := [name for name in _UNSUPPORTED_LOGIT_RULES if rules.get(name) not in (None, 1.0)]:
        raise NotImplementedError(
            f"models that change their logits after the head are not supported: {pretrain} ({hf_config.model_type}) "
            f"has {', '.join(odd)}. Choose another model."
        )
    _disable_dropout(hf_config)
    text_config = hf_config.get_text_config()
    model_class = cast(type[PreTrainedModel], AutoModel._model_mapping[type(text_config)])
    varlen = supports_varlen(model_class, hf_config)
    layout: Layout = "packed" if packing == "packed" or (packing == "auto" and varlen) else "padded"
    attention = VARLEN if layout == "packed" and varlen else "sdpa"
    return LoadedConfig(pretrain, hf_config, layout, attention)


def with_adapter(loaded: LoadedConfig, config: Config) -> LoadedConfig:
    """The actor's model with the adapter that the flags ask for, if any.

    Raises:
        ValueError: The adapter does not fit the model.
        NotImplementedError: It is of a kind that we cannot train.
    """
    if not config.model.trains_adapter:
        return loaded
    return replace(loaded, adapter=make_adapter(config, empty_model(loaded, "causal_lm", torch.float32)))


def _is_causal(hf_config: PretrainedConfig, kind: Kind) -> bool:
    """Whether transformers knows a causal model of this type, and the weights, where it says so, are of that class.

    Encoders have such a class as well, but their folders name another one.
    """
    if family_of(hf_config).tower is not None:
        causal = cast(type, AutoModelForMultimodalLM._model_mapping[type(hf_config)]).__name__
    elif type(hf_config) in AutoModelForCausalLM._model_mapping:
        causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[hf_config.model_type]
    else:
        return False
    return kind != "causal_lm" or not hf_config.architectures or causal in hf_config.architectures


def _read_config(pretrain: str) -> PretrainedConfig:
    looks_like_path = pretrain.startswith((".", "/", "~")) or pretrain.count("/") != 1
    if not Path(pretrain).is_dir() and looks_like_path:
        raise ValueError(f"the model folder must exist: {pretrain} does not. Check the path.")
    try:
        return AutoConfig.from_pretrained(pretrain)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        if not Path(pretrain).is_dir():
            raise ValueError(
                f"the model must be a folder or a hub id: {pretrain} is no folder here, and the hub has not given it "
                f"({reason}). Check the path."
            ) from error
        raise ValueError(
            f"the model folder must hold a Hugging Face configuration (config.json): {pretrain} does not ({reason})."
        ) from error


def _disable_dropout(hf_config: PretrainedConfig) -> None:
    # With dropout the policy that is trained is not the policy that sampled: ratios would not start at 1.
    for part in (hf_config, *(getattr(hf_config, name) for name in hf_config.sub_configs)):
        for name, value in part.to_dict().items():
            if isinstance(value, float) and ("dropout" in name or name.endswith(("_pdrop", "layerdrop"))):
                setattr(part, name, 0.0)


def empty_model(loaded: LoadedConfig, kind: Kind, dtype: torch.dtype) -> PreTrainedModel:
    """The model with its parameters on the meta device and real buffers, among them those that no file holds.

    An adapter is in fp32 whatever the dtype, and the only part that has gradients.
    """
    with init_empty_weights(include_buffers=False):
        model = _auto_class(loaded, kind).from_config(
            deepcopy(loaded.hf_config), dtype=dtype, attn_implementation=loaded.attn_implementation
        )
    family = family_of(loaded.hf_config)
    if family.tower is not None and family.has_segments:
        use_attention_by_length(model, type(getattr(loaded.hf_config, family.tower)))
    # Building on the meta device separates tied embeddings.
    model.tie_weights()
    if loaded.adapter is not None:
        add_adapter(model, loaded.adapter)
    return model


def _auto_class(loaded: LoadedConfig, kind: Kind) -> Any:
    """The class of transformers that makes a model of this kind."""
    is_multimodal = kind == "causal_lm" and loaded.tower is not None
    return AutoModelForMultimodalLM if is_multimodal else _AUTO_CLASSES[kind]


def pretrained_weights(loaded: LoadedConfig, kind: Kind, dtype: torch.dtype) -> dict[str, Tensor]:
    """Every weight on the host, once, by the name that `empty_model` gives it.

    Raises:
        ValueError: The folder lacks a weight, or holds one of another shape; transformers would draw it at random.
    """
    if loaded.weights is not None:
        return loaded.weights(dtype)
    # transformers before 5.24 does not find a trunk's weights in the old layout of a whole model that takes media.
    is_trunk_of_whole = kind == "trunk" and loaded.tower is not None
    model, info = _auto_class(loaded, "causal_lm" if is_trunk_of_whole else kind).from_pretrained(
        loaded.pretrain, config=loaded.hf_config, dtype=dtype, output_loading_info=True
    )
    missing = set(info["missing_keys"])
    if is_trunk_of_whole:
        model = model.base_model
        missing.discard("lm_head.weight")
    if loaded.new_head:
        new = {name for name in missing if name.startswith(f"{SCORE_HEAD}.")}
        for name in new:
            nn.init.zeros_(model.get_parameter(name))
        missing -= new
    if faults := sorted([*missing, *(str(key) for key in info["mismatched_keys"])]):
        raise ValueError(f"the model folder must hold every weight: {loaded.pretrain} lacks {', '.join(faults[:5])}.")
    if loaded.adapter is not None:
        add_adapter(model, loaded.adapter)
        fill_adapter(model, loaded.adapter)
    return dict(persistent_tensors(model))


def materialize(model: nn.Module, parameter_device: torch.device, buffer_device: torch.device) -> None:
    """Allocates the parameters, without values, and moves the buffers with theirs."""
    buffers = {name: buffer.to(buffer_device) for name, buffer in model.named_buffers()}
    model.to_empty(device=parameter_device)
    for name, buffer in buffers.items():
        module, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(module), attribute, buffer)


def check_same_family(actor: LoadedConfig, other: LoadedConfig) -> None:
    """Raises ValueError where another role would not take the actor's samples."""
    types = [loaded.hf_config.model_type for loaded in (actor, other)]
    if (actor.tower, other.tower) != (None, None) and types[0] != types[1]:
        raise ValueError(
            f"models that take media must be of one family, whose inputs they share: {actor.pretrain} is a {types[0]}, "
            f"{other.pretrain} a {types[1]}. Choose another folder for one of them."
        )


def check_weight_files(pretrain: str) -> None:
    """Raises ValueError where a model's folder has no weights at all."""
    folder = Path(pretrain)
    if folder.is_dir() and not any(path.suffix in (".safetensors", ".bin") for path in folder.iterdir()):
        raise ValueError(
            f"the model folder must hold weights (*.safetensors or *.bin): {pretrain} has none. Copy them there, or "
            "choose another folder."
        )


def load_tokenizer(pretrain: str) -> PreTrainedTokenizerBase:
    """Reads the model's tokenizer.

    Raises:
        ValueError: There is none.
    """
    rule = f"the model folder must hold a tokenizer (tokenizer.json): {pretrain} does not"
    try:
        tokenizer = AutoTokenizer.from_pretrained(pretrain)
    except (OSError, ValueError) as error:
        raise ValueError(f"{rule} ({str(error).splitlines()[0]}).") from error
    # Where the files are missing, some classes give a tokenizer with special tokens alone.
    if set(tokenizer.get_vocab().values()) <= set(tokenizer.added_tokens_decoder):
        raise ValueError(f"{rule}. Copy the tokenizer's files there.")
    return tokenizer


def with_suppressed_ids(loaded: LoadedConfig, tokenizer: PreTrainedTokenizerBase) -> LoadedConfig:
    return replace(loaded, suppressed_ids=suppressed_ids(loaded.hf_config, tokenizer))


def load_processor(loaded: LoadedConfig) -> ProcessorMixin | None:
    """Reads what turns media into the model's inputs; None for a text model.

    Raises:
        ValueError: There is none.
    """
    if loaded.tower is None:
        return None
    try:
        return AutoProcessor.from_pretrained(loaded.pretrain)
    except (OSError, ValueError, ImportError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"the folder of a model with media must hold its processor: {loaded.pretrain} does not, or it cannot be "
            f"loaded here ({reason}). Copy its files there, and install what it asks for."
        ) from error


def load_generation_config(pretrain: str) -> GenerationConfig | None:
    """What the model's folder says of generating; a model need not have it."""
    with suppress(OSError):
        return GenerationConfig.from_pretrained(pretrain)
    return None


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, loaded: LoadedConfig) -> tuple[int, ...]:
    """Ids that end a response: those of the tokenizer, of the model's configuration and of its generation config.

    Chat models often end a turn with an id that is not the tokenizer's end token.
    """
    declared = [tokenizer.eos_token_id, loaded.hf_config.get_text_config().to_dict().get("eos_token_id")]
    if (generation_config := load_generation_config(loaded.pretrain)) is not None:
        declared.append(generation_config.eos_token_id)
    ids = [i for value in declared for i in (value if isinstance(value, list) else [value])]
    return tuple(sorted({int(i) for i in ids if i is not None}))


def context_length(hf_config: PretrainedConfig) -> int | None:
    """Positions that the model can attend to, or None where its configuration does not say."""
    text_config = hf_config.get_text_config()
    # Older families have it under a name of their own, such as n_positions.
    name = text_config.attribute_map.get("max_position_embeddings", "max_position_embeddings")
    return text_config.to_dict().get(name)


def check_context(hf_config: PretrainedConfig, prompt_max_len: int, generate_max_len: int) -> None:
    """Raises ValueError when the longest prompt and response do not fit into the model's context."""
    context = context_length(hf_config)
    if context is not None and prompt_max_len + generate_max_len > context:
        raise ValueError(
            f"prompt and response must fit into the model's context: prompt_max_len={prompt_max_len} + "
            f"generate_max_len={generate_max_len} = {prompt_max_len + generate_max_len} tokens, context {context}. "
            f"Lower one of them by {prompt_max_len + generate_max_len - context} or more."
        )


def check_tensor_parallel(hf_config: PretrainedConfig, tp_size: int) -> None:
    """Raises ValueError when the rollout group cannot split the attention heads evenly."""
    heads = hf_config.get_text_config().num_attention_heads
    if heads % tp_size:
        raise ValueError(
            f"engine_tp_size must divide the model's attention heads: {heads} heads, engine_tp_size={tp_size}. "
            f"Set --engine_tp_size to a divisor of {heads}."
        )
