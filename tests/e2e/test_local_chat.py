"""A real model behind a real endpoint: the inference container's own entrypoint, asked through
SageMaker's runtime, through the hub's API, and by `grpohub chat`.
"""

import json
import shutil
from dataclasses import dataclass

import pytest
from typer.testing import CliRunner

from client.cli import app
from client.hub import Hub
from contracts.api import RunView
from contracts.states import RunState
from local_aws.server import LocalCloud
from tests.e2e.small_cloud import streamed_text, until
from tests.e2e.toy_hub import TRAINER, finished, hub_of, point_commands_at, put_inputs, spec, start
from tests.inference.tiny_model import write_adapter, write_model

# A run, and a container that loads torch: a minute.
pytestmark = pytest.mark.long

QUESTION = "How to move from (0,0) to (4,4)?"
MESSAGES = [{"role": "user", "content": QUESTION}]
GREEDY = {"temperature": 0.0, "max_tokens": 12}
COMMAND = ("chat", "--temperature", "0", "--max-tokens", "12")


@dataclass(frozen=True)
class Served:
    """A deployed run of the toy trainer, whose model is a real one with an adapter in it."""

    cloud: LocalCloud
    hub: Hub
    run: RunView

    def invoke(self, **fields):
        """InvokeEndpoint; the container's own answer."""
        answer = self.cloud.client("sagemaker-runtime").invoke_endpoint(
            EndpointName="tiny", ContentType="application/json", Body=json.dumps(fields)
        )
        return json.loads(answer["Body"].read())


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    model = write_model(folder / "model")
    write_adapter(model / "adapters" / "tuned")
    (model / "model.json").unlink()  # the export writes its own
    with start(folder / "state", TRAINER) as cloud:
        put_inputs(cloud, model)
        shutil.rmtree(model)
        adapters = [{"name": "tuned", "source": "adapters/tuned"}]
        deploy = {"instance_type": "ml.g5.xlarge", "smoke_test": {"max_tokens": 4}}
        deploy["engine"] = {"dtype": "float32", "lora_adapters": adapters}
        hub = hub_of(cloud)
        run = hub.create_run(spec(cloud, name="tiny", steps=1, deploy=deploy))
        run = finished(hub, run.run_id)
        assert run.state is RunState.SUCCEEDED, run.reason
        yield Served(cloud, hub, run)


@pytest.fixture
def grpohub(served, monkeypatch):
    """The command line, on this hub."""
    point_commands_at(served.cloud, monkeypatch)
    return lambda *arguments: CliRunner().invoke(app, list(arguments))


def said(answer):
    return answer["choices"][0]["message"]["content"]


def test_the_new_endpoint_was_asked_a_question_of_the_validation_data(served):
    assert served.run.smoke_test.source == "validation data"
    assert served.run.smoke_test.prompt == "1+1?"
    assert served.run.smoke_test.answer


def test_the_runtime_answers_whole_and_in_a_stream(served):
    whole = said(served.invoke(messages=MESSAGES, **GREEDY))
    assert whole
    body = {"messages": MESSAGES, **GREEDY, "stream": True}
    answer = served.cloud.client("sagemaker-runtime").invoke_endpoint_with_response_stream(
        EndpointName="tiny", ContentType="application/json", Body=json.dumps(body)
    )
    assert streamed_text(answer) == whole


def test_chat_says_the_same_through_the_api_and_in_a_stream(served, grpohub):
    whole = said(served.invoke(messages=MESSAGES, **GREEDY))
    assert served.hub.chat("tiny", MESSAGES, **GREEDY) == whole
    pieces = list(served.hub.stream_chat("tiny", MESSAGES, **GREEDY))
    assert len(pieces) > 1
    assert "".join(pieces) == whole
    for way in ((), ("--stream",)):
        asked = grpohub(*COMMAND, served.run.run_id, QUESTION, *way)
        assert asked.stdout == f"{whole}\n", asked.output


def test_base_and_adapter_answer_side_by_side(served, grpohub):
    base = said(served.invoke(messages=MESSAGES, **GREEDY))
    tuned = said(served.invoke(messages=MESSAGES, model="tuned", **GREEDY))
    assert base != tuned
    for way in ((), ("--stream",)):
        asked = grpohub("--json", *COMMAND, "tiny", QUESTION, "--compare", "tiny:tuned", *way)
        assert json.loads(asked.stdout) == [
            {"endpoint": "tiny", "answer": base},
            {"endpoint": "tiny:tuned", "answer": tuned},
        ]


def test_what_the_container_refuses_is_said_in_its_own_words(served, grpohub, tmp_path):
    picture = tmp_path / "screen.png"
    picture.write_bytes(b"png")
    for way in ((), ("--stream",)):
        refused = grpohub(*COMMAND, "tiny", "What is this?", "--image", str(picture), *way)
        assert refused.exit_code == 1
        words = " ".join(refused.stderr.split())
        assert "the transformers engine serves text only" in words


def test_altered_weights_fail_the_endpoint_by_name_and_leave_the_other_alone(served):
    s3, bucket = served.cloud.client("s3"), served.cloud.outputs["BucketName"]
    key = f"runs/{served.run.run_id}/stages/0-sft/model/model.safetensors"
    weights = s3.get_object(Bucket=bucket, Key=key)["Body"].read()
    s3.put_object(Bucket=bucket, Key=key, Body=weights[:-1] + bytes([weights[-1] ^ 1]))
    settings = {"instance_type": "ml.g5.xlarge", "endpoint_name": "altered"}
    served.hub.deploy(served.run.run_id, settings)
    run = finished(served.hub, served.run.run_id)
    s3.put_object(Bucket=bucket, Key=key, Body=weights)
    assert run.state is RunState.ENDPOINT_FAILED
    assert "model.safetensors was altered" in run.reason
    until(lambda: set(served.cloud.sagemaker.endpoints) == {"tiny"})
    assert said(served.invoke(messages=MESSAGES, **GREEDY))
