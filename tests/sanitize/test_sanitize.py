"""The host engine under the sanitizers (see run.sh), as part of the suite."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
CXX = os.environ.get("CXX", "g++")

pytestmark = pytest.mark.slow


def has_sanitizer(flag: str, folder: Path) -> bool:
    """Compilers come without the sanitizers' libraries on some systems."""
    source = folder / "empty.cpp"
    source.write_text("int main() { return 0; }\n")
    command = [*CXX.split(), f"-fsanitize={flag}", str(source), "-o", str(folder / "empty")]
    return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "flag", "last"),
    [
        pytest.param("thread", "thread", "all scenarios passed", marks=pytest.mark.thorough),
        pytest.param("address", "address,undefined", "all scenarios passed", marks=pytest.mark.thorough),
        pytest.param("conformance", "address,undefined", " passed", marks=pytest.mark.thorough),
    ],
)
def test_sanitizer(name, flag, last, tmp_path):
    if not shutil.which(CXX.split()[0]) or not shutil.which("make"):
        pytest.skip(f"needs {CXX} and make")
    if not has_sanitizer(flag, tmp_path):
        pytest.skip(f"{CXX} has no library for -fsanitize={flag}")
    environment = {**os.environ, "PYTHON": sys.executable, "SANITIZE_LIMIT": "400"}
    done = subprocess.run(
        ["bash", str(HERE / "run.sh"), name],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-20_000:]
    assert last in done.stdout
