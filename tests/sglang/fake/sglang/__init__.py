"""What the adapter uses of SGLang 0.5.16, with its rules, on a CPU: a scheduler process around a Hugging Face model."""
