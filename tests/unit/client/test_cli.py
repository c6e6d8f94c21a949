"""The command line: what it prints, for people and for programs, and its exit codes."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import typer
import yaml
from moto.core import DEFAULT_ACCOUNT_ID
from moto.s3.models import s3_backends
from typer.testing import CliRunner, Result

from client import console
from client.cli import app
from client.hub import Hub
from client.settings import Settings
from contracts.api import (
    AttemptList,
    CheckpointList,
    DeleteEndpointView,
    EndpointList,
    LogLine,
    LogsPage,
    MetricsPage,
    ProblemView,
    RecipeList,
    RecipeView,
    RewardCatalogue,
    RewardView,
    RunPage,
    TimelinePage,
    ValidationView,
)
from contracts.reward_trial import RewardSourceView, RewardTestView
from local_aws.cli import app as local_app
from tests.unit.client.run_folders import run_folder
from tests.unit.client.stub_api import Answer, Asked, StubApi, problem
from tests.unit.client.views import (
    NOON,
    attempt_view,
    checkpoint_view,
    endpoint_view,
    happened,
    metric_row,
    run_view,
)

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted(ROOT.glob("examples/*/run.yaml"))
RUN_ID = "tv-20260102-abc123"
RUN = f"/v1/runs/{RUN_ID}"
RUN_ROUTE = f"GET {RUN}"
QUOTED = "[rank0]:[/INST]:key:[red]"
"""Text that means something else to a console."""


def grpohub(*arguments: str | Path, stdin: str | None = None) -> Result:
    words = [str(item) for item in arguments]
    if words[0] == "local":  # joins when the command is installed
        return CliRunner().invoke(local_app, words[1:])
    return CliRunner().invoke(app, words, input=stdin)


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Consoles as wide as a test wants them, bound to what the runner captures."""
    for name in ("out", "err"):
        monkeypatch.setattr(getattr(console, name), "_width", 300)
        monkeypatch.setattr(getattr(console, name), "_height", 100)


@pytest.fixture
def cloud(api: StubApi, monkeypatch: pytest.MonkeyPatch, s3: Any) -> Iterator[StubApi]:
    """The stub behind every command, with a bucket."""
    monkeypatch.setattr("time.sleep", lambda _seconds: None)
    session = boto3.Session("a", "b", region_name="us-east-1")
    settings = Settings(api.url, "us-east-1", session)
    monkeypatch.setattr(console.State, "hub", lambda _self: Hub(settings=settings))
    return api


# Without a hub


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.parent.name)
def test_the_examples_validate(path: Path) -> None:
    result = grpohub("validate", path)
    assert result.exit_code == 0, result.output
    assert "valid" in result.stdout


def test_a_wrong_run_file_is_exit_code_2_and_a_report(tmp_path: Path) -> None:
    run = run_folder(tmp_path, max_stepz=5)
    result = grpohub("validate", run)
    assert result.exit_code == 2
    assert "stages[0].max_stepz" in result.stderr
    assert "Did you mean `max_steps`?" in result.stderr


def test_a_program_gets_the_report_as_json_wherever_it_asks(tmp_path: Path) -> None:
    run = run_folder(tmp_path, max_stepz=5)
    for arguments in (("validate", "--json", run), ("--json", "validate", run)):
        result = grpohub(*arguments)
        assert result.exit_code == 2
        report = json.loads(result.stdout)
        assert report["valid"] is False
        [only] = report["problems"]
        assert only["path"] == "stages[0].max_stepz"

    good = run_folder(tmp_path / "good")
    report = json.loads(grpohub("validate", "--json", good).stdout)
    assert report == {"valid": True, "problems": [], "notes": []}


def test_every_command_that_the_pages_name_exists() -> None:
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    named = re.findall(r"\bgrpohub (?:--[a-z-]+ )*([a-z-]+)(?: ([a-z-]+))?", text)
    whole: Any = typer.main.get_command(app)
    known = {**whole.commands, "local": typer.main.get_command(local_app)}
    assert len(named) > 30
    for name, below in named:
        assert name in known, f"grpohub {name}"
        group = getattr(known[name], "commands", None)
        if group is not None and below:
            assert below in group, f"grpohub {name} {below}"


def test_the_schema_is_json() -> None:
    result = grpohub("schema")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["title"] == "GRPO Hub run file"


