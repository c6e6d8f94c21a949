"""Python text that makes a process refuse system calls, as hosts of another kind do."""

from __future__ import annotations

import platform

__all__ = ["LANDLOCK", "UNSHARE", "refusing"]

UNSHARE, LANDLOCK = {"x86_64": 272}.get(platform.machine(), 97), 444


def refusing(calls: list[tuple[int, int]]) -> str:
    """To be run first: ``calls`` are numbers with the errno they fail with, for good and for every
    child. Capabilities are dropped, as a container without privileges has none."""
    return f"""
import ctypes, struct
from training_container.rewards import confine

code = [(confine._LOAD, 0, 0, 0)]
for number, error in {calls}:
    code += [(confine._JUMP_EQUAL, 0, 1, number), (confine._RETURN, 0, 0, confine._ERRNO | error)]
code += [(confine._RETURN, 0, 0, confine._ALLOW)]
program = b"".join(struct.pack("=HBBI", *instruction) for instruction in code)
buffer = ctypes.create_string_buffer(program, len(program))
descriptor = struct.pack("HxxxxxxP", len(code), ctypes.addressof(buffer))
holder = ctypes.create_string_buffer(descriptor)
confine._drop_capabilities()
confine._prctl(confine._PR_SET_NO_NEW_PRIVS, 1)
assert confine._prctl(confine._PR_SET_SECCOMP, 2, ctypes.addressof(holder)) == 0
"""
