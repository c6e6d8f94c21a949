"""The checkpoint protocol over listings and flags (DESIGN section 5)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.checkpoints import (
    CheckpointId,
    CheckpointReport,
    Flag,
    FlagError,
    FlagFile,
    candidates,
    complete_checkpoints,
    is_complete,
    newest_complete,
    parse_flag,
    prune_plan,
    write_flag,
)
from contracts.layout import RunLayout, StageLayout

LAYOUT = RunLayout("tv-20260101-abc123").stage(1, "smooth")
Objects = dict[str, bytes]


def checkpoint(
    step: int,
    generation: str = "g1",
    *,
    hosts: int = 2,
    ranks_per_host: int = 2,
    attempt: int = 1,
    layout: StageLayout = LAYOUT,
) -> Objects:
    """Every object of a complete checkpoint, data before flags."""
    objects: Objects = {}
    flags: Objects = {}
    for host in range(hosts):
        prefix = layout.host_prefix(step, generation, host)
        names = [f"__{rank}_0.distcp" for rank in range(ranks_per_host)]
        data = {f"{prefix}{name}": f"{step} {host} {name}".encode() for name in names}
        flag = Flag(
            run_id=layout.run.run_id,
            stage=layout.name,
            step=step,
            attempt=attempt,
            generation=generation,
            host_rank=host,
            num_hosts=hosts,
            world_size=hosts * ranks_per_host,
            files=tuple(
                FlagFile(key=key, size=len(body), sha256=hashlib.sha256(body).hexdigest())
                for key, body in data.items()
            ),
            metrics={"validation/reward": step / 100},
        )
        objects |= data
        flags[layout.flag(step, generation, host)] = write_flag(flag)
    return objects | flags


def newest(objects: Objects) -> CheckpointReport | None:
    return newest_complete(LAYOUT, sizes(objects), objects.__getitem__)


def reports(objects: Objects) -> list[CheckpointReport]:
    return list(complete_checkpoints(LAYOUT, sizes(objects), objects.__getitem__))


def sizes(objects: Objects) -> dict[str, int]:
    return {key: len(body) for key, body in objects.items()}


def flags_of(objects: Objects) -> list[str]:
    return [key for key in objects if key.endswith(".flag")]


def test_a_checkpoint_with_all_flags_and_files_is_complete_and_says_what_it_holds() -> None:
    objects = checkpoint(20, hosts=2, ranks_per_host=4)

    report = newest(objects)

    assert report is not None
    assert report.complete
    assert report.id == CheckpointId(20, "g1")
    assert len(report.files) == 8
    assert report.size == sum(len(body) for key, body in objects.items() if ".flag" not in key)
    assert str(report.id) == "step 20 (g1)"


@given(
    hosts=st.integers(1, 4),
    ranks=st.integers(1, 3),
    lost=st.sets(st.integers(0, 15), min_size=1),
)
def test_any_missing_object_or_flag_makes_a_checkpoint_incomplete(
    hosts: int, ranks: int, lost: set[int]
) -> None:
    """awslabs/awsome-distributed-ai#190, axolotl-ai-cloud/axolotl#3948, verl#625"""
    objects = checkpoint(20, hosts=hosts, ranks_per_host=ranks)
    keys = sorted(objects)
    for index in lost:
        objects.pop(keys[index % len(keys)], None)

    assert newest(objects) is None
    assert all(report.reasons for report in reports(objects))


@given(
    which=st.integers(0, 7),
    change=st.integers(-3, 50).filter(bool),
    hosts=st.integers(1, 4),
)
def test_any_file_of_another_size_makes_a_checkpoint_incomplete(
    which: int, change: int, hosts: int
) -> None:
    objects = checkpoint(20, hosts=hosts)
    data = [key for key in sorted(objects) if not key.endswith(".flag")]
    key = data[which % len(data)]
    listing = sizes(objects)
    listing[key] += change

    assert newest_complete(LAYOUT, listing, objects.__getitem__) is None


