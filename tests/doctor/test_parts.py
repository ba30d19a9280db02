"""What the doctor reads from files and other programs' output, from samples: cgroups, nvidia-smi, command lines."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from collectives.doctor import launching
from collectives.doctor.cgroups import cpu_quota, folders, memory_limit, oom_kills, process_limit
from collectives.doctor.cores import check_cores
from collectives.doctor.gpus import check_gpus, parse_query, parse_topology
from collectives.doctor.launching import check_launcher
from collectives.doctor.limits import check_limits
from collectives.doctor.memory import check_memory
from collectives.doctor.probe import Outcome, run_command, start_python
from collectives.doctor.self_test import check_self_test, expected_seconds
from collectives.requirements import is_doctor

MIB = 1 << 20


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def second_version(root: Path) -> str:
    group = "sys/fs/cgroup/job/step"
    write(root, **{
        "proc/self/cgroup": "0::/job/step",
        "proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw",
        "proc/meminfo": "MemTotal: 64000000 kB\nMemAvailable: 60000000 kB",
        f"{group}/memory.max": "max", f"{group}/memory.high": "max", f"{group}/memory.current": "1000",
        f"{group}/memory.events": "oom 3\noom_kill 2", f"{group}/cpu.max": "max 100000", f"{group}/pids.max": "max",
        "sys/fs/cgroup/job/memory.max": str(800 * MIB), "sys/fs/cgroup/job/memory.current": str(700 * MIB),
        "sys/fs/cgroup/job/memory.stat": f"anon 5\ninactive_file {300 * MIB}\nactive_file {100 * MIB}",
        "sys/fs/cgroup/job/cpu.max": "150000 100000", "sys/fs/cgroup/job/cpu.stat": "nr_periods 9\nnr_throttled 7",
        "sys/fs/cgroup/job/pids.max": "100", "sys/fs/cgroup/job/pids.current": "90",
    })  # fmt: skip
    return str(root)


def first_version(root: Path) -> str:
    write(root, **{
        "proc/self/cgroup": "9:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/",
        # In a container the group itself is mounted.
        "proc/self/mountinfo": "31 23 0:27 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
                               "32 23 0:28 /docker/abc /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(512 * MIB),
        "sys/fs/cgroup/memory/memory.usage_in_bytes": str(500 * MIB),
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "50000", "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
    })  # fmt: skip
    return str(root)


def test_limits_of_a_group_above_bind_in_version_2(tmp_path):
    root = second_version(tmp_path)
    assert [Path(each).name for each in folders("memory", root)] == ["step", "job", "cgroup"]
    limit, quota, pids = memory_limit(root), cpu_quota(root), process_limit(root)
    assert (limit.limit, limit.used) == (800 * MIB, 300 * MIB) and limit.path.endswith("cgroup/job/memory.max")
    assert (quota.limit, quota.used) == (1.5, 7) and (pids.limit, pids.used) == (100, 90)
    assert oom_kills(root) == 2
    found = {each.name: each for each in check_memory(root)}
    assert found["memory"].values["free"] == 500 * MIB
    assert found["memory.free"].status == "warning" and "job/memory.max" in found["memory.free"].text
    assert found["memory.oom"].status == "warning"
    assert "cores.quota" in {each.name for each in check_cores(2, root)}
    assert "limits.pids" in {each.name for each in check_limits(root)}


def test_version_1_in_a_container(tmp_path):
    root = first_version(tmp_path)
    assert memory_limit(root).limit == 512 * MIB and cpu_quota(root).limit == 0.5 and process_limit(root) is None
    found = {each.name: each for each in check_cores(1, root)}
    assert found["cores"].values["quota"] == 0.5 and "cores.quota" in found


def test_files_that_cannot_be_read_and_names_of_any_bytes(tmp_path):
    root = second_version(tmp_path)
    with open(tmp_path / "proc/self/mountinfo", "ab") as file:
        file.write(b"31 23 0:27 / /mnt/\xe9t\xe9 rw - ext4 /dev/sda rw\n")
    assert memory_limit(root).limit == 800 * MIB
    (found,) = check_memory(str(tmp_path / "nothing"))
    assert found.status == "ok" and found.values["free"] is None and "can't be read" in found.text


@pytest.mark.parametrize(("address", "status"), [("127.0.0.1", "error"), ("localhost", "error"), ("node0", None)])
def test_a_master_that_each_node_takes_for_itself(monkeypatch, address, status):
    """A host's own name is often 127.0.1.1 on that host, and its real address on the others."""
    here = Outcome({"addresses": ["127.0.1.1"]})
    monkeypatch.setattr(launching, "start_python", lambda *_: SimpleNamespace(wait=lambda: here))
    env = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": address}
    found = {each.name: each.status for each in check_launcher({**env, "MASTER_PORT": "29500"})}
    assert found["launcher"] == "ok" and found.get("launcher.master") == status


