"""One request at a time, without a cache of keys and values but for whole prompts, which a flush alone empties."""

import ctypes
import importlib
import json
import os
import pickle
import signal
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers
from transformers import AutoConfig, AutoTokenizer

from lightrft.models.multimodal import family_of, published_name
from sglang.srt.layers.sampler import FACTORIES
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.sampling.sampling_batch_info import TOP_K_ALL, SamplingBatchInfo

_PR_SET_PDEATHSIG = 1


@dataclass
class Params:
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    sampling_seed: int
    max_new_tokens: int
    min_new_tokens: int
    ignore_eos: bool
    stop_token_ids: list
    stop: list
    no_stop_trim: bool
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    custom_params: dict | None

    def __post_init__(self):
        if self.temperature < 1e-6:
            self.temperature, self.top_k = 1.0, 1
        if self.top_k == -1:
            self.top_k = TOP_K_ALL


@dataclass
class Request:
    prompt: list
    sampling_params: Params
    media: list
    output_ids: list = field(default_factory=list)
    log_probs: list = field(default_factory=list)
    finish_reason: dict | None = None


class Model(torch.nn.Module):
    """Weights in the places and under the names of Hugging Face."""

    def __init__(self, path, dtype):
        super().__init__()
        self.config = AutoConfig.from_pretrained(path)
        # Some classes with towers are no causal language models in transformers' lists.
        make = getattr(transformers, self.config.architectures[0])._from_config
        self.inner = make(self.config, dtype=dtype).eval()
        self.requires_grad_(False)
        names = family_of(self.config).placeholders.values()
        self.placeholders = {getattr(self.config, name) for name in names}
        # Weights come by the names of published folders.
        self.places = {published_name(self.config, n): p for n, p in self.inner.named_parameters()}

    def load_weights(self, weights):
        for name, weight in weights:
            # SGLang only warns of a name that it does not know.
            if name in self.places:
                assert self.places[name].shape == weight.shape
                self.places[name].data.copy_(weight)

    def next_logits(self, ids, media):
        """Of each kind of media comes what a processor makes of it, with the prompt's positions."""
        inputs = {}
        for item in media:
            assert item["format"] == "processor_output"
            inputs |= {n: v for n, v in item.items() if n not in ("format", "hash") and not n.startswith("mrope")}
            if "mrope_positions" in item:
                known = item["mrope_positions"]
                later = torch.arange(known.shape[1], len(ids)) + item["mrope_position_delta"]
                axes = torch.cat([known, later.expand(3, -1)], 1)
                inputs["position_ids"] = torch.cat([torch.arange(len(ids))[None], axes])[:, None]
        if any(n.endswith("grid_thw") for n in inputs):
            ids_ = torch.tensor([ids])
            types = (ids_ == self.config.image_token_id).long() + 2 * (ids_ == self.config.video_token_id).long()
            inputs["mm_token_type_ids"] = types
        for name, value in inputs.items():
            if value.dtype != torch.long:
                inputs[name] = value.to(next(self.inner.parameters()).dtype)
        return self.inner(input_ids=torch.tensor([ids]), use_cache=False, **inputs).logits[:, -1].float()


class Scheduler:
    def __init__(self, arguments):
        self.model = Model(arguments["model_path"], getattr(torch, arguments["dtype"]))
        self.sampler = FACTORIES[arguments["sampling_backend"]]()
        self.context_length = arguments["context_length"]
        self.custom_weight_loaders = arguments["custom_weight_loader"]
        self.eos = json.loads(Path(arguments["model_path"], "config.json").read_text()).get("eos_token_id")
        skip = arguments["skip_tokenizer_init"]
        self.tokenizer = None if skip else AutoTokenizer.from_pretrained(arguments["model_path"])
        self.asleep = set()
        self.cache = {}

    def generate(self, prompts, params, media):
        assert not self.asleep, f"asleep: {self.asleep}"
        arguments = zip(prompts, params, pickle.loads(media), strict=True)
        requests = [Request(list(p), Params(**a), m) for p, a, m in arguments]
        for request in requests:
            self.run(request)
        return [
            {
                "output_ids": request.output_ids,
                "meta_info": {
                    "prompt_tokens": len(request.prompt),
                    "finish_reason": request.finish_reason,
                    "output_token_logprobs": list(
                        zip(request.log_probs, request.output_ids, [None] * len(request.output_ids), strict=True)
                    ),
                },
            }
            for request in requests
        ]

    @torch.inference_mode()
    def run(self, request):
        params = request.sampling_params
        limit = self.context_length - 2 - len(request.prompt)
        params.max_new_tokens = min(params.max_new_tokens, limit)
        batch = SimpleNamespace(reqs=[request], device="cpu")
        info = SamplingBatchInfo.from_schedule_batch(batch, self.model.config.get_text_config().vocab_size)
        while request.finish_reason is None:
            ids = request.prompt + request.output_ids
            key = (*ids, *(item["hash"] for item in request.media))
            if key not in self.cache:
                # Only in the prompt do placeholders stand for media.
                others = [i if i not in self.model.placeholders else 0 for i in request.output_ids]
                self.cache[key] = self.model.next_logits(request.prompt + others, request.media)
            token, log_probs = self.sampler(self.cache[key].clone(), info, torch.tensor([len(ids) - 1]))
            request.output_ids.append(int(token))
            request.log_probs.append(log_probs[0, int(token)].item())
            request.finish_reason = self.finish_reason(request)

    def finish_reason(self, request):
        params = request.sampling_params
        if len(request.output_ids) >= params.max_new_tokens:
            return {"type": "length"}
        if params.stop:
            longest = max(len(self.tokenizer.encode(s, add_special_tokens=False)) for s in params.stop)
            tail = self.tokenizer.decode(request.output_ids[-longest - 1 :])
            if any(string in tail for string in params.stop):
                return {"type": "stop"}
        if not params.ignore_eos:
            ends = {*params.stop_token_ids, self.eos, self.tokenizer and self.tokenizer.eos_token_id}
            if request.output_ids[-1] in ends:
                return {"type": "stop"}
        return None

    def update_weights(self, payload, load_format):
        assert "weights" not in self.asleep
        named_tensors = pickle.loads(payload)
        assert load_format in self.custom_weight_loaders
        module, name = load_format.rsplit(".", 1)
        getattr(importlib.import_module(module), name)(self.model, [(n, t.to("cpu")) for n, t in named_tensors])

    def flush(self):
        self.cache.clear()

    def release(self, tags):
        assert not self.asleep & set(tags)
        self.asleep |= set(tags)
        self.cache.clear()
        if "weights" in tags:
            for parameter in self.model.parameters():
                parameter.data.fill_(float("nan"))

    def resume(self, tags):
        assert set(tags) <= self.asleep
        self.asleep -= set(tags)

    def wait(self, seconds):
        time.sleep(seconds)

    def fail(self):
        raise ArithmeticError("a scheduler that fails")


def run_scheduler_process(arguments, tp_rank, connection):
    ctypes.CDLL("libc.so.6").prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    HookRegistry.apply_hooks()
    try:
        scheduler = Scheduler(arguments)
        connection.send("ready")
        while True:
            name, values = connection.recv()
            connection.send(getattr(scheduler, name)(*values))
    except Exception:
        sys.stderr.write(traceback.format_exc())
        os.kill(os.getppid(), signal.SIGQUIT)
