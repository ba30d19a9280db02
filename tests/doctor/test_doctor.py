"""`python -m collectives.doctor` as a user runs it: on a sound install, and on broken ones that are made for real."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.launching import clean_environment, torchrun

ROOT = Path(__file__).resolve().parents[2]
DOCTOR = [sys.executable, "-m", "collectives.doctor"]
BY_PATH = [sys.executable, str(ROOT / "collectives" / "doctor" / "__main__.py")]
LIMIT_S = 170
CHECKS = "python package torch engine gpus cores memory limits variables launcher".split()


class Report:
    """What one run printed, of the form that `--json` prints."""

    def __init__(self, command, *words, cwd="/", without=(), preexec=None, **variables):
        env = {name: value for name, value in clean_environment(**variables).items() if name not in without}
        done = subprocess.run(
            [*command, "--json", *words], env=env, cwd=cwd, capture_output=True, text=True, timeout=LIMIT_S,
            preexec_fn=preexec,
        )  # fmt: skip
        self.code, self.err = done.returncode, done.stderr
        assert done.stdout.startswith("{"), done.stdout + done.stderr
        self.json = json.loads(done.stdout)
        self.findings = {each["name"]: each for each in self.json["findings"]}
        assert len(self.findings) == len(self.json["findings"])
        statuses = {each["status"] for each in self.json["findings"]}
        assert self.json["status"] == next(each for each in ("error", "warning", "ok") if each in statuses)
        assert self.code == (self.json["status"] == "error")
        assert all(bool(each["remedy"]) == (each["status"] != "ok") for each in self.json["findings"])
        assert not any("\n" in each["remedy"] for each in self.json["findings"])

    def status(self, name: str) -> str | None:
        return self.findings[name]["status"] if name in self.findings else None

    @property
    def errors(self) -> set[str]:
        return {name for name in self.findings if self.status(name) == "error"}


@pytest.fixture(scope="module")
def sound():
    secret = {"COLLECTIVES_AUTH_TOKEN": "s3cr3t", "NCCL_API_KEY": "s3cr3t", "UNRELATED": "s3cr3t"}
    return Report(DOCTOR, COLLECTIVES_HOST_CHUNKS="4096", SLURM_NTASKS="4", **secret)


def test_a_sound_install_has_no_error(sound):
    assert sound.errors == set() and sound.code == 0
    assert [name for name in sound.findings if name in CHECKS] == CHECKS
    assert sound.findings["engine"]["values"]["chosen"] == "host"
    engines = {each["name"]: each for each in sound.findings["engine"]["values"]["engines"]}
    assert engines["host"]["available"]
    assert sound.findings["cores"]["values"]["cpus"] == sorted(os.sched_getaffinity(0))
    assert 0 < sound.findings["memory"]["values"]["free"] < 1 << 50


def test_the_self_test_is_of_two_ranks_beside_gloo(sound):
    values = sound.findings["self_test.host"]["values"]
    assert (values["ranks"], values["nodes"], values["launched"]) == (2, 1, False)
    for key in ("times", "c10d", "gloo"):
        assert 0 < values[key]["1024"] < values[key][str(25 << 20)]


def test_an_unknown_variable_has_the_name_that_it_resembles(sound):
    assert sound.status("variables.COLLECTIVES_HOST_CHUNKS") == "warning"
    remedy = sound.findings["variables.COLLECTIVES_HOST_CHUNKS"]["remedy"]
    assert remedy == "unset COLLECTIVES_HOST_CHUNKS; export COLLECTIVES_HOST_CHUNK=4096"


def test_slurms_tasks_without_srun_are_a_warning(sound):
    assert sound.findings["launcher"]["values"]["size"] == 1
    assert sound.findings["launcher.slurm"]["remedy"] == "srun -n 4 python -m collectives.doctor"


def test_no_secret_is_shown(sound):
    text = json.dumps(sound.json)
    assert "s3cr3t" not in text and "NCCL_API_KEY" in text and "UNRELATED" not in text


def test_text_ends_with_the_lines_that_fix():
    env = clean_environment(COLLECTIVES_CHECK="yes")
    command = [*DOCTOR, "--no-test"]
    done = subprocess.run(command, env=env, cwd="/", capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 1 and "\x1b" not in done.stdout, done.stderr
    report, _, fixes = done.stdout.partition("To fix: ")
    assert [line.split()[1] for line in report.splitlines() if line.startswith("ok ")][:2] == ["python", "package"]
    assert "COLLECTIVES_CHECK must be 0 or 1, not 'yes'\n         $ unset COLLECTIVES_CHECK\n" in fixes
    assert max(map(len, done.stdout.splitlines())) <= 120


def test_a_launchers_ranks_run_the_self_test():
    report = Report(torchrun(2, "--standalone", "-m", "collectives.doctor"))
    assert report.errors == set(), report.err
    assert report.findings["launcher"]["values"]["launcher"] == "torchrun"
    assert report.findings["launcher"]["values"]["master_reached"] is True
    values = report.findings["self_test.host"]["values"]
    assert values["launched"] and values["ranks"] == 2 and values["c10d"]


@pytest.mark.thorough
def test_stray_variables_and_one_core_are_named_and_the_self_test_runs_in_spite_of_them():
    """The variables are of a launcher, and left over."""
    core = min(os.sched_getaffinity(0))
    report = Report(DOCTOR, preexec=lambda: os.sched_setaffinity(0, {core}), WORLD_SIZE="4", LOCAL_RANK="0")
    assert report.errors == {"launcher"}
    assert "WORLD_SIZE" in report.findings["launcher"]["remedy"]
    assert report.status("self_test.host") == "ok"
    assert report.findings["cores"]["values"]["cpus"] == [core]
    assert report.status("cores.affinity") == "warning"
    assert "2 ranks take turns on 1 of" in report.findings["cores.affinity"]["text"]


@pytest.mark.thorough
def test_ranks_that_never_come_end_with_the_time_limit():
    report = Report(DOCTOR, "--timeout", "20", RANK="0", WORLD_SIZE="2")
    found = report.findings["self_test.host"]
    assert report.errors == {"self_test.host"}
    assert found["values"]["stage"] == "open the communicator" and found["remedy"].startswith("unset RANK WORLD_SIZE")


@pytest.mark.thorough
def test_a_hanging_rank_ends_with_its_stack(tmp_path):
    """A rank stops while the other one waits: torch's copy of a tensor never ends here."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys, time\n"
        "if os.environ.get('RANK') == '1' and 'run_rank' in ''.join(sys.orig_argv):\n"
        "    import threading\n"
        "    def stop():\n"
        "        while 'collectives.doctor.rank' not in sys.modules: time.sleep(0.05)\n"
        "        os.kill(os.getpid(), 19)\n"
        "    threading.Thread(target=stop, daemon=True).start()\n"
    )
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    report = Report(DOCTOR, "--timeout", "15", PYTHONPATH=path)
    found = report.findings["self_test.host"]
    assert found["status"] == "error" and "rank" in found["text"]
    assert "Traceback" in found["values"]["output"] or "Thread" in found["values"]["output"]


