"""``python -m collectives.doctor`` as a command, on this machine and where something is really wrong."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from collectives.doctor.engines import examine_gpus
from collectives.doctor.findings import Section, make_section
from collectives.doctor.limits import cgroup_limits, examine_memory
from collectives.doctor.variables import examine_variables
from tests.launching import ROOT, clean_environment, torchrun

LIMIT_S = 150
DOCTOR = [sys.executable, "-m", "collectives.doctor"]
PARTS = ["installation", "engines", "gpus", "cores", "memory", "variables"]


def run(command, folder, **variables):
    env = clean_environment(**variables)
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=env, cwd=folder)


def examined(folder, *words, command=DOCTOR, **variables):
    """The report as an object, and the exit status."""
    done = run([*command, "--json", *words], folder, **variables)
    assert done.returncode in (0, 1), done.stderr
    report = json.loads(done.stdout)
    assert (report["status"] == "error") == (done.returncode == 1)
    assert all(finding["text"] and finding["remedy"] for finding in report["findings"])
    return report


def findings(report, section=None):
    return [each for each in report["findings"] if section in (None, each["section"])]


def test_the_whole_report_with_the_self_test(tmp_path):
    done = run(DOCTOR, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if line and line[0] != " "] == [*PARTS, "self-test", "found"]
    assert any(line.split()[:2] == ["used", "host"] for line in lines)
    for what in ("all-reduce of 1 KiB", "all-reduce of 25 MiB", 'init_process_group("collectives")', "Gloo"):
        assert any(line.strip().startswith(what) and re.search(r"\d [um]s", line) for line in lines), what
    assert "by this machine's copies about" in done.stdout and "\033" not in done.stdout


def test_under_a_launcher_its_ranks_make_the_test_and_one_prints(tmp_path):
    done = run(torchrun(2, "-m", "collectives.doctor", "--json"), tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)  # one object: rank 1 prints nothing
    assert report["sections"]["self-test"]["ranks"] == "2, engine host"
    assert report["sections"]["variables"]["launcher"] == "torchrun: rank 0 of 2"
    assert not [each for each in findings(report) if each["status"] == "error"]


def test_variables(monkeypatch):
    for name, value in {"ALGORITHMS": "ring", "JOB_ID": "a"}.items():
        monkeypatch.setenv(f"COLLECTIVES_{name}", value)
    for name, value in {"SLURM_NTASKS": "4", "NCCL_DEBUG": "INFO", "NCCL_MY_TOKEN": "s3cret"}.items():
        monkeypatch.setenv(name, value)
    section = make_section("variables", examine_variables)
    assert section.values["COLLECTIVES_ALGORITHMS"] == "ring" and section.values["NCCL_DEBUG"] == "INFO"
    assert "s3cret" not in str(section)
    unknown, alone = section.findings
    assert unknown.remedy == "unset COLLECTIVES_ALGORITHMS; export COLLECTIVES_ALGORITHM=..."
    assert "srun did not start this process" in alone.text
    monkeypatch.delenv("COLLECTIVES_ALGORITHMS")
    monkeypatch.setenv("RANK", "1")
    (found,) = make_section("variables", examine_variables).findings
    assert found.status == "error" and "WORLD_SIZE" in found.text


def test_an_engine_that_is_not_there(tmp_path):
    report = examined(tmp_path, COLLECTIVES_HOST_LIBRARY=str(tmp_path / "none.so"))
    assert "no such file" in report["sections"]["engines"]["host"]
    errors = {each["section"]: each for each in findings(report) if each["status"] == "error"}
    assert errors["engines"]["remedy"] == "unset COLLECTIVES_HOST_LIBRARY"
    assert "no such file" in report["sections"]["self-test"]["output"] and "self-test" in errors


def test_an_installation_that_is_not_whole(tmp_path):
    """The package without its extensions: what the import says leads to the program that says the rest."""
    copy = tmp_path / "site" / "collectives"
    shutil.copytree(Path(ROOT, "collectives"), copy, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    # -S: no finder of an editable installation, which would find the extensions elsewhere.
    env = clean_environment() | {"PYTHONPATH": f"{copy.parent}:{sysconfig.get_paths()['purelib']}"}
    command = [sys.executable, "-S", "-c", "import collectives"]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
    program = copy / "doctor" / "__main__.py"
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: No module named 'collectives._nccl'") and f"python {program}" in last
    done = subprocess.run(
        [sys.executable, "-S", str(program), "--json"], env=env, cwd=tmp_path, capture_output=True, text=True,
        timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    texts = [each["text"] for each in findings(report, "installation") if each["status"] == "error"]
    assert any("_nccl and _kernels are not built" in text for text in texts)
    assert any("the host engine's library is missing" in text for text in texts)
    assert any("import collectives fails" in text for text in texts)
    assert list(report["sections"])[: len(PARTS)] == PARTS and "left out" in report["sections"]["self-test"]


def test_without_torch(tmp_path):
    """Neither torch nor site-packages: the program itself needs the standard library alone."""
    program = Path(ROOT, "collectives", "doctor", "__main__.py")
    done = subprocess.run(
        [sys.executable, "-S", str(program), "--json"], env={"PATH": os.environ["PATH"]}, cwd=tmp_path,
        capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    report = json.loads(done.stdout)
    assert done.returncode == 1 and any(each["remedy"] == "pip install torch" for each in findings(report))


def test_one_core_and_few_files(tmp_path):
    report = examined(tmp_path, "--no-test", command=["prlimit", "--nofile=200", "taskset", "-c", "0", *DOCTOR])
    assert "ranks take turns" in findings(report, "cores")[0]["text"]
    (files,) = findings(report, "memory")
    assert files["remedy"].startswith("ulimit -n") and report["sections"]["memory"]["ulimit, open files"] == 200


def write(folder: Path, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_in_", ".limit_in_").replace("__", ".")).write_text(text)


@pytest.mark.parametrize("nested", [False, True])
def test_control_groups_of_version_2(tmp_path, nested):
    """The group with the least left counts, this process's own or one above it."""
    proc = tmp_path / "proc" / "self"
    write(proc, mountinfo="30 20 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n", cgroup="0::/job/step\n")
    top = tmp_path / "sys" / "fs" / "cgroup"
    write(top / "job", memory__max=f"{8 << 30}\n", memory__current=f"{1 << 30}", cpu__max="150000 100000")
    inner = str(2 << 30) if nested else "max"
    write(top / "job" / "step", memory__max=inner, memory__current=str(512 << 20), cpu__max="max 100000")
    found = cgroup_limits(str(tmp_path))
    assert found["cpus"] == 1.5
    wanted = (2 << 30, 512 << 20, top / "job" / "step") if nested else (8 << 30, 1 << 30, top / "job")
    assert (found["memory"], found["memory_used"], Path(found["group"])) == wanted


