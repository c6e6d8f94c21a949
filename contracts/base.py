"""The base of every model that crosses a boundary."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict

__all__ = ["Pattern", "Strict", "Tolerant"]


def _compiles(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"is no regular expression: {error}") from error
    return value


Pattern = Annotated[str, AfterValidator(_compiles)]
"""A Python regular expression."""


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
