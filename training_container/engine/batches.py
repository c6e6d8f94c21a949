"""Token sequences, and how a batch is dealt to ranks and cut into micro-batches.

Cutting never changes gradients: losses are divided by totals of the whole mini-batch. Everything
here is a pure function of lengths, so every rank computes the same cut without asking the others.

Shapes: B sequences of a micro-batch, L tokens of the longest, T targets of the richest, N targets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["MicroBatch", "TokenSequence", "collate", "cut", "deal", "micro_batches"]


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """One conversation: its tokens, and which of them the policy is to predict."""

    ids: Tensor
    """int64, L."""
    target: Tensor
    """bool, L; never True at position 0, which nothing precedes."""

    @classmethod
    def of(cls, prompt: Sequence[int], response: Sequence[int]) -> TokenSequence:
        """Prompt, then a response that is predicted as a whole."""
        ids = torch.tensor([*prompt, *response], dtype=torch.long)
        target = torch.zeros(len(ids), dtype=torch.bool)
        target[len(prompt) :] = True
        return cls(ids, target)

    @property
    def without_targets(self) -> TokenSequence:
        """The same tokens with nothing to predict: keeps ranks in step when one has no work."""
        return TokenSequence(self.ids, torch.zeros_like(self.target))


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences of one forward pass, right-padded.

    With causal attention a real token never sees padding on its right, so no mask is passed and
    attention kernels keep their fast path.
    """

    indices: tuple[int, ...]
    """Which sequences of the batch these are; empty for a pass that only keeps ranks in step."""
    ids_B_L: Tensor
    sources_N: Tensor
    """Flat positions in B x L whose hidden state predicts a target."""
    targets_N: Tensor
    """The target token ids."""
    places_N: Tensor
    """Flat positions in B x T of the targets."""
    mask_B_T: Tensor
    """bool; True where a target is."""

    def spread(self, values_N: Tensor) -> Tensor:
        """Values per target as B x T, 0 elsewhere; differentiable."""
        flat = values_N.new_zeros(self.mask_B_T.numel())
        return flat.index_copy(0, self.places_N, values_N).view(self.mask_B_T.shape)

    def rows(self, values_B_T: Tensor) -> list[Tensor]:
        """Each sequence's values without padding."""
        lengths = self.mask_B_T.sum(dim=1).tolist()
        return [row[:length] for row, length in zip(values_B_T, lengths, strict=True)]

    def pad(self, rows: Sequence[Tensor]) -> Tensor:
        """Per-sequence values (in this batch's order) as B x T, 0 elsewhere."""
        padded = torch.zeros(self.mask_B_T.shape, dtype=torch.float32)
        for index, row in enumerate(rows):
            padded[index, : len(row)] = row
        return padded.to(self.mask_B_T.device)


def deal(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Indices of each rank's sequences: longest first, each to the rank with the fewest tokens."""
    hands: list[list[int]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rank = min(range(ranks), key=lambda r: (tokens[r], r))
        hands[rank].append(index)
        tokens[rank] += lengths[index]
    return hands


def cut(indices: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Micro-batches of like lengths, each within ``max_tokens`` padded tokens (or a single one).

    A quarter of the budget keeps a device busy; beyond that a sequence that would be a fifth
    padding begins the next micro-batch.
    """
    micros: list[list[int]] = []
    longest = 0
    for index in sorted(indices, key=lambda i: (-lengths[i], i)):
        tokens = len(micros[-1]) * longest if micros else 0
        wasteful = lengths[index] < 0.8 * longest and tokens >= max_tokens / 4
        if micros and tokens + longest <= max_tokens and not wasteful:
            micros[-1].append(index)
        else:
            micros.append([index])
            longest = lengths[index]
    return micros


def collate(
    sequences: Sequence[TokenSequence],
    indices: Sequence[int],
    device: torch.device,
    *,
    filler: TokenSequence | None = None,
) -> MicroBatch:
    """The micro-batch of ``sequences[i] for i in indices``, of ``filler`` when there are none."""
    chosen = [sequences[i] for i in indices]
    if not chosen:
        assert filler is not None
        chosen = [filler.without_targets]
    width = max(len(s.ids) for s in chosen)
    counts = [int(s.target.sum()) for s in chosen]
    height = max(1, *counts) if counts else 1
    ids = torch.zeros(len(chosen), width, dtype=torch.long)
    target = torch.zeros(len(chosen), width, dtype=torch.bool)
    for row, sequence in enumerate(chosen):
        ids[row, : len(sequence.ids)] = sequence.ids
        target[row, : len(sequence.ids)] = sequence.target
    mask = torch.arange(height) < torch.tensor(counts).unsqueeze(1)
    positions_N = target.view(-1).nonzero().squeeze(1)
    return MicroBatch(
        indices=tuple(indices),
        ids_B_L=ids.to(device),
        sources_N=(positions_N - 1).to(device),
        targets_N=ids.view(-1)[positions_N].to(device),
        places_N=mask.view(-1).nonzero().squeeze(1).to(device),
        mask_B_T=mask.to(device),
    )


def micro_batches(
    sequences: Sequence[TokenSequence],
    *,
    rank: int,
    ranks: int,
    max_tokens: int,
    device: torch.device,
    kept: Sequence[bool] | None = None,
) -> Iterator[MicroBatch]:
    """A rank's micro-batches; as many on every rank, since each sharded pass is a collective.

    With ``kept`` those of some sequences only; each still falls to the rank that it has among all.
    """
    lengths = [len(sequence.ids) for sequence in sequences]
    hands = deal(lengths, ranks)
    if kept is not None:
        hands = [[index for index in hand if kept[index]] for hand in hands]
    cuts = [cut(hand, lengths, max_tokens) for hand in hands]
    mine = cuts[rank]
    for index in range(max(map(len, cuts))):
        indices = mine[index] if index < len(mine) else []
        yield collate(sequences, indices, device, filler=sequences[0])