def test_the_installed_command_runs_with_the_commands_of_other_parts() -> None:
    for arguments, words in ((["--version"], "grpohub 0."), (["--help"], "local")):
        command = [sys.executable, "-m", "client.cli", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
        assert words in done.stdout


def test_without_a_hub_the_exit_code_is_3_and_the_message_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GRPOHUB_API_URL", raising=False)
    result = grpohub("list")
    assert result.exit_code == 3
    assert "grpohub local up" in result.stderr


def test_requests_are_logged_without_what_they_are_signed_with(api: StubApi) -> None:
    api.on("GET /v1/runs", RunPage(runs=[]))
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_SESSION_TOKEN": "token-1"}
    done = subprocess.run(
        [sys.executable, "-m", "client.cli", "-v", "list"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={**os.environ, **keys, "GRPOHUB_API_URL": api.url},
    )
    assert f"GET {api.url}/v1/runs" in done.stderr
    assert "token-1" not in done.stderr
    assert "AWS4-HMAC-SHA256" not in done.stderr


# Bad input


def bad_inputs(folder: Path) -> None:
    """A folder of what people hand over by mistake."""
    run_folder(folder / "latin", data={"train": "../latin.jsonl"})
    run_folder(folder / "good")
    (folder / "latin.jsonl").write_bytes(b'{"problem": "caf\xe9", "answer": "1"}\n')
    (folder / "bad.parquet").write_text("no parquet")
    (folder / "rows.jsonl").write_text('{"problem": "1", "answer": "1"}\n')
    (folder / "mine.py").write_text("def score(completions): return [1.0 for _ in completions]\n")
    (folder / "file").write_text("")
    (folder / "rows").mkdir()
    (folder / "rows/a.jsonl").mkdir()


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        ("validate latin/run.yaml", 2, "line 1 is not UTF-8"),
        ("submit latin/run.yaml", 2, "line 1 is not UTF-8"),
        ("rewards test latin/run.yaml", 2, "line 1 is not UTF-8"),
        ("rewards test mine.py --data latin.jsonl", 2, "line 1 is not UTF-8"),
        ("rewards test mine.py --data bad.parquet", 2, "is no parquet file"),
        ("rewards test mine.py --data rows", 2, "has no file ending in .jsonl, .json, .parquet"),
        ("rewards test mine.py --data none.jsonl", 2, "No such file or directory"),
        ("rewards test mine.py", 2, "Name local rows with --data"),
        ("rewards test mine.py --data rows.jsonl --answers none", 2, "No such file or directory"),
        ("rewards test mine.py --data rows.jsonl --answers latin.jsonl", 2, "is not UTF-8"),
        (f"metrics {RUN_ID} --stage 1 --plot none/x.png", 2, "No such file or directory"),
        (f"metrics {RUN_ID} --stage 1 --plot file/x.png", 2, "Not a directory"),
        ("--api-url foo list", 3, "'foo' is no address"),
        ("--api-url http://localhost:xx list", 3, "Invalid port: 'xx'"),
        ("--api-url http://localhost:99999 list", 3, "'http://localhost:99999' is no address"),
        ("local up --port 99999", 2, "less than or equal to 65535"),
        ("local up --state-dir /proc/foo", 1, "No such file or directory"),
        ("local up --state-dir file --detach", 1, "File exists"),
        ("local down --state-dir file", 1, "no embedded cloud runs here"),
    ],
)
def test_plain_mistakes_are_told_and_not_traced(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: Any,
    *,
    command: str,
    code: int,
    words: str,
) -> None:
    bad_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    if command.startswith(("submit", "metrics")):
        watched(request.getfixturevalue("cloud"), run_view())
    result = grpohub(*command.split())
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    assert isinstance(result.exception, SystemExit)
    assert words in " ".join(result.output.split())


def test_an_answer_that_is_not_the_hubs_is_called_so(cloud: StubApi) -> None:
    page = (200, b"<html>a login page</html>")
    cloud.on("GET /v1/runs", page)
    cloud.on("GET /v1/endpoints/tv", endpoint_view())
    cloud.on("POST /v1/endpoints/tv/chat", page)
    for command in (["list"], ["chat", "tv", "How?"]):
        result = grpohub(*command)
        assert result.exit_code == 1
        assert "is not the hub's answer" in " ".join(result.stderr.split())
        assert "<html>a login page</html>" in result.stderr


# Submitting


