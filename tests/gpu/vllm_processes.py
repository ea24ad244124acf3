"""What test_vllm.py runs in processes of its own, since a process can have one vLLM that sleeps.

    python -m tests.gpu.vllm_processes {adapter|bare} FOLDER

prints, for a 0.5B Qwen2 in bf16, the mean absolute difference of vLLM's log-probs from those of a Hugging Face forward.
`bare` is vLLM as it is: it loads FOLDER itself, and samples without our seeds.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from lightrft.types import PromptExample, SamplingParams
from tests import tiny_models
from tests.strategy.engine_conformance import Reference, load
from tests.vllm.engines import engine_of, start_vllm
from tests.wide_models import MAX_MODEL_LEN

NUM_PROMPTS, PROMPT_LENGTH, NUM_TOKENS = 64, 64, 128
Sampled = Sequence[tuple[list[int], list[int], Sequence[float]]]
"""Prompt ids, response ids and log-probs of each response."""


def batch() -> list[list[int]]:
    numbers = torch.Generator().manual_seed(7)
    return torch.randint(5, 150_000, (NUM_PROMPTS, PROMPT_LENGTH), generator=numbers).tolist()


def adapter(folder: Path, model: PreTrainedModel) -> Sampled:
    """Our engine, in its second rollout: after sleep at level 2 and another sync."""
    engine = engine_of(Reference(model, tiny_models.tokenizer(), folder), dtype=torch.bfloat16, sleep_level=2)
    load(engine, model)
    engine.sleep()
    engine.wake_up(["weights"])
    load(engine, model)
    engine.wake_up(["kv_cache"])
    examples = [PromptExample(row, prompt="", prompt_ids=ids) for row, ids in enumerate(batch())]
    params = SamplingParams(max_new_tokens=NUM_TOKENS)
    outputs = engine.generate(examples, params, [[example.row] for example in examples])
    return [(e.prompt_ids, out.response_ids, out.log_probs or []) for e, [out] in zip(examples, outputs, strict=True)]


def bare(folder: Path, model: PreTrainedModel) -> Sampled:
    start_vllm()
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    import vllm

    llm = vllm.LLM(
        model=str(folder),
        dtype="bfloat16",
        skip_tokenizer_init=True,
        generation_config="vllm",
        logprobs_mode="processed_logprobs",
        max_model_len=MAX_MODEL_LEN,
        gpu_memory_utilization=0.1,
        enforce_eager=True,
    )
    params = vllm.SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False, logprobs=0)
    results = llm.generate([{"prompt_token_ids": ids} for ids in batch()], params, use_tqdm=False)
    return [
        (
            list(result.prompt_token_ids),
            list(result.outputs[0].token_ids),
            [next(iter(position.values())).logprob for position in result.outputs[0].logprobs],
        )
        for result in results
    ]


@torch.no_grad()
def mismatch(model: PreTrainedModel, sampled: Sampled) -> float:
    differences = []
    for prompt_ids, response_ids, log_probs in sampled:
        ids = torch.tensor([prompt_ids + response_ids], device=model.device)
        scores = model(input_ids=ids).logits[0, len(prompt_ids) - 1 : -1].float().log_softmax(-1)
        expected = scores.gather(-1, ids[0, len(prompt_ids) :, None]).squeeze(-1).cpu()
        differences.append((torch.tensor(log_probs) - expected).abs())
    return torch.cat(differences).mean().item()


if __name__ == "__main__":
    kind, where = sys.argv[1], Path(sys.argv[2])
    qwen2 = AutoModelForCausalLM.from_pretrained(where, dtype=torch.bfloat16).cuda().eval()
    print("mismatch", mismatch(qwen2, {"adapter": adapter, "bare": bare}[kind](where, qwen2)))
