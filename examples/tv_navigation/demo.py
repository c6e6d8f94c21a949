"""The main job end to end on this machine: train, interrupt twice, recover, deploy, ask.

Starts the embedded mode, submits `run.yaml` through the HTTP API as any user would, takes the
instance away twice (once with notice, once with SIGKILL), and asks the endpoint a held-out
question. Writes `.grpohub/demo/report.json` and `reward.png`, and exits non-zero if anything of
this did not happen.

    make demo
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from client.hub import Hub
from client.settings import load_settings
from contracts.api import RunView, TimelineEntry
from contracts.layout import RunLayout
from contracts.states import RunState, is_terminal
from examples.tv_navigation.evaluate import accuracy, reaches_goal
from examples.tv_navigation.make_data import make
from examples.tv_navigation.story import Interruption, Story, embedded_mode, measure, take_away

HERE = Path(__file__).parent
BUILD = HERE / "build"
OUT = Path(".grpohub/demo")
DEADLINE_SECONDS = 900
GAIN = 0.30
"""Rise of held-out accuracy from the end of SFT that the demo must show."""


def main() -> int:
    """Run the demo; the exit code says whether all of it happened."""
    story = Story()
    OUT.mkdir(parents=True, exist_ok=True)
    make(BUILD)
    train, held_out = (
        len((BUILD / f"{n}.jsonl").read_text().splitlines()) for n in ("train", "validation")
    )
    story.tell("data", f"{train} questions about a screen of buttons, {held_out} more held out")
    with embedded_mode(OUT):
        hub = Hub(settings=load_settings(folder=OUT))
        story.tell("cloud", f"API at {hub.settings.api_url}")
        run = hub.submit(HERE / "run.yaml")
        story.tell("submit", f"run {run.run_id}, three stages")
        interruptions, run = follow(hub, run, story)
        if run.state is not RunState.SUCCEEDED:
            story.tell("failed", f"{run.state}: {run.reason}")
            return 1
        report = build_report(hub, run, interruptions, story)
    draw(report.pop("curves"), report["interruptions"], OUT / "reward.png")
    (OUT / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    return verdict(report, story)


def follow(hub: Hub, run: RunView, story: Story) -> tuple[list[Interruption], RunView]:
    """Watch the run to its end and take its instance away once in each GRPO stage."""
    plan = [
        Interruption(stage=1, stage_name="smooth", after_step=15, with_notice=True, hold=0),
        Interruption(stage=2, stage_name="strict", after_step=15, with_notice=False, hold=90),
    ]
    pending, done = list(plan), []
    shown: set[TimelineEntry] = set()
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        run = hub.run(run.run_id)
        # By the facts' own time: one that is told late stands between others.
        for entry in hub.timeline(run.run_id):
            if entry not in shown:
                story.tell(entry.kind, entry.text)
            shown.add(entry)
        if is_terminal(run.state):
            return done, run
        if pending and (run.stages[pending[0].stage].step or 0) >= pending[0].after_step:
            interruption = pending.pop(0)
            time.sleep(4)  # so that there are steps to lose beyond the newest checkpoint
            take_away(OUT, run.run_id, interruption, story)
            done.append(interruption)
        time.sleep(1)
    story.tell("deadline", f"not finished after {DEADLINE_SECONDS} s")
    return done, run


def build_report(
    hub: Hub, run: RunView, interruptions: list[Interruption], story: Story
) -> dict[str, Any]:
    """What the run came to, measured from its own metrics, logs, attempts and model."""
    rows = {stage.index: list(hub.metrics(run.run_id, stage=stage.index)) for stage in run.stages}
    attempts = hub.attempts(run.run_id)
    warm = local_accuracy(hub, run, stage=0)
    stages = []
    for stage in run.stages:
        of_stage = [attempt for attempt in attempts if attempt.stage_index == stage.index]
        held_out = held_out_curve(rows[stage.index])
        trained = [row["step"] for row in rows[stage.index] if "loss" in row["metrics"]]
        before, after = (held_out[0][1], held_out[-1][1]) if held_out else (None, None)
        stages.append(
            {
                "name": stage.name,
                "method": stage.method,
                "start_step": min(trained) - 1,
                "end_step": max(trained),
                "held_out_accuracy_before": base_accuracy() if stage.index == 0 else before,
                "held_out_accuracy_after": warm if stage.index == 0 else after,
                "attempts": len(of_stage),
                "seconds": round(seconds_of(of_stage), 1),
            }
        )
    for interruption in interruptions:
        measure(hub, run.run_id, interruption, rows[interruption.stage])
    question, answer, expected = ask(hub, run, story)
    return {
        "run_id": run.run_id,
        "stages": stages,
        "interruptions": [interruption.report() for interruption in interruptions],
        "endpoint": run.endpoint_name,
        "question": question,
        "answer": answer,
        "expected": expected,
        "answered_right": reaches_goal(answer, expected),
        "final_model_accuracy": local_accuracy(hub, run, stage=2),
        "story": [asdict(line) for line in story.lines],
        "curves": {
            stage.name: {
                "reward": [(r["step"], r["metrics"]["reward"]) for r in rows[stage.index]
                           if isinstance(r["metrics"].get("reward"), float | int)],
                "held_out": held_out_curve(rows[stage.index]),
            }
            for stage in run.stages
        },
    }  # fmt: skip


def held_out_curve(rows: list[dict[str, Any]]) -> list[tuple[int, float]]:
    """(step, strict held-out accuracy) where the stage validated."""
    names = ("validation/reward/solved", "validation/reward/accuracy")
    found = []
    for row in rows:
        value = next((row["metrics"][name] for name in names if name in row["metrics"]), None)
        if isinstance(value, float | int):
            found.append((int(row["step"]), float(value)))
    return found


def seconds_of(attempts: list[Any]) -> float:
    """From the first attempt's plan to the last one's end."""
    ended = [attempt.ended_at for attempt in attempts if attempt.ended_at is not None]
    return (max(ended) - min(a.planned_at for a in attempts)).total_seconds() if ended else 0.0


def base_accuracy() -> float:
    """Of the untrained model."""
    return accuracy(BUILD / "model", BUILD / "validation.jsonl", HERE / "prompt.jinja")


def local_accuracy(hub: Hub, run: RunView, *, stage: int) -> float:
    """Download a stage's exported model and measure it apart from the trainer."""
    s3: Any = hub.settings.aws("s3")
    info = hub.info()
    prefix = RunLayout(run.run_id).stage(stage, run.stages[stage].name).model_prefix
    folder = OUT / "models" / run.stages[stage].name
    folder.mkdir(parents=True, exist_ok=True)
    for page in s3.get_paginator("list_objects_v2").paginate(Bucket=info.bucket, Prefix=prefix):
        for item in page.get("Contents", ()):
            target = folder / item["Key"].removeprefix(prefix)
            target.parent.mkdir(parents=True, exist_ok=True)
            s3.download_file(info.bucket, item["Key"], str(target))
    return accuracy(folder, BUILD / "validation.jsonl", HERE / "prompt.jinja")