def test_submit_uploads_sends_the_rewritten_file_and_prints_the_run(
    cloud: StubApi, tmp_path: Path, s3: Any
) -> None:
    cloud.on("POST /v1/runs", (201, run_view("PENDING")))
    result = grpohub("submit", run_folder(tmp_path))
    assert result.exit_code == 0, result.output
    assert RUN_ID in result.stdout
    body = cloud.asked[-1].body
    assert body["spec"]["model"]["source"].startswith("s3://hub-bucket/inputs/")
    assert body["spec"]["stages"][0]["data"]["train"].endswith("/train.jsonl")
    assert set(body["files"]) == {"prompt.jinja", "rewards.py", "helper.py"}
    stored = [item["Key"] for item in s3.list_objects_v2(Bucket="hub-bucket")["Contents"]]
    assert sorted(key.split("/", 2)[2] for key in stored) == ["model/config.json", "train.jsonl"]


def test_submit_sends_nothing_when_the_file_is_wrong(cloud: StubApi, tmp_path: Path) -> None:
    run = run_folder(tmp_path)
    (tmp_path / "rewards.py").write_text("def score(")
    result = grpohub("submit", run)
    assert result.exit_code == 2
    assert "line 1" in result.stderr
    assert cloud.asked == []


def test_the_hubs_own_refusal_is_shown_like_a_local_one(cloud: StubApi, tmp_path: Path) -> None:
    wrong = [{"path": "name", "value": "x", "reason": "is taken", "fix": "Use another."}]
    cloud.on("POST /v1/runs", (422, problem(422, "1 problem", wrong)))
    result = grpohub("submit", run_folder(tmp_path))
    assert result.exit_code == 2
    assert "is taken" in result.stderr
    assert "req-1" in result.stderr


def test_a_dry_run_says_what_would_be_sent_and_sends_nothing(
    cloud: StubApi, tmp_path: Path, s3: Any
) -> None:
    cloud.on("POST /v1/runs/validate", ValidationView(valid=True, spec={"resolved": True}))
    result = grpohub("submit", "--dry-run", run_folder(tmp_path))
    assert result.exit_code == 0, result.output
    assert "would upload" in result.stdout
    assert '"resolved": true' in result.stdout
    assert "Contents" not in s3.list_objects_v2(Bucket="hub-bucket")
    assert [asked.path for asked in cloud.asked] == ["/v1/info", "/v1/runs/validate"]

    refusal = {"path": "name", "value": "x", "reason": "is taken", "fix": "Use another."}
    cloud.on("POST /v1/runs/validate", ValidationView(valid=False, problems=[refusal]))
    result = grpohub("submit", "--dry-run", run_folder(tmp_path / "again"))
    assert result.exit_code == 2
    assert "is taken" in result.stderr


# Watching


def watched(cloud: StubApi, *states: Any) -> None:
    cloud.on(f"GET {RUN}", *states)
    text = f"Spot took it {QUOTED}"
    entries = [happened("attempt.interrupted", text, stage_index=1, step=5)]
    cloud.on(f"GET {RUN}/timeline", TimelinePage(entries=entries))
    cloud.on(f"GET {RUN}/attempts", AttemptList(attempts=[attempt_view()]))
    found = [checkpoint_view(6, complete=False, reasons=["no flag of host 1 of 2"])]
    cloud.on(f"GET {RUN}/checkpoints", CheckpointList(checkpoints=[*found, checkpoint_view(4)]))
    rows = [
        metric_row(4, reward=0.25, **{"validation/reward": 0.75}),
        metric_row(5, reward=0.5, **{"kl/k3": "not computed", "entropy": None}),
    ]
    cloud.on(f"GET {RUN}/metrics", MetricsPage(stage_index=1, rows=rows))


@pytest.mark.parametrize(
    ("end", "code"), [("SUCCEEDED", 0), ("FAILED", 1), ("CANCELLED", 1), ("ENDPOINT_FAILED", 1)]
)
def test_watch_prints_what_happens_and_ends_with_the_runs_own_exit_code(
    cloud: StubApi, end: str, code: int
) -> None:
    watched(cloud, run_view("TRAINING"), (503, problem(503, "busy")), run_view(end))
    result = grpohub("watch", RUN_ID)
    assert result.exit_code == code, result.output
    assert "Spot took it" in result.stdout
    assert result.stdout.count("smooth step 5: reward 0.5, validation/reward 0.75") == 1
    assert end in result.stdout


def test_watch_prints_news_once_even_when_it_arrives_out_of_order(cloud: StubApi) -> None:
    watched(cloud, run_view("TRAINING"), run_view("SUCCEEDED"))
    ended, late = happened("attempt.ended", "it ended"), happened("checkpoint.complete", "step 2")
    cloud.on(
        f"GET {RUN}/timeline", TimelinePage(entries=[ended]), TimelinePage(entries=[late, ended])
    )
    shown = grpohub("watch", RUN_ID).stdout
    assert shown.count("it ended") == 1
    assert shown.count("step 2") == 1


