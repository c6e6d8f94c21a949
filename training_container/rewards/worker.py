"""A worker process: a supervisor and, under it, the confined process that scores.

Run as a script, `python -I worker.py ROOT LIFE_FD LIBRARIES`, with frames on standard input and
output. The supervisor enters the namespaces, forks the confined child (process 1 of its own PID
namespace where the host allows one), and then only watches: it kills the child and all its
descendants when the trainer is gone, or when together they use more memory or processes than
allowed. Being outside the child's namespaces and Landlock domain, it cannot be signalled by it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])  # -I drops the script's own folder and PYTHONPATH
    sys.path.append(sys.argv[3])

from training_container.rewards.confine import (
    Limits,
    adopt_orphans,
    enter_namespaces,
    lock_down,
)
from training_container.rewards.egress import Listener, Policy
from training_container.rewards.interface import FailureKind, Sample
from training_container.rewards.scorer import Outcome, Scorer, load_scorer
from training_container.rewards.wire import Channel, ChannelClosedError

_WATCH_SECONDS = 0.5
_TRACEBACK_LINES, _LINE_CHARACTERS = 12, 1000
_DETAIL_CHARACTERS = 4000


def main(life_fd: int) -> None:
    """Enter the namespaces, fork the confined child, watch it."""
    channel = Channel(os.dup(0), os.dup(1))
    limits = Limits(**_tupled(channel.receive()))
    _redirect_standard_streams()
    trainer = os.getppid()
    answered = limits.network and sys.platform.startswith("linux")
    ours, childs = socket.socketpair() if answered else (None, None)
    namespaces, refusal = enter_namespaces(limits.network)
    child_alive, held_by_child = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(child_alive)
        os.close(life_fd)
        if "pid" not in namespaces:
            adopt_orphans()
        if ours is not None:
            ours.close()
        report = lock_down(limits, namespaces, refusal, trainer=trainer, supervisor=childs)
        if childs is not None:
            childs.close()
        serve(channel, report)
    os.close(held_by_child)
    listener = None
    if ours is not None and childs is not None:
        childs.close()
        listener = Listener(Policy(limits.services))
        listener = listener if listener.start(child, ours) else None
    _watch(child, life_fd, child_alive, limits, listener)


def _tupled(message: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(v) if isinstance(v, list) else v for key, v in message.items()}


def _redirect_standard_streams() -> None:
    """The protocol's pipes move away from 0 and 1, so that a `print` cannot corrupt a frame."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)


# --- supervisor ----------------------------------------------------------------------------------


def _watch(
    child: int, life_fd: int, child_alive: int, limits: Limits, listener: Listener | None
) -> NoReturn:
    trainer = os.getppid()
    calls = [] if listener is None else [listener]
    look_again = 0.0
    while True:
        readable, _, _ = select.select([life_fd, child_alive, *calls], [], [], _WATCH_SECONDS)
        # The trainer is gone, or the child is. A process the trainer forked may hold its end of
        # the pipe open, so its death is also looked for.
        if life_fd in readable or child_alive in readable or os.getppid() != trainer:
            _end(child, "")
        if listener is not None and listener in readable:
            listener.answer()
        if time.monotonic() < look_again:
            continue
        look_again = time.monotonic() + _WATCH_SECONDS
        processes = _tree(child, limits.processes)
        resident_mb = sum(_resident_mb(process) for process in processes)
        if resident_mb > limits.memory_mb:
            _end(child, f"worker used {resident_mb} MB of the {limits.memory_mb} MB allowed")
        if len(processes) > limits.processes:
            _end(child, f"worker ran {len(processes)} processes of {limits.processes} allowed")


def _end(child: int, reason: str) -> NoReturn:
    if reason:
        os.write(2, f"{reason}\n".encode())
    for process in _tree(child, limit=4096):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _tree(root: int, limit: int) -> list[int]:
    """``root`` and its descendants, no more than ``limit`` + 1 of them.

    Read from /proc, which keeps showing the host's process ids to the supervisor.
    """
    found = [root]
    for process in found:  # grows while it is read
        try:
            tasks = list(Path(f"/proc/{process}/task").iterdir())
            texts = [(task / "children").read_text() for task in tasks]
        except OSError:  # gone meanwhile, or not Linux
            continue
        found += [int(pid) for text in texts for pid in text.split()]
        if len(found) > limit:
            break
    return found[: limit + 1]


def _resident_mb(process: int) -> int:
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") // (1024 * 1024)


# --- confined child ------------------------------------------------------------------------------


def serve(channel: Channel, confinement: Mapping[str, str]) -> NoReturn:
    """Answer `load` and `score` until the trainer hangs up."""
    channel.send({"confinement": confinement})
    scorer: Scorer | None = None
    while True:
        try:
            message = channel.receive()
        except ChannelClosedError:
            os._exit(0)
        if message["op"] == "load":
            scorer = _load(channel, message)
        elif scorer is not None:
            _score(channel, scorer, message)


def _load(channel: Channel, message: Mapping[str, Any]) -> Scorer | None:
    try:
        scorer = load_scorer(message)
    except BaseException as error:  # noqa: BLE001 - anything a user's module may raise on import
        channel.send({"error": describe(error), "type": type(error).__name__})
        return None
    columns = None if scorer.columns is None else list(scorer.columns)
    channel.send(
        {
            "style": scorer.style,
            "per_sample": scorer.per_sample,
            "columns": columns,
            "prompt": scorer.reads_prompt,
        }
    )
    return scorer


def _score(channel: Channel, scorer: Scorer, message: Mapping[str, Any]) -> None:
    rows = message["rows"]
    samples = [Sample(**fields, **rows[row]) for fields, row in _split(message["samples"])]
    try:
        for index, outcome in scorer.outcomes(samples):
            channel.send({"index": index, **_short(outcome)})
    except ChannelClosedError:
        os._exit(0)
    except BaseException as error:  # noqa: BLE001 - anything a user's function may raise
        channel.send({"failed": [FailureKind.EXCEPTION, describe(error)]})
    _reap()
    channel.send({"done": True, "resident_mb": _resident_mb_of_self()})


def _short(outcome: Outcome) -> Outcome:
    """With no more of an error's text than the trainer keeps."""
    if "failed" not in outcome:
        return outcome
    kind, detail = outcome["failed"]
    return {"failed": [kind, detail[:_DETAIL_CHARACTERS]]}


def _split(samples: Sequence[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], int]]:
    """A sample's own fields, and the number of the row it shares with its group."""
    for fields in samples:
        row = fields.pop("row")
        yield fields, row


def _reap() -> None:
    """Process 1 of a namespace inherits orphans; nobody else would collect them."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _resident_mb_of_self() -> int:
    import resource

    # Peak, in KiB on Linux. /proc/self would do, but not where /proc is masked.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def describe(error: BaseException) -> str:
    """Type, message and the last frames: what the author of a reward needs to mend it."""
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    text = "".join(lines).strip().splitlines()
    return "\n".join(line[:_LINE_CHARACTERS] for line in text[-_TRACEBACK_LINES:])


if __name__ == "__main__":
    main(int(sys.argv[2]))
