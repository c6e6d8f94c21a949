"""The checkpoint protocol as pure functions over listings and flags.

S3 has no atomic write over many keys, and SageMaker's own sync copies files one by one in no
documented order. So a checkpoint is what its *flags* say it is: each host writes
`sync_completed_<r>.flag` last, listing every file it uploaded. The caller makes one paginated LIST
of the checkpoints prefix and reads the flags of the candidates; everything else is decided here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field, ValidationError, model_validator

from contracts.base import Strict
from contracts.layout import MAX_STEP, StageLayout, parse_flag_key

__all__ = [
    "FLAG_FORMAT",
    "CheckpointId",
    "CheckpointReport",
    "Flag",
    "FlagError",
    "FlagFile",
    "Listing",
    "PrunePlan",
    "candidates",
    "complete_checkpoints",
    "is_complete",
    "newest_complete",
    "parse_flag",
    "prune_plan",
    "write_flag",
]

FLAG_FORMAT = 1
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, slots=True, order=True)
class CheckpointId:
    """(step, generation) of one stage. Orders as the protocol does: highest step, latest
    generation.

    Generations begin with a UTC time to the microsecond, so their text order is their age.
    """

    step: int
    generation: str

    def __str__(self) -> str:
        return f"step {self.step} ({self.generation})"


class FlagFile(Strict):
    """One uploaded file: full key, bytes, sha256 of the content."""

    key: Annotated[str, Field(min_length=1)]
    size: Count
    sha256: Sha256


class Flag(Strict):
    """What host ``host_rank`` says about its part of a checkpoint."""

    format: Literal[1] = 1
    run_id: str
    stage: str
    step: Annotated[int, Field(ge=0, le=MAX_STEP)]
    attempt: Annotated[int, Field(ge=1)]
    generation: str
    host_rank: Count
    num_hosts: Annotated[int, Field(ge=1)]
    world_size: Annotated[int, Field(ge=1)]
    files: tuple[FlagFile, ...]
    metrics: Mapping[str, float] = Field(default_factory=dict)
    """Metrics of the step that choose the best checkpoint, such as `validation/reward`."""

    @model_validator(mode="after")
    def _consistent(self) -> Flag:
        if self.host_rank >= self.num_hosts:
            raise ValueError("host_rank is not below num_hosts")
        if self.world_size < self.num_hosts:
            raise ValueError("world_size is below num_hosts")
        if len({file.key for file in self.files}) != len(self.files):
            raise ValueError("a file is listed twice")
        return self


class FlagError(ValueError):
    """A flag object that is not a flag of this protocol."""


def write_flag(flag: Flag) -> bytes:
    """The flag object's body."""
    return flag.model_dump_json(indent=1).encode()


def parse_flag(body: bytes) -> Flag:
    """A flag from its object's body.

    Raises:
        FlagError: when the body is truncated, of another format, or inconsistent.
    """
    try:
        return Flag.model_validate_json(body)
    except ValidationError as error:
        raise FlagError(f"not a checkpoint flag: {error.errors()[0]['msg']}") from error


Listing = Mapping[str, int]
"""Key to size in bytes of every object under a stage's checkpoints prefix."""
ReadFlag = Callable[[str], bytes]


@dataclass(frozen=True, slots=True)
class CheckpointReport:
    """Verdict on one checkpoint; ``reasons`` is empty exactly when it is complete."""

    id: CheckpointId
    reasons: tuple[str, ...]
    flags: tuple[Flag, ...] = field(default=(), repr=False)

    @property
    def complete(self) -> bool:
        return not self.reasons

    @property
    def files(self) -> tuple[FlagFile, ...]:
        """Every file of a complete checkpoint."""
        return tuple(file for flag in self.flags for file in flag.files)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


def candidates(layout: StageLayout, listing: Listing) -> dict[CheckpointId, dict[int, str]]:
    """Every (step, generation) with at least one flag, and its flag keys by host rank."""
    found: dict[CheckpointId, dict[int, str]] = defaultdict(dict)
    for key in listing:
        parsed = parse_flag_key(key)
        if parsed is None or key != layout.flag(parsed.step, parsed.generation, parsed.host_rank):
            continue
        found[CheckpointId(parsed.step, parsed.generation)][parsed.host_rank] = key
    return dict(found)


def is_complete(
    layout: StageLayout, checkpoint: CheckpointId, flags: Iterable[Flag], listing: Listing
) -> CheckpointReport:
    """Judge one checkpoint from what its flags state, never from today's cluster.

    Complete means: flags of hosts 0..num_hosts-1 exist, belong to this run, stage, step and
    generation, agree on num_hosts, world size and attempt, and every file they list lies under this
    checkpoint with its size.
    """
    flags = tuple(sorted(flags, key=lambda flag: flag.host_rank))
    if not flags:
        return CheckpointReport(checkpoint, ("no flag exists",))
    reasons = [*_identity(layout, checkpoint, flags), *_agreement(flags)]
    reasons += _files(layout, checkpoint, flags, listing)
    return CheckpointReport(checkpoint, tuple(reasons), flags)