def test_submit_wait_watches(cloud: StubApi, tmp_path: Path) -> None:
    cloud.on("POST /v1/runs", (201, run_view("PENDING")))
    watched(cloud, run_view("FAILED", reason="the data is empty"))
    result = grpohub("submit", "--wait", run_folder(tmp_path))
    assert result.exit_code == 1
    assert "the data is empty" in result.stdout


def test_a_program_that_waits_gets_the_run_alone(cloud: StubApi, tmp_path: Path) -> None:
    cloud.on("POST /v1/runs", (201, run_view("PENDING")))
    for command in (["watch", RUN_ID], ["submit", "--wait", run_folder(tmp_path)]):
        watched(cloud, run_view("TRAINING"), run_view("SUCCEEDED"))
        result = grpohub("--json", *command)
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["state"] == "SUCCEEDED"
        assert "Spot took it" in result.stderr


@pytest.mark.parametrize(
    "command",
    [
        f"watch {RUN_ID}",
        f"get {RUN_ID}",
        f"timeline {RUN_ID}",
        f"logs {RUN_ID}",
        f"checkpoints {RUN_ID}",
        f"metrics {RUN_ID} --stage 1 --name {QUOTED}",
        f"metrics {RUN_ID} --stage 1 --name {QUOTED} --plot terminal",
        "list",
        "endpoints",
        "rewards list",
        "chat tv How? --compare tv",
    ],
)
def test_what_the_hub_says_is_shown_to_the_letter(cloud: StubApi, command: str) -> None:
    watched(cloud, run_view("SUCCEEDED", reason=QUOTED))
    cloud.on("GET /v1/runs", RunPage(runs=[run_view(reason=QUOTED)]))
    cloud.on(f"GET {RUN}/timeline", TimelinePage(entries=[happened("attempt.ended", QUOTED)]))
    found = [checkpoint_view(6, metrics={QUOTED: 1.0})]
    cloud.on(f"GET {RUN}/checkpoints", CheckpointList(checkpoints=found))
    rows = [metric_row(4, **{QUOTED: 0.25})]
    cloud.on(f"GET {RUN}/metrics", MetricsPage(stage_index=1, rows=rows))
    line = LogLine(time=NOON, host="algo-1", message=QUOTED)
    cloud.on(f"GET {RUN}/logs", LogsPage(job_name="j", lines=[line], complete=True))
    cloud.on("GET /v1/endpoints", EndpointList(endpoints=[endpoint_view(reason=QUOTED)]))
    cloud.on("GET /v1/endpoints/tv", endpoint_view())
    cloud.on("POST /v1/endpoints/tv/chat", answers(QUOTED))
    catalogue = RewardCatalogue(rewards=[RewardView(name="length", summary=QUOTED)])
    cloud.on("GET /v1/rewards", catalogue)
    result = grpohub(*command.split())
    assert result.exit_code == 0, result.output
    assert QUOTED in result.stdout


def test_the_live_view_shows_stage_attempt_step_reward_checkpoint_and_interruptions(
    cloud: StubApi, hub: Hub
) -> None:
    from rich.console import Console

    from client.watch import Watch

    watched(cloud, run_view("TRAINING"))
    watch = Watch(hub, RUN_ID, console.out)
    watch.observe()
    screen = Console(width=200, record=True, file=io.StringIO())
    screen.print(watch.view())
    text = screen.export_text()
    for part in ("TRAINING", "smooth", "5/20", "0.5", "0.75", "1 interruption(s)", "ml.m5.xlarge",
                 "resumed from step 4", "checkpoint: step 4", "12.3 MB",
                 f"Spot took it {QUOTED}"):  # fmt: skip
        assert part in text


def test_watching_ends_when_the_run_does_not_exist(cloud: StubApi) -> None:
    cloud.on(f"GET {RUN}", (404, problem(404, "there is no such run")))
    result = grpohub("watch", RUN_ID)
    assert result.exit_code == 1
    assert "there is no such run" in result.stderr


# Looking


