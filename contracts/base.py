"""The base of every model that crosses a boundary."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

__all__ = ["Strict", "Tolerant"]


class Strict(BaseModel):
    """What *we* or our users write: unknown keys, coercions and mutation are errors."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )


class Tolerant(BaseModel):
    """What AWS writes: unknown fields are kept, because AWS adds fields without notice."""

    model_config = ConfigDict(
        frozen=True, extra="allow", populate_by_name=True, use_attribute_docstrings=True
    )
