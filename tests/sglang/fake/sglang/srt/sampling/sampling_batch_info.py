from dataclasses import dataclass

import torch

TOP_K_ALL = 1 << 30


@dataclass
class SamplingBatchInfo:
    temperatures: torch.Tensor
    top_ks: torch.Tensor
    top_ps: torch.Tensor
    is_all_greedy: bool
    is_simple: bool
    sampling_seed: torch.Tensor | None = None
    custom_params: list | None = None

    @classmethod
    def from_schedule_batch(cls, batch, vocab_size):
        params = [request.sampling_params for request in batch.reqs]
        info = cls(
            temperatures=torch.tensor([[p.temperature] for p in params]),
            top_ks=torch.tensor([p.top_k for p in params]),
            top_ps=torch.tensor([p.top_p for p in params]),
            is_all_greedy=all(p.top_k <= 1 for p in params),
            is_simple=all(p.top_k == TOP_K_ALL and p.top_p == 1.0 for p in params),
        )
        info.adjusted_from_schedule_batch(batch, vocab_size)
        return info

    def adjusted_from_schedule_batch(self, batch, vocab_size):
        pass