def test_list_and_get(cloud: StubApi) -> None:
    cloud.on("GET /v1/runs", RunPage(runs=[run_view(endpoint_name="tv", reason="waits [for] it")]))
    result = grpohub("list", "--state", "TRAINING")
    assert all(word in result.stdout for word in (RUN_ID, "TRAINING", "tv", "waits [for] it"))
    assert json.loads(grpohub("--json", "list").stdout)[0]["run_id"] == RUN_ID

    model = {"uri": "s3://b/m/", "version": "f" * 64, "stage": "s", "step": 9, "size": 1}
    asked = {"prompt": "How?", "source": "built in", "answer": "UP", "seconds": 1.5}
    cloud.on(f"GET {RUN}", run_view("SUCCEEDED", model=model, smoke_test=asked, endpoint_name="tv"))
    ended = attempt_view(
        outcome="interrupted", training_seconds=3700, spot_savings=0.7, newest_checkpoint_step=8
    )
    cloud.on(f"GET {RUN}/attempts", AttemptList(attempts=[ended, attempt_view(spot=False)]))
    shown = grpohub("get", RUN_ID).stdout
    for part in ("s3://b/m/", "How?", "UP", "interrupted", "1 h 1 min", "70%", "on demand"):
        assert part in shown
    assert json.loads(grpohub("--json", "get", RUN_ID).stdout)["attempts"][0]["attempt"] == 2


def test_checkpoints_say_why_they_are_incomplete(cloud: StubApi) -> None:
    watched(cloud, run_view())
    shown = grpohub("checkpoints", RUN_ID).stdout
    assert "no flag of host 1 of 2" in shown
    assert "complete" in shown
    assert len(json.loads(grpohub("--json", "checkpoints", RUN_ID).stdout)) == 2


def test_logs_timeline_cancel_and_resume(cloud: StubApi) -> None:
    line = LogLine(time=NOON, host="algo-1", message="wait 0%\rwait 9%\rhello [world]\r")
    page = LogsPage(job_name="j", lines=[line], complete=True)
    cloud.on(f"GET {RUN}/logs", page)
    assert grpohub("logs", RUN_ID, "-f").stdout.endswith("algo-1 hello [world]\n")
    assert json.loads(grpohub("--json", "logs", RUN_ID).stdout)["host"] == "algo-1"
    watched(cloud, run_view())
    assert "attempt.interrupted Spot took it" in grpohub("timeline", RUN_ID).stdout
    assert json.loads(grpohub("--json", "timeline", RUN_ID).stdout)[0]["step"] == 5
    cloud.on(f"POST {RUN}/cancel", (202, run_view("CANCELLING")))
    assert "CANCELLING" in grpohub("cancel", RUN_ID).stdout
    cloud.on(f"POST {RUN}/resume", (409, problem(409, "the run is still running")))
    result = grpohub("resume", RUN_ID)
    assert (result.exit_code, "still running" in result.stderr) == (1, True)
    cloud.on(f"POST {RUN}/resume", (202, run_view()))
    assert json.loads(grpohub("--json", "resume", RUN_ID).stdout)["state"] == "TRAINING"


def test_metrics_as_a_table_as_lines_and_as_a_picture(cloud: StubApi, tmp_path: Path) -> None:
    watched(cloud, run_view())
    table = grpohub("metrics", RUN_ID, "--stage", "1").stdout
    assert "validation/reward" in table
    assert "0.75" in table
    lines = grpohub("metrics", RUN_ID, "--stage", "1", "--plot", "terminal").stdout
    assert "▁█" in lines
    picture = tmp_path / "reward.png"
    result = grpohub("metrics", RUN_ID, "--stage", "1", "--plot", picture, "--name", "reward")
    assert result.exit_code == 0, result.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert len(json.loads(grpohub("--json", "metrics", RUN_ID, "--stage", "1").stdout)) == 2
    assert grpohub("metrics", RUN_ID, "--plot", "reward.svg").exit_code == 2


def test_where_there_is_nothing_yet_that_is_said(cloud: StubApi) -> None:
    cloud.on("GET /v1/runs", RunPage(runs=[]))
    assert grpohub("list").stdout == "no runs\n"
    assert grpohub("list", "--state", "FAILED").stdout == "no run is FAILED\n"
    cloud.on("GET /v1/endpoints", EndpointList(endpoints=[]))
    assert grpohub("endpoints").stdout == "no endpoints\n"
    cloud.on(RUN_ROUTE, run_view())
    cloud.on(f"GET {RUN}/checkpoints", CheckpointList(checkpoints=[]))
    assert grpohub("checkpoints", RUN_ID).stdout == "no checkpoints yet\n"
    cloud.on(f"GET {RUN}/metrics", MetricsPage(stage_index=1, rows=[]))
    assert grpohub("metrics", RUN_ID).stdout == "no metrics yet\n"
    missing = grpohub("get", "other")
    assert missing.exit_code == 1
    assert "grpohub list" in missing.stderr


