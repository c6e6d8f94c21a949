"""Length shaping and truncation masking.

Shapes: B sequences, T completion tokens.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["mask_truncated", "overlong_penalty"]


def overlong_penalty(
    lengths_B: Tensor, *, max_length: int, buffer: int, penalty: float = 1.0
) -> Tensor:
    """Soft overlong punishment, a value <= 0 to add to rewards_B: DAPO, arXiv:2503.14476, equation
    13.

    0 up to max_length - buffer tokens, then linear to -penalty at max_length, and never below it.
    Raises ValueError unless 0 < buffer <= max_length.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"buffer must be from 1 to {max_length} tokens, not {buffer}")
    over_B = (lengths_B.double() - (max_length - buffer)) / buffer
    return -penalty * over_B.clamp(0.0, 1.0)


def mask_truncated(mask_B_T: Tensor, finished_B: Tensor) -> Tensor:
    """The loss mask without sequences that hit the length limit before they ended (DAPO, TRL).

    `finished_B` says which sequences ended by themselves. Masked ones still count in the baseline
    of their group and in `total_sequences`; `total_tokens` is counted on the mask returned here.
    """
    return mask_B_T.masked_fill(~finished_B.bool().unsqueeze(1), 0)
