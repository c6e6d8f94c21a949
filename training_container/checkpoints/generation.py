"""One name per incarnation, ordered by age as text."""

from __future__ import annotations

import datetime as dt
import re
import secrets

__all__ = ["mint_generation"]

_FORM = "%Y%m%dT%H%M%S.%fZ"
_PATTERN = re.compile(r"(\d{8}T\d{6}\.\d{6}Z)-[0-9a-f]{8}")


def mint_generation(now: dt.datetime, *, after: str | None = None) -> str:
    """`<utc time to the microsecond>-<random>`, later in text order than ``after``.

    ``after`` is the newest generation already in S3: the clock of a new host may run behind the
    old one's.
    """
    if after is not None and (match := _PATTERN.fullmatch(after)):
        before = dt.datetime.strptime(match[1], _FORM).replace(tzinfo=dt.UTC)
        now = max(now, before + dt.timedelta(microseconds=1))
    return f"{now.astimezone(dt.UTC).strftime(_FORM)}-{secrets.token_hex(4)}"