def test_a_metric_that_was_not_measured_is_named_with_the_nearest(cloud: StubApi) -> None:
    cloud.on(RUN_ROUTE, run_view())
    rows = [metric_row(1, reward=0.5)]
    cloud.on(f"GET {RUN}/metrics", MetricsPage(stage_index=1, rows=rows))
    refused = grpohub("metrics", RUN_ID, "--name", "rewards")
    assert refused.exit_code == 2
    assert "'rewards'" in refused.stderr
    assert "Did you mean `reward`?" in refused.stderr


# Endpoints


def test_deploy_endpoints_and_chat(cloud: StubApi, tmp_path: Path) -> None:
    cloud.on(f"POST {RUN}/deploy", (202, run_view("DEPLOYING")))
    settings = tmp_path / "deploy.yaml"
    settings.write_text("deploy: {instance_type: ml.g5.xlarge}")
    assert grpohub("deploy", RUN_ID, "--file", settings).exit_code == 0
    assert cloud.asked[-1].body == {"deploy": {"instance_type": "ml.g5.xlarge"}}
    assert grpohub("deploy", RUN_ID).exit_code == 0
    assert cloud.asked[-1].body == {}
    settings.write_text("[1]")
    assert grpohub("deploy", RUN_ID, "--file", settings).exit_code == 2
    assert grpohub("deploy", RUN_ID, "--file", tmp_path / "no.yaml").exit_code == 2

    cloud.on("GET /v1/endpoints", EndpointList(endpoints=[endpoint_view()]))
    assert "IN_SERVICE" in grpohub("endpoints").stdout
    cloud.on("GET /v1/endpoints/tv", endpoint_view())
    assert json.loads(grpohub("endpoints", "get", "tv").stdout)["name"] == "tv"
    gone = DeleteEndpointView(name="tv", deleted=["endpoint tv"], remaining=["model m"])
    cloud.on("DELETE /v1/endpoints/tv", (202, gone))
    shown = grpohub("endpoints", "delete", "tv").stdout
    assert "deleted endpoint tv" in shown
    assert "still to go: model m" in shown

    answer = {"choices": [{"message": {"content": "DOWN"}}]}
    cloud.on("POST /v1/endpoints/tv/chat", (200, answer))
    assert grpohub("chat", "tv", "How?", "--system", "Be brief.", "--max-tokens", "9").stdout == (
        "DOWN\n"
    )
    assert cloud.asked[-1].body == {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "How?"},
        ],
        "max_tokens": 9,
    }
    assert grpohub("chat", "tv", stdin="From a pipe?\n").stdout == "DOWN\n"
    assert cloud.asked[-1].body["messages"] == [{"role": "user", "content": "From a pipe?"}]
    assert grpohub("chat", "tv", stdin="").exit_code == 2
    assert grpohub("chat", "nobody", "How?").exit_code == 2


def answers(content: str) -> Callable[[Asked], Answer]:
    """Says ``content``, and which model it was asked as."""

    def answer(asked: Asked) -> Answer:
        said = f"{content} {asked.body.get('model', '')}".strip()
        return 200, {"choices": [{"message": {"content": said}}]}

    return answer


def test_two_endpoints_answer_side_by_side(cloud: StubApi) -> None:
    cloud.on("GET /v1/endpoints/base", endpoint_view(name="base"))
    cloud.on("GET /v1/endpoints/tv", endpoint_view())
    cloud.on("POST /v1/endpoints/base/chat", answers("UP"))
    cloud.on("POST /v1/endpoints/tv/chat", answers("DOWN"))
    lines = grpohub("chat", "base", "How?", "--compare", "tv:tuned").stdout.splitlines()
    [titles] = [line for line in lines if "base" in line]
    assert "tv:tuned" in titles
    [row] = [line for line in lines if "UP" in line]
    assert row.index("UP") < row.index("DOWN tuned")
    asked = [item.body for item in cloud.asked if item.method == "POST"]
    assert asked[0]["messages"] == asked[1]["messages"]
    shown = grpohub("--json", "chat", "base", "How?", "--compare", "tv").stdout
    assert json.loads(shown) == [
        {"endpoint": "base", "answer": "UP"},
        {"endpoint": "tv", "answer": "DOWN"},
    ]


@pytest.mark.parametrize(
    ("state", "fix"), [("FAILED", f"grpohub deploy {RUN_ID}"), ("CREATING", "Wait for it")]
)
def test_an_endpoint_that_does_not_serve_is_not_asked(cloud: StubApi, state: str, fix: str) -> None:
    cloud.on("GET /v1/endpoints/tv", endpoint_view(state=state, reason="no image", run_id=RUN_ID))
    refused = grpohub("chat", "tv", "How?")
    assert refused.exit_code == 2
    assert f"is {state}: no image" in refused.stderr
    assert fix in refused.stderr
    assert [item.method for item in cloud.asked] == ["GET"]


