"""What a worker process takes away from itself before any code that is not ours runs.

Layers, each used where the kernel grants it, because a training container (root, Docker's default
profile, no CAP_SYS_ADMIN) refuses namespaces but grants Landlock and seccomp, and a developer's
machine often does the reverse. What was granted is reported in words, never assumed.

1. user, network, PID and IPC namespaces: no route anywhere, no process outside to see or signal;
2. Landlock: reads only the interpreter, system libraries and the paths it is given, writes only
   its own scratch folder, cannot trace or signal what is outside;
3. no capabilities and no way to regain them;
4. seccomp: no sockets (io_uring, which could open one unseen, included), no tracing, no mounts, no
   new namespaces, no memory that counts against no limit while it is not mapped (memfd, shmget);
5. where the network is declared, no connection to what hands out credentials (`egress.py`);
6. limits on address space, CPU time, file size and, for users other than root, processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import resource
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from training_container.rewards.egress import confine_connections

__all__ = ["Limits", "adopt_orphans", "enter_namespaces", "lock_down"]

_CLONE_NEWUSER, _CLONE_NEWPID = 0x10000000, 0x20000000
_CLONE_NEWNET, _CLONE_NEWIPC = 0x40000000, 0x08000000
_NAMESPACE_FLAGS = 0x7E020000

_PR_CAPBSET_DROP, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 24, 22, 38, 47
_PR_SET_CHILD_SUBREAPER = 36
_SECCOMP_MODE_FILTER, _PR_CAP_AMBIENT_CLEAR_ALL = 2, 4
_CAPABILITY_VERSION_3 = 0x20080522


@dataclass(frozen=True, slots=True)
class Limits:
    """What one worker process may use."""

    memory_mb: int
    """Address space of each process, and resident memory of the worker with its children."""
    cpu_seconds: int
    """CPU time in the worker's life; the wall clock is the trainer's business."""
    file_mb: int = 256
    processes: int = 64
    network: bool = False
    services: tuple[str, ...] = ()
    """What must not be connected to where the network is declared (`egress.own_services`)."""
    read_paths: tuple[str, ...] = ()
    """Folders that may be read besides the interpreter and the system's libraries."""
    scratch: str = ""
    """The one folder that may be written."""


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, *arguments: int) -> int:
    padded = (*arguments, 0, 0, 0, 0)[:4]
    return int(_libc().prctl(ctypes.c_int(option), *(ctypes.c_ulong(a) for a in padded)))


def _check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def enter_namespaces(network: bool) -> tuple[frozenset[str], str]:
    """Move to fresh user, network, PID and IPC namespaces; children start in the new PID one.

    Returns the namespaces entered and, when there are none, the kernel's reason. Must run while
    the process has a single thread.
    """
    if not sys.platform.startswith("linux"):
        return frozenset(), f"namespaces are a Linux facility, this is {sys.platform}"
    flags = _CLONE_NEWUSER | _CLONE_NEWPID | _CLONE_NEWIPC | (0 if network else _CLONE_NEWNET)
    uid, gid = os.getuid(), os.getgid()
    try:
        _check(_libc().unshare(flags), "unshare")
    except OSError as error:
        # EPERM: Docker's default profile, or a distribution that forbids unprivileged namespaces;
        # ENOSPC: user.max_user_namespaces is 0.
        return frozenset(), f"the host refuses user namespaces ({os.strerror(error.errno or 0)})"
    # Without `deny` a process that is not root may not write its group map. Root without
    # CAP_SETFCAP may not map itself at all; unmapped it has even fewer rights inside.
    with contextlib.suppress(PermissionError):
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    return frozenset({"user", "pid", "ipc"} | (set() if network else {"network"})), ""


def adopt_orphans() -> None:
    """Make this process the parent of its orphaned descendants, so that none is lost sight of."""
    if sys.platform.startswith("linux"):
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def lock_down(
    limits: Limits,
    namespaces: frozenset[str],
    refusal: str,
    *,
    trainer: int,
    supervisor: socket.socket | None = None,
) -> Mapping[str, str]:
    """Apply layers 2 to 6 to this process and its future children; irreversible.

    ``trainer`` is the process that holds the job's credentials; ``supervisor`` the channel to the
    process that answers `connect` where the network is declared. Returns what is contained and how,
    by area, for logs and for people.
    """
    if not sys.platform.startswith("linux"):
        _set_limits(limits, namespaces)
        open_ = f"open ({refusal})"
        return {"network": open_, "files": open_, "credentials": "variables removed only"}
    _check(_prctl(_PR_SET_NO_NEW_PRIVS, 1), "no_new_privs")
    landlock, landlock_refusal = _restrict_files(limits)
    _drop_capabilities()
    _set_limits(limits, namespaces)
    seccomp_refusal = _filter_system_calls(limits.network, own_pids="pid" in namespaces)
    if supervisor is not None:
        network = _declared_report(seccomp_refusal or confine_connections(supervisor))
    else:
        network = _network_report(namespaces, refusal, seccomp_refusal)
    return {
        "network": network,
        "files": f"allow-list (Landlock {landlock})" if landlock else f"open ({landlock_refusal})",
        "credentials": "variables removed; the process that holds them "
        + ("can be read" if _can_read_environment(trainer) else "is out of reach"),
        "processes": "own PID namespace"
        if "pid" in namespaces
        else f"own process group ({refusal})",
    }