def _identity(layout: StageLayout, checkpoint: CheckpointId, flags: tuple[Flag, ...]) -> list[str]:
    want = (layout.run.run_id, layout.name, checkpoint.step, checkpoint.generation)
    return [
        f"flag of host {flag.host_rank} belongs to {got}, not {want}"
        for flag in flags
        if (got := (flag.run_id, flag.stage, flag.step, flag.generation)) != want
    ]


def _agreement(flags: tuple[Flag, ...]) -> list[str]:
    reasons = []
    for name in ("num_hosts", "world_size", "attempt"):
        values = sorted({getattr(flag, name) for flag in flags})
        if len(values) > 1:
            reasons.append(f"flags disagree on {name}: {values}")
    present = [flag.host_rank for flag in flags]
    expected = max(flag.num_hosts for flag in flags)
    missing = sorted(set(range(expected)) - set(present))
    if missing:
        reasons.append(f"no flag of host {', '.join(map(str, missing))} of {expected}")
    if len(set(present)) != len(present):
        reasons.append("two flags of one host")
    return reasons


def _files(
    layout: StageLayout, checkpoint: CheckpointId, flags: tuple[Flag, ...], listing: Listing
) -> list[str]:
    reasons = []
    for flag in flags:
        prefix = layout.host_prefix(checkpoint.step, checkpoint.generation, flag.host_rank)
        if not flag.files:
            reasons.append(f"flag of host {flag.host_rank} lists no file")
        for file in flag.files:
            if not file.key.startswith(prefix):
                reasons.append(f"{file.key} is not under {prefix}")
            elif file.key not in listing:
                reasons.append(f"{file.key} is missing")
            elif listing[file.key] != file.size:
                reasons.append(f"{file.key} has {listing[file.key]} bytes, not {file.size}")
    return reasons


def complete_checkpoints(
    layout: StageLayout, listing: Listing, read_flag: ReadFlag
) -> Iterable[CheckpointReport]:
    """Reports of all candidates, newest first, lazily: flags of a candidate are read when it is
    reached.

    ``read_flag(key)`` returns a flag object's body and lets every error but absence propagate: an
    AccessDenied is not "nothing found". A flag that vanished since the listing (KeyError) counts as
    missing.
    """
    found = candidates(layout, listing)
    for checkpoint in sorted(found, reverse=True):
        flags, unreadable = [], []
        for host, key in sorted(found[checkpoint].items()):
            try:
                flags.append(parse_flag(read_flag(key)))
            except (FlagError, KeyError) as error:
                unreadable.append(f"flag of host {host}: {error}")
        report = is_complete(layout, checkpoint, flags, listing)
        yield CheckpointReport(checkpoint, (*unreadable, *report.reasons), report.flags)


def newest_complete(
    layout: StageLayout, listing: Listing, read_flag: ReadFlag
) -> CheckpointReport | None:
    """Highest step, then latest generation, that is complete; None when there is none."""
    reports = complete_checkpoints(layout, listing, read_flag)
    return next((report for report in reports if report.complete), None)


@dataclass(frozen=True, slots=True)
class PrunePlan:
    """Keys to delete, flags strictly before data."""

    flags: tuple[str, ...]
    data: tuple[str, ...]
    kept: tuple[CheckpointId, ...]


def prune_plan(
    layout: StageLayout,
    listing: Listing,
    reports: Iterable[CheckpointReport],
    *,
    keep: int,
    best: CheckpointId | None = None,
    pinned_steps: frozenset[int] = frozenset(),
) -> PrunePlan:
    """What may go: complete checkpoints beyond ``keep``, and leftovers older than the newest
    complete one.

    Never goes: the newest two complete, the best, the newest complete of each pinned step (a later
    stage starts from it), and anything at or above the newest complete checkpoint, which may still
    be uploading. Flags go first, so that an interrupted prune leaves data without a blessing, never
    the reverse.
    """
    complete = sorted((report.id for report in reports if report.complete), reverse=True)
    if not complete:
        return PrunePlan((), (), ())
    kept = set(complete[: max(2, keep)])
    if best is not None:
        kept.add(best)
    for step in pinned_steps:
        kept.update([c for c in complete if c.step == step][:1])
    flags: list[str] = []
    data: list[str] = []
    for key in sorted(listing):
        owner = _owner(layout, key)
        if owner is None or owner in kept or owner >= complete[0]:
            continue
        (flags if parse_flag_key(key) else data).append(key)
    return PrunePlan(tuple(flags), tuple(data), tuple(sorted(kept, reverse=True)))


def _owner(layout: StageLayout, key: str) -> CheckpointId | None:
    """The checkpoint a key belongs to; None for keys of another form."""
    prefix = layout.checkpoints_prefix
    if not key.startswith(prefix):
        return None
    parts = key[len(prefix) :].split("/", 2)
    digits = parts[0].removeprefix("step-")
    if (
        len(parts) < 3
        or len(digits) != 8
        or not digits.isdigit()
        or not parts[0].startswith("step-")
    ):
        return None
    return CheckpointId(int(digits), parts[1])
