"""Adapters: the low-rank updates of linear layers (LoRA, by peft) that learn in the place of a model's own weights."""

import copy
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear as AdaptedLinear
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lightrft.config import Config
from lightrft.models.actor import ActorOutput
from lightrft.models.multimodal import published_name
from lightrft.models.weights import layer_of, persistent_tensors, sent_dtype
from lightrft.types import MicroBatch

ADAPTER, REFERENCE = "default", "reference"
"""The adapter that learns, and the frozen copy of where it started from; the first has the name that peft gives it."""
ALL_LINEAR = "all-linear"
_BASE = ".base_layer."
_PREFIX = "base_model.model."
"""In front of every name in a peft folder."""
_FREE_SETTINGS = {
    *("peft_version", "task_type", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode"),
    *("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "fan_in_fan_out", "init_lora_weights"),
    *("lora_dropout", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
}
"""Settings of a saved adapter that may be any: its weights say which layers it is on, and its dropout is off."""


@dataclass(frozen=True)
class Adapter:
    """What is put into a model before it gets its weights."""

    config: LoraConfig
    """Its `target_modules` are whole names of layers."""
    seed: int
    """Of new weights."""
    folder: Path | None = None
    """The peft folder that its weights are read from; None: B is 0, so that the model starts as it is without."""
    keeps_start: bool = False
    """A frozen copy of its first weights stays beside it, for the reference."""


# What a run asks for


def make_adapter(config: Config, model: PreTrainedModel) -> Adapter:
    """The adapter that --lora_rank or --lora_path puts into `model`, whose weights need not be there.

    Raises:
        ValueError: A target matches no layer, or the folder's adapter does not fit.
        NotImplementedError: It would not be plain LoRA on linear layers of the decoder.
    """
    _refuse(config, model)
    options, seed = config.model, config.train.seed
    if options.lora_path is None:
        settings = LoraConfig(
            r=options.lora_rank,
            lora_alpha=options.lora_alpha,
            use_rslora=options.use_rslora,
            target_modules=chosen_layers(model, options.target_modules),
        )
        return Adapter(_for_model(settings, model, options.pretrain), seed)
    folder = Path(options.lora_path)
    settings = _for_model(saved_config(folder, model), model, options.pretrain)
    adapter = Adapter(settings, seed, folder, keeps_start=config.algorithm.init_kl_coef > 0)
    _check_saved_weights(adapter, folder, model)
    return adapter


def _refuse(config: Config, model: PreTrainedModel) -> None:
    options = config.model
    if options.lora_dropout > 0:
        raise NotImplementedError(
            "lora_dropout is not supported: with dropout the policy that is trained is not the policy that sampled, "
            f"and ratios do not start at 1: lora_dropout={options.lora_dropout}. Drop --lora_dropout."
        )
    if model.config.to_dict().get("quantization_config") is not None:
        raise NotImplementedError(
            f"an adapter on a quantised model is not supported: {options.pretrain} has a quantization_config. "
            "Choose a model in bf16 or fp32."
        )


def _for_model(settings: LoraConfig, model: PreTrainedModel, pretrain: str) -> LoraConfig:
    layers = decoder_linears(model)
    assert settings.target_modules is not None
    settings.fan_in_fan_out = any(isinstance(layers[name], Conv1D) for name in settings.target_modules)
    settings.base_model_name_or_path = pretrain
    settings.task_type = "CAUSAL_LM"
    return settings


def decoder_linears(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Linear layers inside the blocks of the language model, by their names."""
    decoder = set(model.get_decoder().modules())
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module in decoder and layer_of(name)
    }


def chosen_layers(model: PreTrainedModel, targets: Sequence[str]) -> list[str]:
    """Names of the linear layers that have one of `targets` as their name or as its last parts."""
    layers = decoder_linears(model)
    if ALL_LINEAR in targets:
        return list(layers)
    for target in targets:
        if any(_ends_with(name, target) for name in layers):
            continue
        if any(_ends_with(name, target) for name, _ in model.named_modules()):
            raise NotImplementedError(
                f"an adapter on another module than a linear layer of the decoder is not supported: target_modules "
                f"names {target}. Choose among {_last_parts(layers)}."
            )
        raise ValueError(
            f"target_modules must name linear layers of the decoder: {target} matches none. "
            f"Choose among {_last_parts(layers)}, or set --target_modules {ALL_LINEAR}."
        )
    return [name for name in layers if any(_ends_with(name, target) for target in targets)]


def _ends_with(name: str, target: str) -> bool:
    return f".{name}".endswith(f".{target}")


def _last_parts(names: Mapping[str, object]) -> str:
    return ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names))


# A peft folder


def saved_config(folder: Path, model: PreTrainedModel) -> LoraConfig:
    """Settings of the adapter in a peft folder, with the layers of `model` that its weights are for.

    Raises:
        ValueError: The folder holds no adapter.
        NotImplementedError: It is not plain LoRA on linear layers of the decoder.
    """
    rule = f"lora_path must be a peft folder ({CONFIG_NAME}, {SAFETENSORS_WEIGHTS_NAME})"
    if missing := [name for name in (CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME) if not (folder / name).is_file()]:
        raise ValueError(f"{rule}: {folder} has no {' and no '.join(missing)}. Change --lora_path.")
    kind = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8")).get("peft_type")
    if kind != "LORA":
        raise NotImplementedError(f"an adapter other than LoRA is not supported: {folder} holds {kind}.")
    settings = LoraConfig.from_pretrained(str(folder))
    assert isinstance(settings, LoraConfig)
    _refuse_variants(settings, folder)
    layers = decoder_linears(model)
    targets = list(dict.fromkeys(name.partition(".lora_")[0] for name in _saved_shapes(folder)))
    if others := [name for name in targets if name not in layers]:
        raise NotImplementedError(
            f"an adapter on another module than a linear layer of the decoder is not supported: {folder} has one on "
            f"{others[0]}, and {model.config.model_type} has {_last_parts(layers)}."
        )
    settings.target_modules = targets
    settings.exclude_modules = settings.layers_to_transform = settings.layers_pattern = None
    settings.lora_dropout, settings.inference_mode = 0.0, False
    return settings


def _refuse_variants(settings: LoraConfig, folder: Path) -> None:
    plain = LoraConfig().to_dict()
    # What is empty is unset, whatever its type.
    odd = [
        f"{name}={value}"
        for name, value in settings.to_dict().items()
        if name not in _FREE_SETTINGS and (value or None) != (plain.get(name) or None)
    ]
    if settings.init_lora_weights not in (True, False, "gaussian"):
        odd.append(f"init_lora_weights={settings.init_lora_weights}")
    if odd:
        raise NotImplementedError(f"only plain LoRA is supported: the adapter in {folder} has {', '.join(odd)}.")


def _saved_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    with safe_open(folder / SAFETENSORS_WEIGHTS_NAME, "pt") as file:
        return {key.removeprefix(_PREFIX): tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118


def _check_saved_weights(adapter: Adapter, folder: Path, model: PreTrainedModel) -> None:
    """Raises ValueError unless the folder holds the weights that the adapter has in `model`, which gets it."""
    add_adapter(model, adapter)
    saved = _saved_shapes(folder)
    wanted = {saved_name(name): tuple(tensor.shape) for name, tensor in adapter_tensors(model)}
    for name in sorted(saved.keys() | wanted.keys()):
        if saved.get(name) != wanted.get(name):
            raise ValueError(
                f"the adapter in lora_path must fit the model: {name} is {saved.get(name, 'absent')} in {folder} and "
                f"{wanted.get(name, 'absent')} here. Change --lora_path or --pretrain."
            )


def write_adapter(settings: LoraConfig, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Makes `folder` a peft folder of an adapter, whose full tensors have their names in the model."""
    folder.mkdir(parents=True, exist_ok=True)
    write_adapter_config(settings, folder)
    named = {_PREFIX + saved_name(name): tensor.contiguous() for name, tensor in weights.items()}
    save_file(named, folder / SAFETENSORS_WEIGHTS_NAME, metadata={"format": "pt"})


def write_adapter_config(settings: LoraConfig, folder: Path) -> None:
    settings = copy.deepcopy(settings)
    settings.inference_mode = True
    settings.target_modules = sorted(settings.target_modules or ())
    settings.save_pretrained(str(folder))


def has_adapter_config(folder: Path) -> bool:
    return (folder / CONFIG_NAME).is_file()


def read_adapter_config(folder: Path) -> LoraConfig:
    """What `write_adapter_config` wrote."""
    settings = LoraConfig.from_pretrained(str(folder))
    assert isinstance(settings, LoraConfig)
    settings.inference_mode = False
    return settings


def saved_name(name: str) -> str:
    """An adapter's weight as a peft folder knows it: without the adapter's own name."""
    layer, part, _, _ = name.rsplit(".", 3)
    return f"{layer}.{part}.weight"


# In a model


def add_adapter(model: PreTrainedModel, adapter: Adapter) -> None:
    """Puts the adapter around its layers, in fp32 on the meta device, and freezes everything else."""
    for name in (ADAPTER, REFERENCE) if adapter.keeps_start else (ADAPTER,):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Already found a `peft_config`")
            inject_adapter_in_model(copy.deepcopy(adapter.config), model, name, low_cpu_mem_usage=True)
    for layer in adapted_layers(model).values():
        layer.lora_A.float()
        layer.lora_B.float()
        layer.set_adapter(ADAPTER)


def fill_adapter(model: PreTrainedModel, adapter: Adapter) -> None:
    """Gives the adapter its first weights, on the host."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(adapter.seed)
        for layer in adapted_layers(model).values():
            layer.lora_A.to_empty(device="cpu")
            layer.lora_B.to_empty(device="cpu")
            layer.reset_lora_parameters(ADAPTER, True)
    if adapter.folder is None:
        return
    with safe_open(adapter.folder / SAFETENSORS_WEIGHTS_NAME, "pt") as file, torch.no_grad():
        for name, tensor in persistent_tensors(model):
            if _is_adapter(name):
                tensor.copy_(file.get_tensor(_PREFIX + saved_name(name)))


def adapter_config(model: PreTrainedModel) -> LoraConfig:
    """Settings of the adapter that is in the model."""
    configs = model.peft_config
    assert isinstance(configs, Mapping)
    settings = configs[ADAPTER]
    assert isinstance(settings, LoraConfig)
    return settings


def adapted_layers(model: nn.Module) -> dict[str, AdaptedLinear]:
    """By the names of the layers; none where the model has no adapter."""
    return {name: module for name, module in model.named_modules() if isinstance(module, AdaptedLinear)}


def adapter_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Weights of the adapter that learns."""
    return ((name, tensor) for name, tensor in model.named_parameters() if _is_adapter(name, ADAPTER))


def learned_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What training changes: the adapter, or without one all weights and saved buffers."""
    return dict(adapter_tensors(model)) or dict(persistent_tensors(model))


def _is_adapter(name: str, adapter: str = "") -> bool:
    return any(f".{part}.{adapter}" in name for part in ("lora_A", "lora_B"))


class AdapterReference(nn.Module):
    """The reference of an actor that trains an adapter: the actor without it, or with the one that it started from."""

    def __init__(self, actor: nn.Module) -> None:
        super().__init__()
        # In a tuple it is no submodule: who moves the reference leaves the actor where it is.
        self._actor = (actor,)

    def forward(self, micro: MicroBatch, temperature: float) -> ActorOutput:
        [actor] = self._actor
        with reference_adapter(actor):
            return actor(micro, temperature)


@contextmanager
def reference_adapter(actor: nn.Module) -> Iterator[None]:
    """The actor is the reference policy inside the context; a forward there has no gradient."""
    layers = list(adapted_layers(actor).values())
    # A layer that has no adapter of the name computes with its own weights alone.
    _use(layers, REFERENCE)
    try:
        yield
    finally:
        _use(layers, ADAPTER)


def _use(layers: Sequence[AdaptedLinear], adapter: str) -> None:
    # peft lets the adapter in use learn; here one is used and another one learns.
    learning = [(p, p.requires_grad) for layer in layers for p in layer.parameters()]
    for layer in layers:
        layer.set_adapter(adapter)
    for parameter, flag in learning:
        parameter.requires_grad_(flag)


# Merged into the model's own weights


@dataclass(frozen=True)
class SentWeight:
    """A weight as others get it: of an adapted layer W + scale * B A, under the name it has without an adapter."""

    name: str
    tensor: Tensor
    layer: AdaptedLinear | None = None
    """The layer where this is the weight that its adapter changes."""

    def parts(self, dtype: torch.dtype) -> list[tuple[Tensor, torch.dtype]]:
        """What must be whole to make it, and in which dtype: a sum is rounded to `dtype` after it alone."""
        if self.layer is None:
            return [(self.tensor, sent_dtype(self.tensor, dtype))]
        factors = (part.get_parameter(f"{ADAPTER}.weight") for part in (self.layer.lora_A, self.layer.lora_B))
        return [(tensor, tensor.dtype) for tensor in (self.tensor, *factors)]

    def made(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """The weight from whole `parts`, which stay as they are."""
        if self.layer is None:
            [weight] = parts
            return weight
        weight, a, b = parts
        delta = (b.float() @ a.float()).mul_(self.layer.scaling[ADAPTER])
        # Conv1D keeps its weight the other way round.
        return (delta.T.contiguous() if self.layer.fan_in_fan_out else delta).add_(weight).to(dtype)


def sent_weights(model: nn.Module) -> list[SentWeight]:
    """Parameters and saved buffers of a model, its adapter merged into them."""
    layers = adapted_layers(model)
    return [
        SentWeight(plain_name(name), tensor, layers.get(name.removesuffix(f"{_BASE}weight")))
        for name, tensor in persistent_tensors(model)
        if not _is_adapter(name)
    ]


def engine_weights(model: PreTrainedModel) -> list[SentWeight]:
    """`sent_weights` under the names of published folders, which engines of other packages know (WGT-06)."""
    return [replace(weight, name=published_name(model.config, weight.name)) for weight in sent_weights(model)]


def plain_name(name: str) -> str:
    """The name that a weight has in the model without an adapter."""
    return name.replace(_BASE, ".")