def test_control_groups_of_version_1(tmp_path):
    mounts = (
        "31 20 0:27 /docker/x /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
        "32 20 0:28 /docker/x /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
    )
    write(
        tmp_path / "proc" / "self", mountinfo=mounts, cgroup="5:memory:/docker/x\n4:cpu,cpuacct:/docker/x\n0::/\n"
    )
    memory, cpu = (tmp_path / "sys" / "fs" / "cgroup" / name for name in ("memory", "cpu"))
    for folder, files in (
        (memory, {"memory.limit_in_bytes": str(256 << 20), "memory.usage_in_bytes": str(200 << 20)}),
        (cpu, {"cpu.cfs_quota_us": "50000", "cpu.cfs_period_us": "100000"}),
    ):
        folder.mkdir(parents=True)
        for name, text in files.items():
            (folder / name).write_text(text)
    found = cgroup_limits(str(tmp_path))
    assert (found["memory"], found["memory_used"], found["cpus"]) == (256 << 20, 200 << 20, 0.5)
    section = Section("memory")
    examine_memory(section, str(tmp_path))
    assert any("the control group has 56 MiB left" in each.text for each in section.findings)


def test_gpus_as_nvidia_smi_reports_them(tmp_path, monkeypatch):
    """What the tool prints, not a GPU: the parsing alone."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\n"
        'case "$1" in --query-gpu=*)\n'
        "echo '0, NVIDIA H100, 81559 MiB, 4 MiB, 580.1, Default, Disabled, 5, 16'\n"
        "echo '1, NVIDIA H100, 81559 MiB, 4 MiB, 580.1, Prohibited, Disabled, 5, 16';;\n"
        "*) echo 'GPU0 X NV18';; esac\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    section = make_section("gpus", examine_gpus)
    gpus = section.values
    assert gpus["gpus"] == 2 and gpus["gpu 0"].startswith("NVIDIA H100, 81559 MiB") and gpus["links"] == "GPU0 X NV18"
    (found,) = section.findings
    assert found.remedy == "nvidia-smi -i 1 -c DEFAULT"
    tool.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed because it could not reach the driver.'; exit 9\n")
    (found,) = make_section("gpus", examine_gpus).findings
    assert found.status == "error"
