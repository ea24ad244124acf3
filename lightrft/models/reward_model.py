"""RewardModel: the score of each sample."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from lightrft.config.arguments import Packing
from lightrft.models.loading import SCORE_HEAD, LoadedConfig, context_length, empty_model, load_config
from lightrft.models.scalar_head import ScalarHead
from lightrft.types import Experience, MicroBatch, PromptExample


class RewardModel(nn.Module):
    """A sequence classifier with one label, which it reads at each sample's last token: no pad id decides where."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        head = model.get_submodule(SCORE_HEAD)
        assert isinstance(head, nn.Linear)
        # The weight keeps its name.
        model.add_module(SCORE_HEAD, ScoreHead(head))
        self.model = model

    def forward(self, micro: MicroBatch) -> Tensor:
        """Scores `(B,)` fp32."""
        hidden = self.model.base_model(**micro.model_inputs).last_hidden_state.flatten(0, 1)
        scores = self.model.get_submodule(SCORE_HEAD)(hidden[micro.last_index])
        # FSDP2 hooks what a module returns, and warns of views.
        return scores.squeeze(-1).clone()


class ScoreHead(ScalarHead):
    """The classifier's own head, with its weight."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__(head.in_features, head.out_features, bias=head.bias is not None, device="meta")
        self.weight, self.bias = head.weight, head.bias


def text_sample(ids: Sequence[int]) -> Experience:
    """A text to score, as a sample without a response."""
    return Experience(
        group=0,
        index=0,
        example=PromptExample(row=-1, prompt="", prompt_ids=[]),
        response="",
        input_ids=torch.tensor(ids, dtype=torch.long),
        position_ids=torch.arange(len(ids)),
        response_start=len(ids),
        action_mask=torch.zeros(0, dtype=torch.bool),
        finish_reason="stop",
    )


def unreadable(ids: Sequence[int], loaded: LoadedConfig) -> str | None:
    """Why a model cannot read a text's ids, of which nothing is cut off; None where it can."""
    context, num_embeddings = context_length(loaded.hf_config), loaded.hf_config.get_text_config().vocab_size
    if not ids:
        return "prompt and response have no tokens for it."
    if max(ids) >= num_embeddings:
        return (
            f"its tokenizer gives the token {max(ids)}, and it has {num_embeddings} embeddings. Choose another model."
        )
    if context is not None and len(ids) > context:
        return (
            f"prompt and response must fit into its context: they have {len(ids)} of its tokens, and the context is "
            f"{context}. Lower --prompt_max_len or --generate_max_len, or choose another model."
        )
    return None


def load_classifier(pretrain: str, packing: Packing, new_head: bool = False) -> LoadedConfig:
    """`load_config` of a reward model: a sequence classifier with one label, read at the last token.

    Args:
        pretrain: Folder or hub id.
        packing: As the flag.
        new_head: The folder may hold a causal language model: the classifier is to learn its head.

    Raises:
        ValueError: The folder is absent, or holds another kind of model.
    """
    loaded = replace(load_config(pretrain, packing, "classifier"), new_head=new_head)
    hf_config = loaded.hf_config
    found = f"{pretrain} holds a {hf_config.model_type} ({', '.join(hf_config.architectures or ['no architecture'])})"
    classifier = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(hf_config.model_type)
    if new_head:
        hf_config.num_labels = 1
    elif classifier not in (hf_config.architectures or ()):
        raise ValueError(
            f"a reward model must be a sequence classifier with one label: {found}. Choose another folder."
        )
    if hf_config.num_labels != 1:
        raise ValueError(
            f"a reward model must have one label: {found} with num_labels={hf_config.num_labels}. Choose another "
            "folder."
        )
    if classifier is None or not _reads_last_token(loaded):
        raise ValueError(
            f"a reward model must read its label at the last token, as decoders do: {found}. Choose another folder."
        )
    return loaded


def _reads_last_token(loaded: LoadedConfig) -> bool:
    # Encoders name their heads otherwise.
    return SCORE_HEAD in dict(empty_model(loaded, "classifier", torch.float32).named_children())
