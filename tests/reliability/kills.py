"""Killing a container at a chosen or a random moment."""

from __future__ import annotations

import random
import re
import threading
import time
from dataclasses import dataclass

from tests.reliability.job import Container, Job
from tests.training.s3 import S3Server


@dataclass(frozen=True)
class Moment:
    """The ``nth`` request to S3 that matches; `at` names the phase of the protocol."""

    at: str
    method: str
    pattern: str
    nth: int = 1


RESTORE = Moment("restore", "GET", r"host-0/.*distcp", 2)
UPLOAD = Moment("upload", "PUT", r"host-0/.*distcp", 2)
SECOND_UPLOAD = Moment("second upload", "PUT", r"step-0000000[2-9].*distcp", 2)
BEFORE_FLAG = Moment("before the flag", "PUT", r"\.flag")
SECOND_FLAG = Moment("before the second flag", "PUT", r"\.flag", 2)
AFTER_FLAG = Moment("after the flag", "GET", r"list-type=2.*checkpoints", 3)
PRUNE = Moment("prune", "POST", r"delete", 1)
EXPORT = Moment("export", "PUT", r"model\.safetensors")
ANNOUNCE = Moment("announce", "PUT", r"model\.json")
MOMENTS = (RESTORE, UPLOAD, SECOND_UPLOAD, BEFORE_FLAG, AFTER_FLAG, PRUNE, EXPORT, ANNOUNCE)


class KillAt:
    """SIGKILL the container when a moment comes; the request itself never arrives."""

    def __init__(self, server: S3Server, moment: Moment) -> None:
        self.container: Container | None = None
        self.struck = threading.Event()
        self._moment, self._left, self._lock = moment, moment.nth, threading.Lock()
        server.hooks.append(self._see)

    def _see(self, method: str, target: str) -> None:
        moment, container = self._moment, self.container
        if container is None or method != moment.method or not re.search(moment.pattern, target):
            return
        with self._lock:
            self._left -= 1
            if self._left == 0:
                container.sigkill()
                self.struck.set()
                raise ConnectionAbortedError("the sender is dead: the request never arrived")


def kill_at(job: Job, moment: Moment) -> bool:
    """Run an incarnation until ``moment`` and kill it there; False when it ended before."""
    killer = KillAt(job.server, moment)
    container = job.start()
    killer.container = container
    container.wait()
    job.server.hooks.remove(killer._see)
    return killer.struck.is_set()


def interrupt_randomly(job: Job, seed: int) -> str:
    """Run an incarnation and interrupt it at a moment drawn from ``seed``; what was done."""
    rng = random.Random(seed)
    kind = rng.choice(["moment", "moment", "sigkill", "sigterm"])
    if kind == "moment":
        moment = rng.choice(MOMENTS)
        moment = Moment(moment.at, moment.method, moment.pattern, rng.randint(1, 4))
        return f"{moment.at} x{moment.nth}: {'killed' if kill_at(job, moment) else 'ended first'}"
    container = job.start()
    started = len(job.server.requests)
    after = rng.randint(5, 60)
    while container.process.poll() is None and len(job.server.requests) - started < after:
        time.sleep(0.01)
    if container.process.poll() is None:
        container.sigterm() if kind == "sigterm" else container.sigkill()
    return f"{kind} after {after} requests: exit {container.wait()}"
