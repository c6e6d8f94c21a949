"""EC2 will reclaim an instance, or says that it may: ask its stage for a checkpoint."""

from __future__ import annotations

import datetime as dt
from typing import Any

from contracts.events import RebalanceEvent, SpotInterruptionEvent, parse_event
from lambdas.handlers._entry import entry
from lambdas.hub import hub
from lambdas.logic.progress import on_spot_warning


@entry
def handler(event: dict[str, Any]) -> None:
    parsed = parse_event(event)
    assert isinstance(parsed, SpotInterruptionEvent | RebalanceEvent)
    warning = isinstance(parsed, SpotInterruptionEvent)
    text = "Spot interruption warning" if warning else "rebalance recommendation"
    time = parsed.time or dt.datetime.now(dt.UTC)
    on_spot_warning(hub(), parsed.detail.instance_id, time, text)
