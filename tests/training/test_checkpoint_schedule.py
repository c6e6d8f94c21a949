"""When to save and when to stop, as tables; generations; the control watch; the stop signal."""

from __future__ import annotations

import datetime as dt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.control import Control
from training_container.checkpoints.fence import ControlWatch
from training_container.checkpoints.generation import mint_generation
from training_container.checkpoints.schedule import Facts, Interval, Verdict, decide
from training_container.checkpoints.stop import StopSignal
from training_container.checkpoints.store import StoreError

CALM = Facts()
SAVE = Verdict(save=True)
SAVE_WAITING = Verdict(save=True, wait=True)


@pytest.mark.parametrize(
    ("leader", "peer", "must_save", "best", "verdict"),
    [
        (CALM, CALM, False, False, Verdict()),
        (Facts(due=True), CALM, False, False, SAVE),
        (Facts(due=True, writing=True), CALM, False, False, Verdict()),
        (Facts(due=True), Facts(writing=True), False, False, Verdict()),
        (Facts(due=True), Facts(backlog=2), False, False, Verdict()),
        (Facts(due=True), Facts(backlog=1), False, False, SAVE),
        (Facts(requested=True), CALM, False, False, SAVE),
        (CALM, CALM, False, True, SAVE),
        (CALM, Facts(due=True, requested=True, stop_after=True), False, False, Verdict()),
        (CALM, CALM, True, False, SAVE_WAITING),
        (Facts(writing=True, backlog=2), CALM, True, False, SAVE_WAITING),
        (Facts(stop_after=True), CALM, False, False, Verdict(save=True, wait=True, stop=True)),
        (CALM, Facts(stop_seconds=60, save_seconds=5), False, False, Verdict(save=True, stop=True)),
        (Facts(save_seconds=70), Facts(stop_seconds=60), False, False, Verdict(stop=True)),
        (Facts(stop_seconds=60, writing=True), CALM, False, False, Verdict(stop=True)),
        (Facts(fenced_by=3, due=True), Facts(stop_seconds=9), True, True, Verdict(fenced_by=3)),
        (CALM, Facts(fenced_by=3), False, False, Verdict(fenced_by=3)),
    ],
)
def test_verdicts(leader, peer, must_save, best, verdict) -> None:
    assert decide([leader, peer], must_save=must_save, best=best) == verdict


@given(
    st.builds(
        Facts,
        writing=st.booleans(),
        backlog=st.integers(0, 9),
        stop_seconds=st.floats(-1, 200),
        save_seconds=st.floats(0, 1e6),
        fenced_by=st.integers(0, 99),
        due=st.booleans(),
        requested=st.booleans(),
        stop_after=st.booleans(),
    )
)
def test_facts_survive_the_exchange(facts: Facts) -> None:
    assert Facts.from_vector(facts.vector()) == facts


@pytest.mark.parametrize("step_seconds", [1.0, 60.0, 250.0, 1500.0, 4600.0])
def test_saves_are_never_further_apart_than_the_interval_or_one_step(step_seconds: float) -> None:
    """Steps of 25 to 77 minutes times a save frequency of 5 cost hours per interruption."""
    interval, now, last, gaps = Interval(1200, 0.0), 0.0, 0.0, []
    while now < 5 * 4600:
        now += step_seconds
        if interval.due(now, step_seconds):
            gaps.append(now - last)
            interval.saved(now)
            last = now
    assert gaps
    assert max(gaps) <= max(1200, step_seconds)
    assert min(gaps) > 1200 - 2 * step_seconds


def test_the_interval_adapts_when_steps_grow() -> None:
    interval, now, last, worst = Interval(1000, 0.0), 0.0, 0.0, 0.0
    for number in range(200):
        seconds = 10 + number * 2
        now += seconds
        if interval.due(now, seconds):
            worst = max(worst, now - last)
            interval.saved(now)
            last = now
    assert 900 < worst <= 1002, "a step may be 2 s longer than the one before"


def test_generations_order_by_age_even_when_a_clock_runs_behind() -> None:
    noon = dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC)
    first = mint_generation(noon)
    later = mint_generation(noon + dt.timedelta(microseconds=1))
    behind = mint_generation(noon - dt.timedelta(hours=3), after=later)
    assert first < later < behind
    assert first.startswith("20260101T120000.000000Z-")
    assert mint_generation(noon) != first


class FakeStore:
    """Answers conditional GETs of one object, as S3 does."""

    def __init__(self) -> None:
        self.body, self.etag, self.reads, self.error = b"", "0", 0, None

    def write(self, **fields: object) -> None:
        self.body = Control(**{"attempt": 1, **fields}).model_dump_json().encode()
        self.etag = str(int(self.etag) + 1)

    def read_if_changed(self, _key: str, etag: str | None):
        self.reads += 1
        if self.error:
            raise self.error
        return (None, etag) if etag == self.etag else (self.body, self.etag)


def watch_of(store: FakeStore, now: list[float]) -> ControlWatch:
    return ControlWatch(store, "control.json", 1, every_seconds=1.0, clock=lambda: now[0])  # type: ignore[arg-type]


def test_a_new_request_is_served_once_and_old_ones_are_not() -> None:
    store, now = FakeStore(), [0.0]
    store.write(checkpoint_request="before-the-start")
    watch = watch_of(store, now)
    watch.poll()
    assert not watch.requested
    store.write(checkpoint_request="spot-warning")
    now[0] += 1
    watch.poll()
    assert watch.requested
    watch.served()
    now[0] += 1
    watch.poll()
    assert not watch.requested


def test_control_is_read_at_most_once_a_second_and_failures_change_nothing() -> None:
    store, now = FakeStore(), [0.0]
    store.write(attempt=2)
    watch = watch_of(store, now)
    for _ in range(5):
        watch.poll()
    assert store.reads == 1
    assert watch.fenced_by == 2
    store.error = StoreError("read", OSError("no route"))
    now[0] += 5
    watch.poll()
    assert (watch.fenced_by, watch.failures) == (2, 1)


def test_the_clock_runs_from_the_first_stop_signal() -> None:
    stop = StopSignal(grace_seconds=100, reserve_seconds=10)
    assert stop.seconds_left() < 0
    stop.trigger()
    first = stop.seconds_left()
    stop.trigger()
    assert 0 < stop.seconds_left() <= first <= 90
    assert StopSignal(grace_seconds=1, reserve_seconds=5).seconds_left() < 0
