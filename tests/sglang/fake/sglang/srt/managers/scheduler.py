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
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

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

    def __post_init__(self):
        if self.temperature < 1e-6:
            self.temperature, self.top_k = 1.0, 1
        if self.top_k == -1:
            self.top_k = TOP_K_ALL


@dataclass
class Request:
    prompt: list
    sampling_params: Params
    output_ids: list = field(default_factory=list)
    log_probs: list = field(default_factory=list)
    finish_reason: dict | None = None


class Model(torch.nn.Module):
    """Weights in the places and under the names of Hugging Face."""

    def __init__(self, path, dtype):
        super().__init__()
        config = AutoConfig.from_pretrained(path)
        self.inner = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        self.requires_grad_(False)

    def load_weights(self, weights):
        places = dict(self.inner.named_parameters())
        for name, weight in weights:
            # SGLang only warns of a name that it does not know.
            if name in places:
                assert places[name].shape == weight.shape
                places[name].data.copy_(weight)


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

    def generate(self, prompts, params):
        assert not self.asleep, f"asleep: {self.asleep}"
        requests = [Request(list(p), Params(**a)) for p, a in zip(prompts, params, strict=True)]
        for request in requests:
            self.run(request)
        return [
            {
                "output_ids": request.output_ids,
                "meta_info": {
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
        info = SamplingBatchInfo.from_schedule_batch(batch, self.model.inner.config.vocab_size)
        while request.finish_reason is None:
            ids = request.prompt + request.output_ids
            if tuple(ids) not in self.cache:
                self.cache[tuple(ids)] = self.model.inner(input_ids=torch.tensor([ids])).logits[:, -1].float()
            token, log_probs = self.sampler(self.cache[tuple(ids)], info, torch.tensor([len(ids) - 1]))
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
