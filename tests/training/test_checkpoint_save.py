"""The checkpointer: what is saved is the state at the step's end, and what is restored is that."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from contracts.control import Control
from contracts.failures import ExitCode
from training_container.checkpoints.checkpointer import CheckpointRules, SpoolCheckpointer
from training_container.checkpoints.fence import ControlWatch
from training_container.checkpoints.spool import Spool, UploadStatus
from training_container.checkpoints.stop import StopSignal
from training_container.engine.distributed import single_process
from training_container.engine.errors import DataChangedError
from training_container.engine.state import Best, Decision, PolicyWeights, Progress, TrainState
from training_container.failure import StageError


class Policy:
    def __init__(self, *, width: int = 8) -> None:
        torch.manual_seed(3)
        self.module: nn.Module = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 4))
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-2)

    def train(self, seed: int) -> float:
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
        loss = ((self.module(x) - x) ** 2).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


def state_of(policy: Policy, *, data: str = "rows") -> TrainState:
    return TrainState(policy, Progress(data, "settings"))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def checkpointer(spool: Path, **options: Any) -> SpoolCheckpointer:
    rules = options.pop("rules", CheckpointRules(interval_seconds=0.001))
    return SpoolCheckpointer(single_process(), Spool(spool, 1), rules, **options)


def step(keeper: SpoolCheckpointer, state: TrainState, number: int, **options: Any) -> Decision:
    state.progress.step = number
    metrics = options.pop("metrics", {})
    return keeper.after_step(
        state, number, metrics, last=options.pop("last", False), step_seconds=1.0
    )


def saved(spool: Path) -> list[int]:
    return [found.step for found in Spool(spool, 1).ready()]


def test_a_resume_continues_to_the_last_bit(tmp_path: Path) -> None:
    """modal-projects/training-gym#536: optimizer state was lost on resume."""
    policy = Policy()
    keeper = checkpointer(tmp_path)
    state = state_of(policy)
    assert keeper.restore(state) is False
    for number in (1, 2, 3):
        policy.train(number)
    state.progress.kl_control = {"coefficient": 0.02}
    state.progress.best = Best("validation/reward", 0.5, 2)
    state.progress.position = 96
    step(keeper, state, 3)
    keeper.close()
    rest = [policy.train(number) for number in (4, 5, 6)]

    fresh = Policy()
    for parameter in fresh.module.parameters():
        nn.init.zeros_(parameter)
    again = state_of(fresh)
    folder = Spool(tmp_path, 1).folder(3)
    assert checkpointer(tmp_path / "new", resume=folder).restore(again) is True
    assert (again.progress.step, again.progress.position) == (3, 96)
    assert again.progress.kl_control == {"coefficient": 0.02}, "volcengine/verl#2653"
    assert again.progress.best == Best("validation/reward", 0.5, 2)
    assert [fresh.train(number) for number in (4, 5, 6)] == rest
    for mine, theirs in zip(fresh.module.parameters(), policy.module.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert torch.equal(
            fresh.optimizer.state[mine]["exp_avg_sq"], policy.optimizer.state[theirs]["exp_avg_sq"]
        )


def test_continuing_takes_the_weights_and_nothing_else(tmp_path: Path) -> None:
    """thinking-machines-lab/tinker-cookbook#446: continue resets what resume keeps."""
    policy = Policy()
    policy.train(1)
    keeper = checkpointer(tmp_path)
    step(keeper, state_of(policy), 1)
    keeper.close()
    fresh = Policy()
    nn.init.zeros_(fresh.module[0].weight)
    new_stage = checkpointer(tmp_path / "new", weights=Spool(tmp_path, 1).folder(1))
    assert new_stage.load_weights(PolicyWeights(fresh.module)) is True
    state = state_of(fresh, data="other rows")
    assert new_stage.restore(state) is False
    assert torch.equal(fresh.module[0].weight, policy.module[0].weight)
    assert state.progress.step == 0
    assert all(not moments for moments in fresh.optimizer.state.values())


def test_training_may_go_on_while_the_save_is_written(tmp_path: Path) -> None:
    policy = Policy(width=4096)
    state = state_of(policy)
    keeper = checkpointer(tmp_path)
    policy.train(1)
    before = copy.deepcopy(policy.module.state_dict())
    step(keeper, state, 1)
    for number in range(5):
        policy.train(number)
    keeper.close()
    fresh = Policy(width=4096)
    checkpointer(tmp_path / "new", resume=Spool(tmp_path, 1).folder(1)).restore(state_of(fresh))
    for name, tensor in fresh.module.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_a_changed_dataset_is_refused_on_resume(tmp_path: Path) -> None:
    keeper = checkpointer(tmp_path)
    step(keeper, state_of(Policy()), 1)
    keeper.close()
    resumed = checkpointer(tmp_path / "new", resume=Spool(tmp_path, 1).folder(1))
    with pytest.raises(DataChangedError, match="dataset"):
        resumed.restore(state_of(Policy(), data="other rows"))


def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    keeper = checkpointer(tmp_path)
    step(keeper, state_of(Policy()), 1)
    keeper.close()
    other = Policy()
    other.module.append(nn.Linear(4, 4))
    other.optimizer = torch.optim.AdamW(other.module.parameters())
    resumed = checkpointer(tmp_path / "new", resume=Spool(tmp_path, 1).folder(1))
    with pytest.raises(StageError, match=r"policy\.3\.weight") as caught:
        resumed.restore(state_of(other))
    assert caught.value.code is ExitCode.CHECKPOINT


def test_saves_follow_the_interval_the_last_step_and_the_pinned(tmp_path: Path) -> None:
    clock, state = Clock(), state_of(Policy())
    rules = CheckpointRules(interval_seconds=10, pinned_steps=frozenset({2}))
    keeper = checkpointer(tmp_path, rules=rules, clock=clock)
    keeper.restore(state)
    for number in range(1, 26):
        clock.now += 1.0
        step(keeper, state, number, last=number == 25)
        keeper.close()
        Spool(tmp_path, 1).report(UploadStatus())
        if len(saved(tmp_path)) > 1 and number < 25:
            Spool(tmp_path, 1).remove(saved(tmp_path)[0])
        if number in (2, 12, 22):
            assert saved(tmp_path)[-1] == number
    assert saved(tmp_path)[-1] == 25


def test_interval_saves_pause_while_two_steps_wait_for_their_upload(tmp_path: Path) -> None:
    """marin-community/marin#9213: a slow S3 neither blocks training nor fills the disk."""
    state = state_of(Policy())
    keeper = checkpointer(tmp_path)
    for number in range(1, 7):
        assert step(keeper, state, number) is Decision.CONTINUE
        keeper.close()
    assert saved(tmp_path) == [1, 2]
    assert keeper.take_metrics()["checkpoint/backlog"] == 2
    Spool(tmp_path, 1).remove(1)
    step(keeper, state, 7)
    keeper.close()
    assert saved(tmp_path) == [2, 7]


def test_a_failed_write_costs_the_checkpoint_and_not_the_run(tmp_path: Path) -> None:
    """As on a full disk: the folder of the step cannot be made."""
    state = state_of(Policy())
    keeper = checkpointer(tmp_path)
    (tmp_path / "step-00000001").write_text("in the way")
    assert step(keeper, state, 1) is Decision.CONTINUE
    keeper.close()
    assert keeper.take_metrics()["checkpoint/write_failures"] == 1
    assert saved(tmp_path) == []
    (tmp_path / "step-00000001").unlink()
    step(keeper, state, 2)
    keeper.close()
    assert saved(tmp_path) == [2]


def test_a_new_best_is_saved_with_its_metric(tmp_path: Path) -> None:
    state = state_of(Policy())
    rules = CheckpointRules(interval_seconds=1e9, best_metric="validation/reward")
    keeper = checkpointer(tmp_path, rules=rules)
    keeper.restore(state)
    for number, value in ((1, 0.2), (2, 0.7), (3, 0.4)):
        state.progress.consider("validation/reward", "max", {"validation/reward": value}, number)
        step(keeper, state, number, metrics={"validation/reward": value})
        keeper.close()
    found = Spool(tmp_path, 1).ready()
    assert [(s.step, dict(s.metrics)) for s in found] == [
        (1, {"validation/reward": 0.2}),
        (2, {"validation/reward": 0.7}),
    ]


def test_a_stop_request_saves_if_it_fits_the_time_left(tmp_path: Path) -> None:
    """aws-samples/amazon-sagemaker-managed-spot-training#3: a final save within the grace."""
    for grace, expected in ((120.0, [1]), (15.0, [])):
        stop = StopSignal(grace_seconds=grace, reserve_seconds=15)
        folder = tmp_path / str(grace)
        rules = CheckpointRules(interval_seconds=1e9)
        keeper = checkpointer(folder, stop=stop, rules=rules)
        stop.trigger()
        assert step(keeper, state_of(Policy()), 1) is Decision.STOP
        assert saved(folder) == expected


class Objects:
    """A store with one control object."""

    def __init__(self) -> None:
        self.control, self.etag = Control(attempt=1), 0

    def put(self, **fields: Any) -> None:
        self.control, self.etag = Control(**{"attempt": 1, **fields}), self.etag + 1

    def read_if_changed(self, _key: str, etag: str | None) -> tuple[bytes | None, str]:
        if etag == str(self.etag):
            return None, etag
        return self.control.model_dump_json().encode(), str(self.etag)


def watched(tmp_path: Path) -> tuple[SpoolCheckpointer, Objects, TrainState]:
    objects, state = Objects(), state_of(Policy())
    watch = ControlWatch(objects, "control.json", 1, every_seconds=0)  # type: ignore[arg-type]
    keeper = checkpointer(tmp_path, rules=CheckpointRules(interval_seconds=1e9), watch=watch)
    keeper.restore(state)
    return keeper, objects, state


def test_a_requested_checkpoint_is_made_once_at_the_end_of_the_step(tmp_path: Path) -> None:
    keeper, objects, state = watched(tmp_path)
    step(keeper, state, 1)
    objects.put(checkpoint_request="spot-warning-1")
    for number in (2, 3):
        assert step(keeper, state, number) is Decision.CONTINUE
        keeper.close()
    assert saved(tmp_path) == [2]


def test_stop_after_checkpoint_saves_and_stops(tmp_path: Path) -> None:
    keeper, objects, state = watched(tmp_path)
    objects.put(stop_after_checkpoint=True)
    assert step(keeper, state, 1) is Decision.STOP
    assert saved(tmp_path) == [1]


def test_a_taken_over_attempt_saves_nothing_and_raises(tmp_path: Path) -> None:
    keeper, objects, state = watched(tmp_path)
    objects.put(attempt=2)
    with pytest.raises(StageError, match="attempt 2") as caught:
        step(keeper, state, 1, last=True)
    assert caught.value.code is ExitCode.FENCED
    assert saved(tmp_path) == []


def test_the_uploaders_fence_stops_the_trainer_too(tmp_path: Path) -> None:
    Spool(tmp_path, 1).report(UploadStatus(fenced_by=3))
    with pytest.raises(StageError, match="attempt 3"):
        step(checkpointer(tmp_path), state_of(Policy()), 1)


def test_a_save_is_timed_to_its_end_and_not_to_the_next_one(tmp_path: Path) -> None:
    """Else a stop request would find that no save fits the time left."""
    clock, state = Clock(), state_of(Policy())
    keeper = checkpointer(tmp_path, rules=CheckpointRules(interval_seconds=1000), clock=clock)
    clock.now = 999.5
    step(keeper, state, 1)
    keeper._write.done.wait(60)
    clock.now += 500
    step(keeper, state, 2)
    assert keeper.take_metrics()["checkpoint/seconds"] == 0


def test_what_a_failed_save_left_is_removed_after_the_next_but_one(tmp_path: Path) -> None:
    state = state_of(Policy())
    keeper = checkpointer(tmp_path)
    leftover = tmp_path / "step-00000001/sharded"
    leftover.mkdir(parents=True)
    for number in (2, 3):
        step(keeper, state, number)
        keeper.close()
    assert not leftover.exists()
    assert saved(tmp_path) == [2, 3]


def test_a_step_may_vanish_between_its_listing_and_its_counting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The uploader, a process of its own, removes what it has uploaded."""
    spool = Spool(tmp_path, 1)
    spool.folder(1).mkdir()
    spool.finish(1, 0, {})
    listed = spool._folders()
    assert spool.backlog() == len(listed) == 1
    spool.remove(1)
    monkeypatch.setattr(spool, "_folders", lambda: listed)
    monkeypatch.setattr(Path, "is_dir", lambda _: True)  # glob's first look, a moment ago
    assert spool.backlog() == 0
    spool.drop_unfinished(before=2)


def test_the_numbers_of_a_save_are_metrics(tmp_path: Path) -> None:
    state = state_of(Policy())
    keeper = checkpointer(tmp_path)
    step(keeper, state, 1)
    keeper.close()
    Spool(tmp_path, 1).report(
        UploadStatus(uploaded_bytes=500, committed_step=1, committed_seconds=2.5, failures=1)
    )
    metrics = keeper.take_metrics()
    assert metrics["checkpoint/uploaded_bytes"] == 500
    assert metrics["checkpoint/committed_step"] == 1
    assert metrics["checkpoint/upload_failures"] == 1
    assert min(metrics["checkpoint/stall_seconds"], metrics["checkpoint/seconds"]) > 0
    assert keeper.take_metrics()["checkpoint/uploaded_bytes"] == 0
