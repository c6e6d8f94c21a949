"""Each patch of moto, shown twice: what happens with all patches, and with all but that one."""

import datetime
import json
import subprocess
import sys
from typing import Any

import pytest

from local_aws import moto_patches


@pytest.fixture(scope="module")
def answers() -> dict[str, dict[str, Any]]:
    """What every case answered, by patch."""
    command = [sys.executable, "-m", "tests.e2e.moto_patch_cases"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    return json.loads(done.stdout)


def test_every_patch_has_a_case(answers):
    assert set(answers) == {patch.__name__ for patch in moto_patches.ALL}


def test_cloudformation_creates_machines_that_run(answers):
    seen = answers["create_machines_in_executing_backend"]
    assert seen["with"] == "SUCCEEDED"
    assert "StateMachineDoesNotExist" in seen["without"]


def test_executions_without_a_name_get_one_each(answers):
    assert answers["name_unnamed_executions"]["with"] == 2
    assert answers["name_unnamed_executions"]["without"] != 2


def test_a_failed_token_keeps_its_cause(answers):
    assert answers["keep_failure_cause"]["with"] == ["Spot", "interrupted"]
    assert answers["keep_failure_cause"]["without"] == ["Spot", None]


def test_a_token_is_taken_while_another_execution_is_only_starting(answers):
    assert answers["ignore_executions_without_environment"]["with"] == "SUCCEEDED"
    assert "AttributeError" in answers["ignore_executions_without_environment"]["without"]


def test_stopping_an_execution_that_waits_for_a_token_aborts_it(answers):
    assert answers["stop_waiting_executions"]["with"] == ["ABORTED", "E", "C"]
    assert answers["stop_waiting_executions"]["without"][0] == "RUNNING"


def test_an_answer_before_the_heartbeat_is_set_up_is_heard(answers):
    assert answers["hear_early_answers"] == {"with": True, "without": False}


def test_dates_in_results_and_context_are_text(answers):
    for text in answers["write_dates_as_text"]["with"]:
        datetime.datetime.fromisoformat(text)
    assert "TypeError" in answers["write_dates_as_text"]["without"]


def test_sagemaker_errors_are_spelt_as_aws_spells_them(answers):
    assert answers["spell_sagemaker_errors"]["with"].startswith("SageMaker.")
    assert answers["spell_sagemaker_errors"]["without"].startswith("sagemaker.")


def test_executions_announce_their_start_and_end(answers):
    assert answers["announce_executions"]["with"] == ["RUNNING", "SUCCEEDED"]
    assert answers["announce_executions"]["without"] == []


def test_hours_of_waiting_pass_in_no_time(answers):
    assert answers["scale_waits"]["with"] == "SUCCEEDED"
    assert answers["scale_waits"]["without"] == "RUNNING"


def test_tasks_share_a_client_per_service_and_session(answers):
    assert answers["reuse_clients"]["with"] == [True, False]
    assert answers["reuse_clients"]["without"] == [False, False]


def test_a_definition_is_parsed_once_for_all_its_executions(answers):
    assert answers["parse_definitions_once"]["with"] == 1
    assert answers["parse_definitions_once"]["without"] > 2


def test_items_are_read_without_looking_for_other_names_of_their_types(answers):
    assert answers["read_attribute_values_directly"]["with"] == [True, False]
    assert answers["read_attribute_values_directly"]["without"] == [True, True]


def test_each_object_is_reported_once_and_tagging_is_not(answers):
    expected = ["PutObject", "CompleteMultipartUpload", "CopyObject"]
    assert answers["report_object_creation"]["with"] == expected
    assert answers["report_object_creation"]["without"] != expected


def test_writes_and_deletes_of_objects_are_observed(answers):
    assert answers["observe_objects"]["with"] == ["some-bucket/a", "some-bucket/a"]
    assert answers["observe_objects"]["without"] == []


def test_log_events_are_filtered_by_the_prefix_of_their_stream_and_interleaved(answers):
    expected = [["a/1 3", "a/2 2", "a/1 1"], []]
    assert answers["filter_logs_by_stream_prefix"]["with"] == expected
    assert answers["filter_logs_by_stream_prefix"]["without"] != expected
