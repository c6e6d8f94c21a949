"""Who is to blame, from what the hosts say of themselves: tables as a reader would draw them."""

from __future__ import annotations

import json

import pytest

from contracts.failures import ExitCode, Failure
from training_container.cluster.limits import ClusterLimits
from training_container.cluster.stall import StallWatch
from training_container.cluster.table import (
    Board,
    Node,
    Phase,
    RankProgress,
    Row,
    Table,
    missing_hosts,
)
from training_container.cluster.verdict import Verdict, judge, lost_hosts

HOSTS = ("algo-1", "algo-2", "algo-3")
LIMITS = ClusterLimits()
GONE = LIMITS.lost + 1
CLUSTER, INTERNAL, STOPPED = ExitCode.CLUSTER, ExitCode.INTERNAL, ExitCode.STOPPED


def row(rank: int, end: ExitCode | str = Phase.TRAINING) -> Row:
    """A host in a phase, or one that failed with a code."""
    made = Row(rank, HOSTS[rank], f"10.0.0.{rank + 1}", 8, 8)
    if isinstance(end, ExitCode):
        made.failure, made.phase = (int(end), f"cause {rank}"), Phase.DONE
    else:
        made.phase = end
    return made


def table(*ends: ExitCode | str, ages: tuple[float, ...] = (0.0, 0.0, 0.0)) -> Table:
    rows = {rank: row(rank, end) for rank, end in enumerate(ends)}
    return Table(0.0, rows, {rank: ages[rank] for rank in rows})


T, D = Phase.TRAINING, Phase.DONE
OPEN = "open"


@pytest.mark.parametrize(
    ("ends", "ages", "troubled", "expected"),
    [
        ((T, T, T), (0, 0, 0), 0, OPEN),
        ((D, T, D), (0, 0, 0), 0, OPEN),
        ((D, D, D), (0, 0, 0), 0, None),
        # A reason of its own ends the job at once, whatever else is seen.
        ((T, ExitCode.REWARD, T), (0, 0, 0), 0, (ExitCode.REWARD, "host 1 (algo-2): cause 1")),
        ((CLUSTER, ExitCode.DATA, T), (0, 0, GONE), 0, (ExitCode.DATA, "host 1")),
        ((INTERNAL, ExitCode.REWARD, INTERNAL), (0, 0, 0), 0, (ExitCode.REWARD, "host 1")),
        # Consequences wait for a cause, but not for ever.
        ((CLUSTER, T, T), (0, 0, 0), 1, OPEN),
        ((CLUSTER, T, T), (0, 0, 0), LIMITS.settle + 1, (CLUSTER, "host 0 (algo-1): cause 0")),
        ((CLUSTER, INTERNAL, T), (0, 0, 0), 1, OPEN),
        ((CLUSTER, INTERNAL, T), (0, 0, 0), LIMITS.settle + 1, (INTERNAL, "host 1")),
        ((CLUSTER, CLUSTER, CLUSTER), (0, 0, 0), 0, (CLUSTER, "host 0")),
        ((CLUSTER, T, T), (0, 0, GONE), 1, (CLUSTER, "host 2 (algo-3) was lost: no sign of life")),
        # Silence alone is enough; a host that has said farewell is not lost.
        ((T, T, T), (0, GONE, 0), 0, (CLUSTER, "host 1 (algo-2) was lost")),
        ((T, T, T), (0, LIMITS.lost - 1, 0), 0, OPEN),
        ((D, Phase.LEFT, T), (0, GONE, 0), 0, OPEN),
        # A stop is one only when everybody has ended.
        ((STOPPED, T, T), (0, 0, 0), 60, OPEN),
        ((STOPPED, STOPPED, STOPPED), (0, 0, 0), 0, (STOPPED, "cause 0")),
        ((STOPPED, STOPPED, D), (0, 0, 0), 0, (STOPPED, "cause 0")),
        ((STOPPED, ExitCode.STORAGE, T), (0, 0, 0), 0, (ExitCode.STORAGE, "host 1")),
        ((STOPPED, T, STOPPED), (0, GONE, 0), 0, (CLUSTER, "host 1 (algo-2) was lost")),
    ],
)
def test_the_leader_judges(
    ends: tuple[ExitCode | str, ...],
    ages: tuple[float, ...],
    troubled: float,
    expected: object,
) -> None:
    verdict = judge(table(*ends, ages=ages), HOSTS, LIMITS, troubled=troubled)
    if expected is OPEN:
        assert verdict is None
    elif expected is None:
        assert verdict == Verdict(None)
    else:
        code, text = expected
        assert verdict is not None
        assert verdict.failure is not None
        assert (verdict.failure.code, text in verdict.failure.cause) == (code, True)


def test_a_host_that_never_had_a_row_is_not_lost_but_missing() -> None:
    some = table(T, T)
    assert lost_hosts(some, HOSTS, LIMITS) == []
    assert judge(some, HOSTS, LIMITS, troubled=0) is None