def _can_read_environment(process: int) -> bool:
    try:
        with open(f"/proc/{process}/environ", "rb") as variables:
            variables.read(1)
    except OSError:
        return False
    return True


def _declared_report(refusal: str) -> str:
    declared = "allowed, the source declares it"
    if refusal:
        return f"{declared}; the instance's metadata and credentials services too ({refusal})"
    return f"{declared}; not to link-local addresses and the job's own services (seccomp)"


def _network_report(namespaces: frozenset[str], refusal: str, seccomp_refusal: str) -> str:
    if "network" in namespaces:
        return "none (namespace)"
    if not seccomp_refusal:
        return f"none (seccomp; {refusal})"
    return f"open ({refusal}; {seccomp_refusal})"


# --- Landlock ------------------------------------------------------------------------------------

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 1 << 1, 1 << 2, 1 << 3
_TRUNCATE, _IOCTL_DEV = 1 << 14, 1 << 15
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
_ETC = (
    "alternatives", "ca-certificates", "fonts", "group", "host.conf", "hosts", "ld.so.cache",
    "ld.so.conf", "localtime", "mime.types", "nsswitch.conf", "passwd", "pki", "resolv.conf",
    "ssl", "timezone",
)  # fmt: skip


def _readable_paths(limits: Limits) -> list[str]:
    system = ["/usr", "/lib", "/lib64", "/bin", "/sbin", "/proc", "/sys/devices/system"]
    system += ["/sys/fs/cgroup", "/dev/urandom", "/dev/random", "/dev/zero"]
    interpreter = [sys.prefix, sys.base_prefix, os.path.realpath(sys.executable)]
    return [*system, *(f"/etc/{name}" for name in _ETC), *interpreter, *limits.read_paths]


def _restrict_files(limits: Limits) -> tuple[int, str]:
    """Landlock's ABI version in force, or 0 and the reason."""
    libc = _libc()
    abi = libc.syscall(444, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    if abi < 1:
        return 0, f"no Landlock here ({os.strerror(ctypes.get_errno())})"
    rights = (1 << 13) - 1
    rights |= (1 << 13) if abi >= 2 else 0  # REFER
    rights |= _TRUNCATE if abi >= 3 else 0
    rights |= _IOCTL_DEV if abi >= 5 else 0
    tcp = 0b11 if abi >= 4 and not limits.network else 0
    scoped = 0b11 if abi >= 6 else 0  # abstract sockets and signals stay inside
    attributes = struct.pack("=QQQ", rights, tcp, scoped)
    size = 8 if abi < 4 else 16 if abi < 6 else 24
    ruleset = _check(libc.syscall(444, attributes, ctypes.c_size_t(size), 0), "Landlock ruleset")
    read = _EXECUTE | _READ_FILE | _READ_DIR
    _allow(ruleset, _readable_paths(limits), read)
    _allow(ruleset, [limits.scratch], rights & ~_IOCTL_DEV)
    _allow(ruleset, ["/dev/null"], _READ_FILE | _WRITE_FILE | (rights & _TRUNCATE))
    _check(libc.syscall(446, ruleset, 0), "Landlock restrict")
    os.close(ruleset)
    return int(abi), ""


def _allow(ruleset: int, paths: Sequence[str], rights: int) -> None:
    for path in paths:
        try:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # the list names places of several distributions
        granted = rights if os.path.isdir(path) else rights & _FILE_RIGHTS
        rule = struct.pack("=Qi", granted, fd)
        _check(_libc().syscall(445, ruleset, 1, rule, 0), f"Landlock rule for {path}")
        os.close(fd)


# --- capabilities and limits ---------------------------------------------------------------------


def _drop_capabilities() -> None:
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    for capability in range(64):
        # Fails with EPERM for a user without capabilities, who has none to drop.
        if _prctl(_PR_CAPBSET_DROP, capability) < 0:
            break
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    _check(_libc().capset(header, struct.pack("=6I", 0, 0, 0, 0, 0, 0)), "capset")


def _set_limits(limits: Limits, namespaces: frozenset[str]) -> None:
    mebibyte = 1024 * 1024
    wanted = {
        resource.RLIMIT_AS: limits.memory_mb * mebibyte,
        resource.RLIMIT_CPU: limits.cpu_seconds,
        resource.RLIMIT_FSIZE: limits.file_mb * mebibyte,
        resource.RLIMIT_CORE: 0,
    }
    if "user" in namespaces:
        # Outside a user namespace this would count every process and thread of the trainer's user.
        wanted[resource.RLIMIT_NPROC] = limits.processes
    for kind, value in wanted.items():
        hard = resource.getrlimit(kind)[1]
        ceiling = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (ceiling, ceiling))