def ask(hub: Hub, run: RunView, story: Story) -> tuple[str, str, str]:
    """One held-out question through the API: (question, answer, ground truth)."""
    row = json.loads((BUILD / "validation.jsonl").read_text().splitlines()[0])
    question = f"{row['screen']}\n{row['problem']}"
    if run.endpoint_name is None:
        return question, "", row["ground_truth"]
    answer = hub.chat(
        run.endpoint_name,
        [{"role": "user", "content": question}],
        max_tokens=80,
        temperature=0,
    )
    story.tell("ask", row["problem"])
    story.tell("answer", answer)
    return question, answer, row["ground_truth"]


def draw(curves: dict[str, Any], interruptions: list[dict[str, Any]], path: Path) -> None:
    """Reward and held-out accuracy over the steps of the GRPO stages, interruptions marked."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 4.5))
    offset = 0
    for name, curve in curves.items():
        if not curve["reward"]:
            continue
        first = offset == 0
        axes.plot(
            *zip(*[(offset + s, v) for s, v in curve["reward"]], strict=True),
            color="#9db4c0",
            lw=1.2,
            label="reward of the step" if first else None,
        )
        if curve["held_out"]:
            axes.plot(
                *zip(*[(offset + s, v) for s, v in curve["held_out"]], strict=True),
                color="#d1495b",
                marker="o",
                label="held-out accuracy" if first else None,
            )
        for cut in (c for c in interruptions if c["stage"] == name):
            style = "--" if cut["with_notice"] else ":"
            word = "Spot notice" if cut["with_notice"] else "SIGKILL"
            axes.axvline(offset + cut["step"], color="#30638e", ls=style, lw=1.2)
            axes.annotate(
                f"{word}\nsteps lost: {cut['steps_lost']}",
                (offset + cut["step"], 0.03),
                xytext=(4, 0),
                textcoords="offset points",
                fontsize=8,
            )
        axes.text(offset + 2, 1.02, name, fontsize=10, weight="bold")
        offset += curve["reward"][-1][0]
        axes.axvline(offset, color="#dddddd", lw=1)
    axes.set(xlabel="GRPO step", ylabel="share", ylim=(0, 1.08), title=" ")
    axes.legend(loc="lower right", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)  # fmt: skip


def verdict(report: dict[str, Any], story: Story) -> int:
    """0 when everything that the demo promises happened; otherwise say what did not."""
    warm = report["stages"][0]["held_out_accuracy_after"]
    final = report["stages"][-1]["held_out_accuracy_after"]
    failures = []
    if final - warm < GAIN:
        failures.append(f"held-out accuracy rose from {warm:.2f} to {final:.2f}, not by {GAIN}")
    if [i["with_notice"] for i in report["interruptions"]] != [True, False]:
        failures.append("the run was not interrupted once with and once without notice")
    if report["stages"][-1]["attempts"] < 2:
        failures.append("the second interruption did not lead to a resubmission")
    if not report["answer"]:
        failures.append("the endpoint gave no answer")
    for stage in report["stages"]:
        story.tell(
            "result",
            f"{stage['name']:8} {stage['method']:4} to step {stage['end_step']:3}: held-out "
            f"{stage['held_out_accuracy_before']:.2f} -> {stage['held_out_accuracy_after']:.2f}, "
            f"{stage['attempts']} attempt(s), {stage['seconds']:.0f} s",
        )
    for cut in report["interruptions"]:
        story.tell(
            "result",
            f"{cut['stage']}: {'notice' if cut['with_notice'] else 'SIGKILL'} at "
            f"step {cut['step']}, "
            f"steps lost: {cut['steps_lost']}, training again after "
            f"{cut['seconds_to_training_again']:.0f} s",
        )
    for failure in failures:
        story.tell("MISSED", failure)
    story.tell("done", f"{OUT / 'report.json'} and {OUT / 'reward.png'}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
