"""The host engine's look at free memory: of the control groups that limit a process, the least room counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.host_parts import call_part

MIB = 1 << 20
NO_LIMIT = 2**64 - 1


def room(root: Path, files: dict[str, str]) -> int:
    """Return the bytes that the engine finds below a folder that stands for ``/``, with these files."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return int(call_part("room", [(str(root), "")])[0])


SECOND = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw"


@pytest.mark.parametrize("limited", ["", "slurm", "slurm/job/step"])
def test_a_nested_group_of_version_2(tmp_path, limited):
    """The limit binds wherever it is set; what the kernel can free is not used, and memory.high ends nobody."""
    groups = ["", "slurm", "slurm/job", "slurm/job/step"]
    files = {"proc/self/cgroup": "0::/slurm/job/step", "proc/self/mountinfo": SECOND}
    for group in groups[1:]:
        files[f"sys/fs/cgroup/{group}/memory.max"] = "max"
        files[f"sys/fs/cgroup/{group}/memory.high"] = str(MIB)
        files[f"sys/fs/cgroup/{group}/memory.current"] = str(100 * MIB)
    if limited:
        files[f"sys/fs/cgroup/{limited}/memory.max"] = str(120 * MIB)
        files[f"sys/fs/cgroup/{limited}/memory.stat"] = (
            f"anon 1\ninactive_file {30 * MIB}\nactive_file {2 * MIB}\nslab_reclaimable {MIB}"
        )
    assert room(tmp_path, files) == (53 * MIB if limited else NO_LIMIT)


@pytest.mark.parametrize(("path", "mounted"), [("/a/b", "/"), ("/docker/abc", "/docker/abc"), ("/../other", "/")])
def test_groups_of_version_1(tmp_path, path, mounted):
    """A container may see its own group mounted, and a path that leads out of its namespace."""
    files = {
        "proc/self/cgroup": f"9:cpu,cpuacct:/elsewhere\n4:memory:{path}\n0::/",
        "proc/self/mountinfo": f"31 2 0:2 {mounted} /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n"
        "32 2 0:3 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(512 * MIB),
        "sys/fs/cgroup/memory/memory.usage_in_bytes": str(500 * MIB),
        "sys/fs/cgroup/memory/memory.stat": f"inactive_file 7\ntotal_inactive_file {88 * MIB}",
        "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": str(2**63 - 4096),
        "sys/fs/cgroup/memory/a/b/memory.usage_in_bytes": str(9 * MIB),
        "sys/fs/cgroup/cpu/elsewhere/memory.limit_in_bytes": "1",
    }
    assert room(tmp_path, files) == 100 * MIB


def test_files_that_are_missing_or_strange(tmp_path):
    assert room(tmp_path, {}) == NO_LIMIT
    files = {
        "proc/self/cgroup": "nonsense\n0::/job\n4:memory",
        "proc/self/mountinfo": f"short\n{SECOND}\n1 - cgroup2",
        "sys/fs/cgroup/job/memory.max": "-5",
        "sys/fs/cgroup/memory.max": str(MIB),
    }
    assert room(tmp_path, files) == MIB  # no memory.current: nothing is used
    job = {"memory.max": str(3 * MIB), "memory.current": str(4 * MIB)}
    assert room(tmp_path, {f"sys/fs/cgroup/job/{name}": text for name, text in job.items()}) == 0
