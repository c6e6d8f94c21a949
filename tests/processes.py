"""Processes under test: signals as the kernel may deliver them, and who has not ended."""

from __future__ import annotations

import ctypes
import os
import signal

import psutil


def signal_side_thread(pid: int, number: signal.Signals) -> None:
    """Signal a process through a thread that is not its main one.

    The kernel prefers the main thread but promises nothing (signal(7)), and Python's handlers run
    in no other: a main thread that waits without end would never hear of it.

    Raises:
        OSError: the process has no such thread any more.
    """
    thread = next(t.id for t in psutil.Process(pid).threads() if t.id != pid)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.tgkill(pid, thread, number):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended; a zombie has, and waits only for its parent to notice."""
    return [process for process in processes if not _ended(process)]


def _ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