FOREIGN: dict[str, Callable[[Flag], dict[str, object]]] = {
    "attempt": lambda flag: {"attempt": flag.attempt + 1},
    "generation": lambda _: {"generation": "g0"},
    "num_hosts": lambda flag: {"num_hosts": flag.num_hosts + 1, "world_size": flag.world_size + 9},
    "fewer hosts": lambda flag: {"num_hosts": flag.host_rank + 1},
    "world_size": lambda flag: {"world_size": flag.world_size + 1},
    "step": lambda flag: {"step": flag.step + 1},
    "stage": lambda _: {"stage": "strict"},
    "run_id": lambda _: {"run_id": "other-20260101-abc123"},
}


@given(hosts=st.integers(2, 4), which=st.integers(0, 3), what=st.sampled_from(sorted(FOREIGN)))
def test_a_flag_from_elsewhere_never_blesses_a_checkpoint(
    hosts: int, which: int, what: str
) -> None:
    """A flag of another attempt, generation, host count, world size, step, stage or run."""
    objects = checkpoint(20, hosts=hosts)
    # Host 0 of an n-host checkpoint claiming to be alone would be caught by the others only.
    key = sorted(flags_of(objects))[0 if what == "fewer hosts" else which % hosts]
    flag = parse_flag(objects[key])
    objects[key] = write_flag(flag.model_copy(update=FOREIGN[what](flag)))

    assert newest(objects) is None


def test_one_host_of_two_is_not_a_one_host_checkpoint() -> None:
    """A two-host checkpoint was once accepted by a one-host job (verl#625)."""
    objects = checkpoint(20, hosts=2)
    objects = {key: body for key, body in objects.items() if "host-1/" not in key}
    del objects[LAYOUT.flag(20, "g1", 1)]

    [report] = reports(objects)

    assert report.reasons == ("no flag of host 1 of 2",)


@pytest.mark.parametrize("body", [b"", b"{", b"{}", b"null", b'{"format": 2}', b"\xff\xfe"])
def test_a_damaged_flag_makes_a_checkpoint_incomplete_and_says_so(body: bytes) -> None:
    objects = checkpoint(20)
    objects[LAYOUT.flag(20, "g1", 1)] = body

    [report] = reports(objects)

    assert not report.complete
    assert report.reasons[0].startswith("flag of host 1: not a checkpoint flag")


@pytest.mark.parametrize("cut", range(0, 200, 7))
def test_a_truncated_flag_is_no_flag(cut: int) -> None:
    body = checkpoint(20)[LAYOUT.flag(20, "g1", 0)]
    with pytest.raises(FlagError):
        parse_flag(body[:cut])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"host_rank": 2}, "host_rank is not below num_hosts"),
        ({"world_size": 1}, "world_size is below num_hosts"),
    ],
)
def test_a_flag_that_contradicts_itself_is_no_flag(change: dict[str, int], reason: str) -> None:
    flag = parse_flag(checkpoint(20)[LAYOUT.flag(20, "g1", 0)])
    with pytest.raises(FlagError, match=reason):
        parse_flag(flag.model_copy(update=change).model_dump_json().encode())


def test_a_flag_that_lists_a_file_twice_is_no_flag() -> None:
    flag = parse_flag(checkpoint(20)[LAYOUT.flag(20, "g1", 0)])
    twice = flag.model_copy(update={"files": flag.files * 2})
    with pytest.raises(FlagError, match="listed twice"):
        parse_flag(write_flag(twice))


def test_a_flag_survives_being_written_and_read() -> None:
    flag = parse_flag(checkpoint(20)[LAYOUT.flag(20, "g1", 0)])
    assert parse_flag(write_flag(flag)) == flag


