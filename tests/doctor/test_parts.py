"""What the doctor reads from files and other programs' output, from samples: a quota, nvidia-smi, command lines."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from collectives.doctor import launching
from collectives.doctor.launching import check_launcher
from collectives.doctor.node import check_cores, check_gpus, check_memory, parse_topology
from collectives.doctor.probe import Outcome, Probe, run_command
from collectives.doctor.self_test import check_self_test
from collectives.requirements import is_doctor

MIB = 1 << 20


def test_the_lowest_quota_of_a_group_and_those_above(tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/elsewhere\n0::/job/step\n")
    for group, text in (("job/step", "max 100000"), ("job", "150000 100000"), ("", "400000 100000")):
        folder = tmp_path / "sys/fs/cgroup" / group
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cpu.max").write_text(f"{text}\n")
    found = {each.name: each for each in check_cores(2, str(tmp_path))}
    assert found["cores"].values["quota"] == 1.5 and found["cores.quota"].status == "warning"
    assert found["cores"].values["quota_file"].endswith("cgroup/job/cpu.max")
    assert check_cores(1, str(tmp_path / "nothing"))[0].values["quota"] is None


def test_little_memory():
    for free, status in ((None, None), (2 << 30, None), (500 * MIB, "warning"), (100 * MIB, "error")):
        found = {each.name: each.status for each in check_memory(Outcome({"free_memory": free}))}
        assert found["memory"] == "ok" and found.get("memory.free") == status


@pytest.mark.parametrize(("address", "status"), [("127.0.0.1", "error"), ("localhost", "error"), ("node0", None)])
def test_a_master_that_each_node_takes_for_itself(monkeypatch, address, status):
    """A host's own name is often 127.0.1.1 on that host, and its real address on the others."""
    here = Outcome({"addresses": ["127.0.1.1"]})
    monkeypatch.setattr(launching, "Probe", lambda *_: SimpleNamespace(wait=lambda: here))
    env = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": address}
    found = {each.name: each.status for each in check_launcher({**env, "MASTER_PORT": "29500"})}
    assert found["launcher"] == "ok" and found.get("launcher.master") == status


TOPOLOGY = """\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\tPXB\t0-31\t0
GPU1\tNV18\t X \tPHB\tSYS\t0-31\t0
GPU2\tSYS\tPHB\t X \tSYS\t32-63\t1
NIC0\tPXB\tSYS\tSYS\t X

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks
"""
QUERY = """0, 550.54.15, Default, Disabled
1, 550.54.15, Prohibited, Enabled
2, 550.54.15, Default, Disabled
"""


def test_nvidia_smis_links_are_read():
    assert parse_topology(TOPOLOGY) == {"GPU0-GPU1": "NV18", "GPU0-GPU2": "SYS", "GPU1-GPU2": "PHB"}
    assert parse_topology("") == {}


def test_gpus_by_nvidia_smi(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nif [ $1 = topo ]; then cat <<'E'\n{TOPOLOGY}E\nelse cat <<'E'\n{QUERY}E\nfi\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found = {each.name: each for each in check_gpus(Outcome({"devices": [], "torch": {"cuda": None}}))}
    assert set(found) == {"gpus", "gpus.torch", "gpus.compute_mode", "gpus.mig"}
    assert found["gpus"].values["links"]["GPU0-GPU1"] == "NV18" and "GPU1-GPU2 PHB" in found["gpus"].text
    assert found["gpus.compute_mode"].remedy == "sudo nvidia-smi -i 1 -c DEFAULT"


def test_without_nvidia_smi_there_is_no_error(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    (found,) = check_gpus(Outcome({"devices": [], "torch": {"cuda": None}}))
    assert found.status == "ok" and "nvidia-smi is not installed" in found.text


def test_a_probe_that_hangs_ends_with_its_stack():
    outcome = Probe("emit(stage='sleep')\nimport time\ntime.sleep(100)", 1).wait()
    assert outcome.error == "not done within 1 s" and outcome.values == {"stage": "sleep"}
    assert "Thread" in outcome.output or "most recent call first" in outcome.output


def test_a_probe_that_crashes_names_the_signal():
    outcome = Probe("import os\nemit(stage='crash')\nos.kill(os.getpid(), 11)", 30).wait()
    assert outcome.error == "the process was killed by signal 11" and "Segmentation fault" in outcome.output


def test_a_probe_that_the_kernel_kills_is_not_late():
    outcome = Probe("import os\nemit(stage='open')\nos.kill(os.getpid(), 9)", 30).wait()
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


def test_a_slow_result_is_a_warning():
    big = str(25 * MIB)
    values = {"size": 2, "nodes": 1, "times": {"1024": 2e-5, big: 0.4}, "gloo": {"1024": 1e-4, big: 0.2}, "stage": ""}
    found = check_self_test("host", [Outcome(values), Outcome({"stage": ""})], False)
    assert [(each.name, each.status) for each in found] == [
        ("self_test.host", "ok"),
        ("self_test.host.slow", "warning"),
    ]
