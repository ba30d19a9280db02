"""The kernel's functions that the host engine needs, each tried once."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import re
import socket
import struct

from .cgroups import read_text
from .finding import ERROR, OK, WARNING, Finding

__all__ = ["check_system"]

_SYS_FUTEX = {"x86_64": 202, "aarch64": 98, "ppc64le": 221, "riscv64": 98, "s390x": 238}
_FUTEX_WAKE = 1
_SECCOMP = {"0": "off", "1": "strict", "2": "filter"}


def _try_memfd() -> None:
    descriptor = os.memfd_create("collectives-doctor")
    try:
        os.posix_fallocate(descriptor, 0, mmap.PAGESIZE)
        with mmap.mmap(descriptor, mmap.PAGESIZE) as shared:
            shared[0] = 1
    finally:
        os.close(descriptor)


def _try_pidfd() -> None:
    os.close(os.pidfd_open(os.getpid()))


def _try_futex() -> None:
    number = _SYS_FUTEX.get(platform.machine())
    if number is None:
        return
    libc, word = ctypes.CDLL(None, use_errno=True), ctypes.c_uint32(0)
    if libc.syscall(ctypes.c_long(number), ctypes.byref(word), _FUTEX_WAKE, 1, None, None, 0) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _try_socket() -> None:
    """Pass a descriptor over an abstract socket, with the peer's uid, as ranks do."""
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind("")  # the kernel chooses a free abstract name
        server.listen(1)
        client.connect(server.getsockname())
        with server.accept()[0] as other:
            _, uid, _ = struct.unpack("3i", other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if uid != os.getuid():
                raise OSError(errno.EPERM, f"SO_PEERCRED gives uid {uid} for this process's own {os.getuid()}")
            socket.send_fds(client, [b"x"], [client.fileno()])
            for descriptor in socket.recv_fds(other, 1, 1)[1]:
                os.close(descriptor)


_FUNCTIONS = {
    "memfd_create": (_try_memfd, ERROR, "the ranks' shared memory"),
    "futex": (_try_futex, ERROR, "waits that sleep"),
    "abstract_socket": (_try_socket, ERROR, "how ranks connect"),
    "pidfd_open": (_try_pidfd, WARNING, "how a dead rank is seen at once, and the benchmark's wait"),
}


def check_system() -> list[Finding]:
    """Try each function of the kernel; a refused one is mostly a container's seccomp profile."""
    status = re.search(r"^Seccomp:\s*(\d)", read_text("/proc/self/status") or "", re.MULTILINE)
    seccomp = _SECCOMP.get(status[1], status[1]) if status else "unknown"
    values: dict = {
        "system": platform.system(), "kernel": platform.release(), "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()), "seccomp": seccomp,
    }  # fmt: skip
    text = f"{values['system']} {values['kernel']}, {values['machine']}, {values['libc']}, seccomp {seccomp}"
    found = [Finding("system", OK, text, values=values)]
    if values["system"] != "Linux":
        found.append(
            Finding(
                "system.linux", ERROR, "the host engine needs Linux's memfd, pidfd and futex",
                "docker run -it --rm python:3.12 bash   # or another Linux",
            )
        )  # fmt: skip
        return found
    for name, (function, gravity, use) in _FUNCTIONS.items():
        try:
            function()
            values[name] = "ok"
        except OSError as error:
            values[name] = str(error)
            remedy = "docker run --security-opt seccomp=unconfined ...   # or a newer Docker, whose profile allows it"
            if error.errno in (errno.EMFILE, errno.ENFILE):
                remedy = "ulimit -Sn 65536"
            elif error.errno == errno.ENOSYS and seccomp == "off":
                remedy = "uname -r   # Linux 5.3 or newer has it"
            found.append(Finding(f"system.{name}", gravity, f"{name} fails ({error}): {use} needs it", remedy))
    return found