def test_an_image_goes_before_the_question(cloud: StubApi, tmp_path: Path) -> None:
    cloud.on("GET /v1/endpoints/tv", endpoint_view())
    cloud.on("POST /v1/endpoints/tv/chat", answers("a cat"))
    picture = tmp_path / "cat.png"
    picture.write_bytes(b"png")
    assert grpohub("chat", "tv", "What?", "--image", picture).stdout == "a cat\n"
    image, text = cloud.asked[-1].body["messages"][0]["content"]
    assert image["image_url"]["url"] == "data:image/png;base64,cG5n"
    assert text == {"type": "text", "text": "What?"}


@pytest.mark.parametrize(
    ("name", "size", "reason"),
    [
        ("notes.txt", 3, "no image"),
        ("none.png", None, "No such file"),
        ("big.png", 4_000_001, "4,000,000 bytes together"),
    ],
)
def test_what_cannot_be_sent_as_an_image_is_refused(
    cloud: StubApi, tmp_path: Path, name: str, size: int | None, reason: str
) -> None:
    if size is not None:
        (tmp_path / name).write_bytes(bytes(size))
    refused = grpohub("chat", "tv", "What?", "--image", tmp_path / name)
    assert refused.exit_code == 2
    assert reason in refused.stderr
    assert not cloud.asked


# Uploads, recipes, rewards


@pytest.fixture
def nightly(cloud: StubApi) -> None:
    """A hub with one recipe."""
    cloud.on("GET /v1/recipes", RecipeList(recipes=["nightly"]))


@pytest.mark.usefixtures("nightly")
def test_an_upload_says_which_run_it_started(cloud: StubApi, tmp_path: Path, s3: Any) -> None:
    data = tmp_path / "new.jsonl"
    data.write_text("{}\n")
    old = run_view(run_id="old-20260101-aaa111")
    started = run_view(source="s3://hub-bucket/uploads/nightly/new.jsonl")
    cloud.on("GET /v1/runs", RunPage(runs=[old]), RunPage(runs=[started, old]))
    cloud.on(f"GET {RUN}", started)
    result = grpohub("upload", data, "--recipe", "nightly")
    assert result.exit_code == 0, result.output
    assert f"started {RUN_ID}" in result.stdout
    assert s3.get_object(Bucket="hub-bucket", Key="uploads/nightly/new.jsonl")
    cloud.on("GET /v1/runs", RunPage(runs=[old]), RunPage(runs=[started, old]))
    result = grpohub("--json", "upload", data, "--recipe", "nightly")
    assert json.loads(result.stdout)["run_id"] == RUN_ID
    result = grpohub("--json", "upload", data, "--recipe", "nightly", "--wait", "0")
    assert json.loads(result.stdout) == {"object": "s3://hub-bucket/uploads/nightly/new.jsonl"}


def test_an_uploaded_run_file_comes_last_and_brings_what_it_names(
    cloud: StubApi, tmp_path: Path, s3: Any
) -> None:
    """The run starts when the hub hears of the run file: all else must be there by then."""
    cloud.on("GET /v1/runs", RunPage(runs=[]))
    result = grpohub("upload", run_folder(tmp_path / "sums"), "--wait", "0")
    assert result.exit_code == 0, result.output
    keys = list(s3_backends[DEFAULT_ACCOUNT_ID]["aws"].buckets["hub-bucket"].keys)
    folder, _, name = keys[-1].rpartition("/")
    assert name == "run.yaml"
    assert folder.startswith("uploads/sums-")
    beside = [key.removeprefix(f"{folder}/") for key in keys if key.startswith(folder)]
    assert sorted(beside) == ["helper.py", "prompt.jinja", "rewards.py", "run.yaml"]
    body = s3.get_object(Bucket="hub-bucket", Key=keys[-1])["Body"].read()
    [stage] = yaml.safe_load(body)["stages"]
    assert stage["data"]["train"].removeprefix("s3://hub-bucket/") in keys
    assert stage["rewards"][0]["file"] == "rewards.py"