def test_a_flag_cannot_vouch_for_files_of_another_host_or_for_nothing() -> None:
    objects = checkpoint(20)
    key = LAYOUT.flag(20, "g1", 1)
    flag = parse_flag(objects[key])
    other = parse_flag(objects[LAYOUT.flag(20, "g1", 0)])

    objects[key] = write_flag(flag.model_copy(update={"files": other.files}))
    [borrowed] = reports(objects)
    objects[key] = write_flag(flag.model_copy(update={"files": ()}))
    [empty] = reports(objects)

    assert all("is not under" in reason for reason in borrowed.reasons)
    assert len(borrowed.reasons) == len(other.files)
    assert empty.reasons == ("flag of host 1 lists no file",)


def test_flags_are_judged_whoever_gathered_them() -> None:
    objects = checkpoint(20)
    flag = parse_flag(objects[LAYOUT.flag(20, "g1", 0)])
    listing = sizes(objects)

    nothing = is_complete(LAYOUT, CheckpointId(20, "g1"), [], listing)
    twice = is_complete(LAYOUT, CheckpointId(20, "g1"), [flag, flag], listing)

    assert nothing.reasons == ("no flag exists",)
    assert "two flags of one host" in twice.reasons


def test_a_flag_that_vanishes_after_the_listing_counts_as_missing() -> None:
    objects = checkpoint(20) | checkpoint(10)
    listing = sizes(objects)
    del objects[LAYOUT.flag(20, "g1", 0)]

    found = newest_complete(LAYOUT, listing, objects.__getitem__)

    assert found is not None
    assert found.id.step == 10


def test_an_error_while_reading_flags_is_an_error_and_not_an_absence() -> None:
    """AccessDenied once read as "no checkpoint", and training restarted from step 0."""
    objects = checkpoint(20)

    def denied(key: str) -> bytes:
        raise PermissionError(key)

    with pytest.raises(PermissionError):
        newest_complete(LAYOUT, sizes(objects), denied)


@pytest.mark.parametrize("steps", [(9, 10), (50, 100), (2, 99_999_999), (0, 1)])
def test_the_newest_checkpoint_is_the_numerically_highest_step(steps: tuple[int, int]) -> None:
    """Steps compared as strings once exported 50 of {50, 100}."""
    objects = checkpoint(steps[1]) | checkpoint(steps[0])

    report = newest(objects)

    assert report is not None
    assert report.id.step == steps[1]
    assert [r.id.step for r in reports(objects)] == [steps[1], steps[0]]


def test_of_one_step_the_latest_generation_is_newest() -> None:
    early, late = "20260101T000000.000001Z-aaaa", "20260101T000000.000002Z-0000"
    report = newest(checkpoint(20, late) | checkpoint(20, early))
    assert report is not None
    assert report.id.generation == late


def test_newest_complete_skips_a_newer_incomplete_step_and_reads_no_older_flags() -> None:
    objects = checkpoint(10) | checkpoint(20) | checkpoint(30)
    del objects[LAYOUT.flag(30, "g1", 1)]
    read: list[str] = []

    def read_flag(key: str) -> bytes:
        read.append(key)
        return objects[key]

    report = newest_complete(LAYOUT, sizes(objects), read_flag)

    assert report is not None
    assert report.id.step == 20
    assert not any("step-00000010" in key for key in read)


def test_an_empty_prefix_has_no_checkpoint() -> None:
    assert newest({}) is None


def test_candidates_ignores_flags_of_other_stages_and_keys_of_another_form() -> None:
    other = RunLayout("tv-20260101-abc123").stage(0, "warm-up")
    # A key with a double slash once made complete checkpoints invisible: it is nobody's key.
    objects = checkpoint(20, layout=other) | {
        f"{LAYOUT.checkpoints_prefix}/step-00000020/g1/sync_completed_0.flag": b"",
        f"{LAYOUT.checkpoints_prefix}step-00000020/g1/sync_completed_00.flag": b"",
    }
    assert candidates(LAYOUT, sizes(objects)) == {}


# Pruning