# --- seccomp -------------------------------------------------------------------------------------

_DENIED = {
    "x86_64": {
        "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312,
        "bpf": 321, "perf_event_open": 298, "mount": 165, "umount2": 166, "pivot_root": 155,
        "chroot": 161, "unshare": 272, "setns": 308, "add_key": 248, "request_key": 249,
        "keyctl": 250, "userfaultfd": 323, "open_by_handle_at": 304, "init_module": 175,
        "finit_module": 313, "delete_module": 176, "kexec_load": 246, "memfd_create": 319,
        "shmget": 29,
    },
    "aarch64": {
        "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272,
        "bpf": 280, "perf_event_open": 241, "mount": 40, "umount2": 39, "pivot_root": 41,
        "chroot": 51, "unshare": 97, "setns": 268, "add_key": 217, "request_key": 218,
        "keyctl": 219, "userfaultfd": 282, "open_by_handle_at": 265, "init_module": 105,
        "finit_module": 273, "delete_module": 106, "kexec_load": 104, "memfd_create": 279,
        "shmget": 194,
    },
}  # fmt: skip
_DENIED_EVERYWHERE = (425, 428, 429, 430, 431, 432, 433, 438, 442, 447)
"""io_uring_setup, the new mount calls, pidfd_getfd and memfd_secret, numbered alike on all
architectures."""
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_SOCKET = {"x86_64": 41, "aarch64": 198}
_CLONE = {"x86_64": 56, "aarch64": 220}
_NEW_SESSION = {"x86_64": (112, 109), "aarch64": (157, 154)}
"""setsid and setpgid."""
_CLONE3 = 435

_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_KILL, _ERRNO, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000


def _program(machine: str, network: bool, own_pids: bool) -> bytes:
    """The classic BPF program; offsets 0, 4 and 16 are the number, architecture, argument 0."""
    code: list[tuple[int, int, int, int]] = [
        (_LOAD, 0, 0, 4),
        (_JUMP_EQUAL, 1, 0, _AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, _KILL),  # 32-bit calls have other numbers and would slip through
        (_LOAD, 0, 0, 0),
    ]
    if machine == "x86_64":  # the x32 calls as well
        code += [(_JUMP_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, _ERRNO | errno.EPERM)]

    def answer(number: int, code_errno: int) -> None:
        code.extend([(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | code_errno)])

    for number in (*_DENIED[machine].values(), *_DENIED_EVERYWHERE):
        answer(number, errno.EPERM)
    answer(_CLONE3, errno.ENOSYS)  # its flags are behind a pointer; libc then uses clone
    if not network:
        answer(_SOCKET[machine], errno.EACCES)
    if not own_pids:
        # Descendants must stay in the process group that is killed at the deadline. Pretending
        # success keeps `subprocess.run(..., start_new_session=True)` working.
        for number in _NEW_SESSION[machine]:
            answer(number, 0)
    code += [
        (_JUMP_EQUAL, 0, 3, _CLONE[machine]),
        (_LOAD, 0, 0, 16),
        (_JUMP_ANY_BIT, 0, 1, _NAMESPACE_FLAGS),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def _filter_system_calls(network: bool, *, own_pids: bool) -> str:
    """Install the filter for good. Returns the reason where it could not be, else ''."""
    machine = platform.machine()
    if machine not in _AUDIT_ARCH:
        return f"no system call table for {machine}"
    program = _program(machine, network, own_pids)
    buffer = ctypes.create_string_buffer(program, len(program))

    class Prog(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    descriptor = Prog(len(program) // 8, ctypes.addressof(buffer))
    result = _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(descriptor))
    return "" if result == 0 else f"seccomp refused ({os.strerror(ctypes.get_errno())})"