@pytest.mark.usefixtures("nightly")
def test_a_refused_upload_shows_the_report_left_beside_it(
    cloud: StubApi, tmp_path: Path, s3: Any
) -> None:
    data = tmp_path / "new.jsonl"
    data.write_text("{}\n")
    report = {"Bucket": "hub-bucket", "Key": "uploads/nightly/new.jsonl.error.json"}
    s3.put_object(**report, Body=b'{"detail": "refused before"}')

    def refused(_asked: Asked) -> Answer:
        s3.put_object(**report, Body=b'{"detail": "refused now"}')
        return 200, RunPage(runs=[])

    cloud.on("GET /v1/runs", RunPage(runs=[]), RunPage(runs=[]), refused)
    result = grpohub("upload", data, "--recipe", "nightly")
    assert result.exit_code == 2
    assert "refused now" in result.stderr
    assert "refused before" not in result.stderr


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("data.jsonl", "needs a recipe"),
        ("none.jsonl --recipe nightly", "is no file"),
        ("data.csv --recipe nightly", "End its name in .jsonl, .json, .parquet"),
        ("run.yaml --recipe nightly", "End its name in .jsonl, .json, .parquet"),
        ("data.jsonl --recipe nihgtly", "Did you mean `nightly`?"),
        ("data.jsonl --recipe other", "Registered are: nightly."),
        ("wrong/run.yaml", "Did you mean `max_steps`?"),
    ],
)
@pytest.mark.usefixtures("nightly")
def test_an_upload_that_would_start_nothing_is_refused_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3: Any, command: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    run_folder(tmp_path / "wrong", max_stepz=5)
    for name in ("data.jsonl", "data.csv", "run.yaml"):
        (tmp_path / name).write_text("{}")
    refused = grpohub("upload", *command.split())
    assert refused.exit_code == 2, refused.output
    assert words in refused.stderr
    assert "Contents" not in s3.list_objects_v2(Bucket="hub-bucket")


def test_a_recipe_is_registered_with_its_files_and_addresses(
    cloud: StubApi, tmp_path: Path
) -> None:
    view = RecipeView(name="nightly", yaml="name: sums", updated_at=NOON)
    cloud.on("PUT /v1/recipes/nightly", view)
    cloud.on("GET /v1/recipes/nightly", view)
    cloud.on("GET /v1/recipes", RecipeList(recipes=["nightly"]))
    cloud.on("DELETE /v1/recipes/nightly", (200, {}))
    result = grpohub("recipes", "put", "nightly", run_folder(tmp_path))
    assert result.exit_code == 0, result.output
    sent = json.loads(cloud.asked[-1].body["yaml"])
    assert sent["model"]["source"].startswith("s3://hub-bucket/inputs/")
    assert "rewards.py" in cloud.asked[-1].body["files"]
    assert grpohub("recipes", "list").stdout == "nightly\n"
    assert grpohub("recipes", "get", "nightly").stdout == "name: sums\n"
    assert grpohub("recipes", "delete", "nightly").exit_code == 0


def test_rewards_are_listed_and_reward_files_run_on_real_rows(
    cloud: StubApi, tmp_path: Path
) -> None:
    listed = RewardCatalogue(rewards=[RewardView(name="length", summary="How long.")])
    cloud.on("GET /v1/rewards", listed)
    assert "How long." in grpohub("rewards", "list").stdout

    scored = RewardSourceView(
        name="mine", kind="file", weight=1.0, state="scored", scores=[1.0, None], seconds=0.5
    )
    view = RewardTestView(sources=[scored], rewards=[1.0, None])
    cloud.on("POST /v1/rewards:test", view)
    run = run_folder(tmp_path)
    result = grpohub("rewards", "test", run, "--hub", "--rows", "1")
    assert result.exit_code == 0, result.output
    assert "mine: file, weight 1, 0.50 s" in result.stdout
    body = cloud.asked[-1].body
    asked = [{"role": "user", "content": "x\n0+1"}]
    columns = {"problem": "0+1", "answer": "1", "screen": "x"}
    row = {"ground_truth": "1", "prompt": asked, "columns": columns}
    assert body["samples"] == [{**row, "completion": "1"}, {**row, "completion": ""}]
    assert body["rewards"][0]["function"] == "score"
    assert body["files"].keys() >= {"rewards.py", "helper.py"}

    failed = scored.model_copy(update={"state": "failed", "reason": "division by zero"})
    cloud.on("POST /v1/rewards:test", RewardTestView(sources=[failed]))
    result = grpohub("rewards", "test", run, "--hub")
    assert result.exit_code == 1
    assert "failed: division by zero" in result.stdout
    wrong = ProblemView(path="r.py", reason="syntax error", fix="Mend it.")
    cloud.on("POST /v1/rewards:test", RewardTestView(problems=[wrong]))
    assert grpohub("rewards", "test", run, "--hub").exit_code == 2
    assert grpohub("rewards", "test", run, "--completions", "nothing").exit_code == 2
