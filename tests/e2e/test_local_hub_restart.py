"""The whole hub over a restart of the embedded cloud's process: what finished is there, what ran
can go on.
"""

import pytest

from contracts.states import RunState
from tests.e2e.small_cloud import until
from tests.e2e.toy_hub import at_step, finished, first_steps, hub_of, put_inputs, spec, start

pytestmark = pytest.mark.long


def test_finished_runs_are_found_and_one_cut_off_is_resumed_from_its_checkpoint(tmp_path):
    with start(tmp_path) as cloud:
        put_inputs(cloud)
        hub = hub_of(cloud)
        document = spec(cloud, name="done", steps=3, deploy={"instance_type": "ml.g5.xlarge"})
        done = hub.create_run(document).run_id
        before = finished(hub, done)
        assert before.state is RunState.SUCCEEDED, before.reason
        cut_off = hub.create_run(spec(cloud, name="cut", steps=60)).run_id
        at_step(hub, cut_off, 4)

    with start(tmp_path) as cloud:
        hub = hub_of(cloud)
        assert hub.run(done) == before
        assert next(item.step for item in hub.checkpoints(done) if item.complete) == 3
        said = [line.message for line in hub.logs(done)]
        assert "toy training from step 1" in said
        until(lambda: cloud.sagemaker.endpoints["done"].status == "InService")
        assert "model.safetensors" in hub.chat("done", [{"role": "user", "content": "?"}])

        lost = finished(hub, cut_off)
        assert lost.state is RunState.CANCELLED
        assert "the embedded cloud ended" in lost.reason.lower()
        hub.resume(cut_off)
        run = finished(hub, cut_off)
        assert run.state is RunState.SUCCEEDED, run.reason
        steps = first_steps(cloud, cut_off)
        assert steps[0] == 1
        assert steps[-1] > 4
