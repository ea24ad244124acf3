import torch

FACTORIES = {}


def register_sampler_backend(backend, factory):
    FACTORIES[backend] = factory


class Sampler(torch.nn.Module):
    def _preprocess_logits(self, logits, sampling_info):
        return logits

    def forward(self, logits, sampling_info, positions):
        """Token ids, and the log-probs of the whole vocabulary that SGLang gives."""
        logits = self._preprocess_logits(logits, sampling_info)
        if sampling_info.is_all_greedy:
            return logits.argmax(-1), logits.log_softmax(-1)
        probs = (logits / sampling_info.temperatures).softmax(-1)
        return self._sample_from_probs(probs, sampling_info, positions, sampling_info.is_simple), probs.log()

    def _sample_from_probs(self, probs, sampling_info, positions, simple_sampling_case):
        return torch.multinomial(probs, 1).view(-1).int()