def node(rank: int, *, alive: bool = True, gpus: int = 8) -> Node:
    return Node(f"10.0.0.{rank + 1}", alive, (rank,), gpus)


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([node(0), node(1), node(2)], []),
        # As many nodes as hosts, but one is dead (`ServerlessLLM/ServerlessLLM#311`).
        ([node(0), node(1), node(2, alive=False)], ["algo-3: no alive Ray node"]),
        ([node(0), node(2), node(2)], ["algo-2: no alive Ray node"]),
        ([node(0), node(1, gpus=4), node(2)], ["algo-2: 8 ranks and 4 GPUs, not 8 and 8"]),
        ([node(2, alive=False), node(0), node(1), node(2)], []),
    ],
)
def test_a_cluster_is_complete_when_every_host_has_an_alive_node_of_the_right_shape(
    nodes: list[Node], expected: list[str]
) -> None:
    whole = Table(0.0, {r: row(r) for r in range(3)}, {0: 0.0, 1: 0.0, 2: 0.0}, nodes)
    assert missing_hosts(whole, HOSTS, ranks=8, gpus=8) == expected


def test_hosts_that_never_came_or_came_as_somebody_else_are_named() -> None:
    stranger = row(1)
    stranger.host = "algo-9"
    some = Table(0.0, {0: row(0), 1: stranger}, {}, [node(0), node(1)])
    assert missing_hosts(some, HOSTS, ranks=8, gpus=8) == [
        "algo-2: came as algo-9", "algo-3: never came",
    ]  # fmt: skip
    assert missing_hosts(None, HOSTS, ranks=8, gpus=8) == [
        "all: Ray is not up on the leader itself"
    ]


def test_the_board_measures_silence_by_its_own_clock() -> None:
    now = [100.0]
    board = Board(lambda: now[0])
    board.sync(0, row(0).to_json())
    now[0] += 3
    rows, ages = board.sync(1, row(1).to_json())
    assert ages == {"0": 3.0, "1": 0.0}
    assert Row.from_json(rows["0"]) == row(0)


def test_a_table_survives_its_file() -> None:
    one = row(0)
    one.progress = [RankProgress(0, 4, 1.5, True, "loop.step:3")]
    one.posts, one.verdict = {"choice-1": [4, "g"]}, (0, "")
    whole = Table(1.0, {0: one}, {0: 0.5}, [node(0)])
    again = Table.from_json(json.loads(json.dumps(whole.to_json())))
    assert again.posted("choice-1") == {0: [4, "g"]}
    assert again.rows[0].progress == one.progress
    assert list(again.nodes) == [node(0)]


# The progress watchdog


def progress(rank: int, step: int, idle: float = 0.0, **more: object) -> RankProgress:
    return RankProgress(rank, step, idle, bool(more.get("waiting")), "grpo.score:7",
                        bool(more.get("last")))  # fmt: skip


def look(watch: StallWatch, now: float, *ranks: RankProgress) -> Failure | None:
    return watch.look({f"host {p.rank}": [p] for p in ranks}, now)


def test_ranks_that_wait_for_one_that_does_not_move_blame_it() -> None:
    """`volcengine/verl#3873`: the timeout of a collective names nobody."""
    watch, idle = StallWatch(LIMITS), LIMITS.idle + 1
    assert look(watch, 0, progress(0, 4), progress(1, 4)) is None
    stuck = progress(0, 4, idle, waiting=True), progress(1, 4, idle)
    failure = look(watch, idle, *stuck)
    assert failure is not None
    assert failure.code is CLUSTER
    assert "rank 1 on host 1 is in grpo.score:7 (after step 4" in failure.cause
    assert "rank 0" not in failure.cause
    assert "1 others wait for it" in failure.cause


def test_while_any_rank_moves_nobody_hangs() -> None:
    watch = StallWatch(LIMITS)
    for now in range(0, 4000, 100):
        assert look(watch, now, progress(0, 4, now, waiting=True), progress(1, 4, 1.0)) is None


def test_a_step_may_take_several_times_the_longest_so_far_and_no_more() -> None:
    """Moving is not progress: a loop without end moves too."""
    watch, long = StallWatch(LIMITS), LIMITS.step
    assert look(watch, 0, progress(0, 1)) is None
    assert look(watch, long, progress(0, 2)) is None
    assert look(watch, 5 * long, progress(0, 2)) is None
    failure = look(watch, 6.1 * long, progress(0, 2))
    assert failure is not None
    assert "step 3 has taken" in failure.cause


def test_an_export_is_bounded_by_movement_alone() -> None:
    watch = StallWatch(LIMITS)
    assert look(watch, 0, progress(0, 9, last=True)) is None
    assert look(watch, 50 * LIMITS.step, progress(0, 9, last=True)) is None
    assert look(watch, 0, progress(0, 9, LIMITS.idle + 1, last=True)) is not None
