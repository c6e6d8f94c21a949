"""Log-probabilities of chosen tokens, without ever holding a full batch of vocabulary logits.

Shapes: B sequences, L tokens, N chosen positions, V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from contracts.failures import ExitCode
from training_container.failure import StageError

__all__ = ["LogProbScorer"]

_CHUNK_LOGITS = 1 << 25
"""float32 logits held at once: 128 MiB."""


class LogProbScorer(nn.Module):
    """The model with another head: log p(target) and entropy at chosen positions.

    The backbone runs on everything; the output layer only on the hidden states that predict a
    target, in chunks whose logits are recomputed in the backward pass when there are several. It is
    the root that FSDP2 wraps, because only a root's own `forward` gathers the output layer.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.softcap: float | None = getattr(model.config, "final_logit_softcapping", None)

    def forward(
        self,
        ids_B_L: Tensor,
        sources_N: Tensor,
        targets_N: Tensor,
        temperature: float = 1.0,
        entropy_gradient: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """logp_N of the distribution softmax(logits / temperature), and its entropy_N (nats), both
        float32. The entropy carries a gradient only when asked to."""
        output = self.model.base_model(input_ids=ids_B_L, use_cache=False)
        hidden_N_H = output.last_hidden_state.flatten(0, 1).index_select(0, sources_N)
        head = self.model.get_output_embeddings()
        vocabulary = self.model.config.get_text_config().vocab_size
        chunk = max(1, _CHUNK_LOGITS // vocabulary)
        arguments = (head, self.softcap, temperature, entropy_gradient)
        if len(targets_N) <= chunk:
            return _score(hidden_N_H, targets_N, *arguments)
        parts = [
            checkpoint(_score, hidden, targets, *arguments, use_reentrant=False)
            for hidden, targets in zip(hidden_N_H.split(chunk), targets_N.split(chunk), strict=True)
        ]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])

    @torch.no_grad()
    def verify(self) -> None:
        """Compare with the model's own forward on a short text.

        Raises:
            StageError: BAD_INPUT, for an architecture whose logits are more than its output layer
                (a scale, an offset) and that would therefore be trained on other probabilities
                than its own.
        """
        device = next(self.parameters()).device
        ids = torch.arange(1, 6, device=device).unsqueeze(0)
        logits_1_L_V = self.model(input_ids=ids, use_cache=False).logits.float()
        expected_N = logits_1_L_V[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)
        measured_N, _ = self(ids, torch.arange(4, device=device), ids[0, 1:])
        if not torch.allclose(expected_N, measured_N, atol=1e-2, rtol=1e-3):
            raise StageError(
                ExitCode.BAD_INPUT,
                f"architecture {type(self.model).__name__} computes logits in a way this engine "
                f"does not know (log-probs {measured_N.tolist()}, model {expected_N.tolist()})",
            )


def _score(  # noqa: PLR0917 - checkpoint() passes positional arguments only
    hidden_N_H: Tensor,
    targets_N: Tensor,
    head: Callable[[Tensor], Tensor],
    softcap: float | None,
    temperature: float,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor]:
    logits_N_V = head(hidden_N_H).float()
    if softcap is not None:
        logits_N_V = softcap * torch.tanh(logits_N_V / softcap)
    if temperature != 1.0:
        logits_N_V = logits_N_V / temperature
    total_N = torch.logsumexp(logits_N_V, dim=-1)
    logp_N = logits_N_V.gather(1, targets_N.unsqueeze(1)).squeeze(1) - total_N
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        probabilities_N_V = torch.exp(logits_N_V - total_N.unsqueeze(1))
        entropy_N = total_N - (probabilities_N_V * logits_N_V).sum(dim=-1)
    return logp_N, entropy_N