some_checkpoints = st.lists(
    st.tuples(st.integers(0, 12), st.sampled_from("abc"), st.booleans()),
    min_size=1,
    max_size=8,
    unique_by=lambda item: item[:2],
)


def store(chosen: list[tuple[int, str, bool]]) -> Objects:
    """Checkpoints of (step, generation, complete); an incomplete one lacks its first file."""
    objects: Objects = {}
    for step, generation, complete in chosen:
        one = checkpoint(step, generation)
        if not complete:
            del one[next(iter(one))]
        objects |= one
    return objects


@given(
    chosen=some_checkpoints,
    keep=st.integers(2, 4),
    best=st.integers(0, 7),
    pinned=st.frozensets(st.integers(0, 12), max_size=2),
    done=st.integers(0, 60),
)
def test_pruning_keeps_what_matters_and_never_leaves_blessed_ruins(
    chosen: list[tuple[int, str, bool]],
    keep: int,
    best: int,
    pinned: frozenset[int],
    done: int,
) -> None:
    """Newest two, best and named ones stay whole, however far an interrupted prune got
    (verl#4873, verl#3792, EasyR1#223)."""
    objects = store(chosen)
    before = [report for report in reports(objects) if report.complete]
    best_id = before[best % len(before)].id if before else None

    plan = prune_plan(
        LAYOUT, sizes(objects), reports(objects), keep=keep, best=best_id, pinned_steps=pinned
    )
    for key in [*plan.flags, *plan.data][:done]:
        del objects[key]

    after = {report.id: report for report in reports(objects)}
    must_stay = {report.id for report in before[: max(2, keep)]}
    must_stay |= {best_id} if best_id is not None else set()
    for step in pinned:
        must_stay |= {report.id for report in [r for r in before if r.id.step == step][:1]}
    assert all(after[checkpoint_id].complete for checkpoint_id in must_stay)
    assert must_stay == set(plan.kept)
    # Whatever still has all its flags is as complete as it was: data goes only after its flags.
    was = {(step, generation): complete for step, generation, complete in chosen}
    for checkpoint_id, report in after.items():
        if len(report.flags) == 2:
            assert report.complete == was[checkpoint_id.step, checkpoint_id.generation]


def test_pruning_removes_old_checkpoints_and_leftovers_but_nothing_newer_than_complete() -> None:
    objects = store([(1, "a", True), (2, "a", False), (3, "a", True), (4, "a", True)])
    objects |= store([(5, "a", False)])

    plan = prune_plan(LAYOUT, sizes(objects), reports(objects), keep=2)

    gone = {key.split("step-")[1][:8] for key in (*plan.flags, *plan.data)}
    assert gone == {"00000001", "00000002"}
    assert all(key.endswith(".flag") for key in plan.flags)
    assert not any(key.endswith(".flag") for key in plan.data)
    assert plan.kept == (CheckpointId(4, "a"), CheckpointId(3, "a"))


def test_without_a_complete_checkpoint_nothing_is_pruned() -> None:
    objects = store([(1, "a", False), (2, "a", False)])
    plan = prune_plan(LAYOUT, sizes(objects), reports(objects), keep=2)
    assert (plan.flags, plan.data, plan.kept) == ((), (), ())


@pytest.mark.parametrize(
    "key",
    [
        "elsewhere/step-00000001/a/host-0/x",
        f"{LAYOUT.checkpoints_prefix}step-1/a/host-0/x",
        f"{LAYOUT.checkpoints_prefix}step-0000000x/a/host-0/x",
        f"{LAYOUT.checkpoints_prefix}00000001/a/host-0/x",
        f"{LAYOUT.checkpoints_prefix}step-00000001",
    ],
)
def test_pruning_never_touches_keys_of_another_form(key: str) -> None:
    objects = store([(3, "a", True), (4, "a", True), (5, "a", True)])
    plan = prune_plan(LAYOUT, sizes(objects) | {key: 1}, reports(objects), keep=2)
    assert key not in (*plan.flags, *plan.data)
    assert plan.data