def copy_of_the_package(folder: Path, *leave_out: str) -> Path:
    shutil.copytree(ROOT / "collectives", folder / "collectives",
                    ignore=shutil.ignore_patterns("__pycache__", *leave_out))  # fmt: skip
    return folder


def test_an_uncompiled_copy_hides_the_installed_one(tmp_path):
    folder = copy_of_the_package(tmp_path, "*.so")
    report = Report(DOCTOR, cwd=folder, PYTHONPATH=str(ROOT))
    assert {"package.shadow", "package.library", "engine"} <= report.errors
    found = report.findings["package.shadow"]
    assert str(ROOT / "collectives") in found["text"] and found["remedy"] == "cd / && python -m collectives.doctor"
    assert report.findings["engine"]["remedy"] == found["remedy"]
    assert not any(name.startswith("self_test") for name in report.findings)


def test_the_import_of_an_uncompiled_package_names_the_doctor(tmp_path):
    """By a Python of its own: the one of an editable install finds that one's extensions from any copy."""
    venv.create(tmp_path / "venv", symlinks=True)
    folder = copy_of_the_package(tmp_path, "*.so")
    command, env = [str(tmp_path / "venv" / "bin" / "python"), "-c", "import collectives"], {"PATH": os.defpath}
    for missing in ("torch is not installed", "the extension collectives._nccl is not built"):
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 1 and missing in done.stderr
        assert f"python {folder}/collectives/doctor/__main__.py" in done.stderr.splitlines()[-1]
        (folder / "torch.py").touch()


def test_without_torch_it_runs_by_its_path(tmp_path):
    """A Python with no packages at all."""
    venv.create(tmp_path, symlinks=True)
    report = Report([str(tmp_path / "bin" / "python"), *BY_PATH[1:]], without=("PYTHONPATH",))
    assert report.findings["package.torch"]["remedy"] == "pip install torch"
    assert {"package.torch", "package.numpy", "torch"} <= report.errors


def test_a_hidden_engine_library_and_few_open_files():
    limits = {"preexec": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (200, 4096))}
    report = Report(DOCTOR, COLLECTIVES_HOST_LIBRARY="/nowhere/libcollectives_host.so", **limits)
    assert {"package.library", "engine"} <= report.errors
    assert report.findings["engine"]["remedy"] == "unset COLLECTIVES_HOST_LIBRARY"
    assert "self_test.host" not in report.findings
    assert report.status("limits.nofile") == "warning"
    assert report.findings["limits"]["values"]["nofile"] == {"soft": 200, "hard": 4096}
    assert report.findings["limits.nofile"]["remedy"].startswith("sudo prlimit --pid $$ --nofile=65536")


@pytest.mark.thorough
def test_a_reader_that_has_left_is_no_traceback():
    """Of `| head`. What the environment holds may be of any bytes, whatever the terminal shows."""
    env = clean_environment(PYTHONIOENCODING="ascii", XDG_CACHE_HOME="/caf\xe9\udcff")
    command = [*BY_PATH, "--no-test"]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, env=env, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=LIMIT_S)
    os.close(writing)
    assert all(line.startswith("doctor: ") for line in done.stderr.splitlines()) and done.returncode == 0
    shown = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    assert shown.returncode == 0 and "/caf" in shown.stdout, shown.stderr


def test_invalid_command_lines():
    for words in (["--timeout", "0"], ["--nothing"]):
        done = subprocess.run([*BY_PATH, *words], capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 2 and "usage: python -m collectives.doctor" in done.stderr