def test_no_limit_is_none(tmp_path):
    write(tmp_path, **{
        "proc/self/cgroup": "4:memory:/",
        "proc/self/mountinfo": "31 2 0:2 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2**63 - 4096),
    })  # fmt: skip
    assert memory_limit(str(tmp_path)) is None and cpu_quota(str(tmp_path)) is None
    assert memory_limit(str(tmp_path / "nothing")) is None


TOPOLOGY = """\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\tPXB\t0-31\t0
GPU1\tNV18\t X \tPHB\tSYS\t0-31\t0
GPU2\tSYS\tPHB\t X \tSYS\t32-63\t1
NIC0\tPXB\tSYS\tSYS\t X

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks
"""
QUERY = """0, NVIDIA H100 80GB HBM3, 81559, 4, 550.54.15, Default, Disabled, 5, 16
1, NVIDIA H100 80GB HBM3, 81559, 4, 550.54.15, Prohibited, Enabled, 5, 16
2, NVIDIA H100 80GB HBM3, 81559, 4, 550.54.15, Default, Disabled, 5, 16
"""


def test_nvidia_smis_tables_are_read():
    assert parse_topology(TOPOLOGY) == {"GPU0-GPU1": "NV18", "GPU0-GPU2": "SYS", "GPU1-GPU2": "PHB"}
    assert parse_query(QUERY)[1]["compute_mode"] == "Prohibited"
    assert parse_topology("") == {} and parse_query("") == []


def test_gpus_by_nvidia_smi(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nif [ $1 = topo ]; then cat <<'E'\n{TOPOLOGY}E\nelse cat <<'E'\n{QUERY}E\nfi\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found = {each.name: each for each in check_gpus(Outcome({"devices": [], "torch": {"cuda": None}}))}
    assert set(found) == {"gpus", "gpus.torch", "gpus.compute_mode", "gpus.mig"}
    assert found["gpus"].values["links"]["GPU0-GPU1"] == "NV18" and "550.54.15" in found["gpus"].text
    assert found["gpus.compute_mode"].remedy == "sudo nvidia-smi -i 1 -c DEFAULT"


def test_without_nvidia_smi_there_is_no_error(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    (found,) = check_gpus(Outcome({"devices": [], "torch": {"cuda": None}}))
    assert found.status == "ok" and "nvidia-smi is not installed" in found.text


def test_a_probe_that_hangs_ends_with_its_stack():
    outcome = start_python("emit(stage='sleep')\nimport time\ntime.sleep(100)", 1).wait()
    assert outcome.error == "not done within 1 s" and outcome.values == {"stage": "sleep"}
    assert "Thread" in outcome.output or "most recent call first" in outcome.output


def test_a_probe_that_crashes_names_the_signal():
    outcome = start_python("import os\nemit(stage='crash')\nos.kill(os.getpid(), 11)", 30).wait()
    assert outcome.error == "the process was killed by signal 11" and "Segmentation fault" in outcome.output


def test_a_probe_that_the_kernel_kills_is_not_late():
    outcome = start_python("import os\nemit(stage='open')\nos.kill(os.getpid(), 9)", 30).wait()
    assert outcome.error == "the process was killed by signal 9"
    (found,) = check_self_test("host", [outcome, Outcome(error="RemoteError: rank 0 has ended")], False)
    assert "(SIGKILL)" in found.text and found.remedy == "dmesg -T | grep -i 'killed process'"


def test_commands_that_fail_or_hang():
    assert run_command(["printf", r"\377"], 10) == ("\ufffd", "")
    assert run_command(["sh", "-c", "echo no >&2; exit 3"], 10) == (None, "sh: no")
    assert run_command(["sleep", "100"], 0.3) == (None, "sleep has not ended within 0.3 s")


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("python -m collectives.doctor --json", True),
        ("python -u -X faulthandler -m collectives.doctor", True),
        ("python -mcollectives.doctor", True),
        ("python -um collectives.doctor", True),
        ("python -IXdev -Wignore -W error -mcollectives.doctor", True),
        ("python -um collectives.run", False),
        ("python -m collectives.run -n 2 -m collectives.doctor", False),
        ("python program.py -m collectives.doctor", False),
        ("python -m", False),
        ("python", False),
    ],
)
def test_pythons_command_line(words, found):
    assert is_doctor(words.split()) is found


def test_a_slow_result_is_a_warning_with_a_reason():
    assert [expected_seconds(1, ranks, 1.0) for ranks in (1, 2, 4)] == [0, 2.5, 2.625]
    times = {"1024": 2e-3, str(25 * MIB): 0.4}
    values = {"size": 2, "nodes": 1, "times": times, "copy": 0.04, "cores": [[0], [0]], "stage": ""}
    found = {each.name: each for each in check_self_test("host", [Outcome(values), Outcome({"stage": ""})], False)}
    assert {each.status for each in found.values()} == {"ok", "warning"}
    assert "4.0 times" in found["self_test.host.bandwidth"].text
    assert all("share a core" in found[f"self_test.host.{name}"].text for name in ("bandwidth", "latency"))
