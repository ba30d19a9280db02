"""What the extras bring, beside a CUDA build of torch no other library of CUDA; versions; the workflows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


def extra(name: str) -> list[str]:
    text = (ROOT / "pyproject.toml").read_text()
    listed = re.search(rf"^{name} = \[(.*?)\]", text, re.MULTILINE | re.DOTALL)[1]
    return re.findall(r'"([^"]+)"', listed)


def test_the_test_extra_brings_no_library_of_cudas():
    assert "pytest" in extra("test")
    assert not [each for each in extra("test") if re.match(r"nvidia|cupy|torch", each)]


def test_each_cuda_extra_is_for_one_cuda():
    for each in extra("cuda12"):
        assert each.endswith(("-cu12", "-cuda12x")), each
    for each in extra("cuda13"):
        assert not re.search(r"cu12|cuda12", each), each


def makefile() -> str:
    """The Makefile, in which the names of its own variables are replaced by what they hold."""
    text = (ROOT / "Makefile").read_text()
    for name, value in reversed(re.findall(r"^(CUDA_EXTRA_OF|CUDA_EXTRA) := (.*)$", text, re.MULTILINE)):
        text = text.replace(f"$({name})", value)
    return text


@pytest.mark.parametrize(
    ("cuda", "tests", "demo"),
    [(None, "cuda12", ""), ("12.4", "cuda12", ",cuda12"), ("12.9", "cuda12", ",cuda12"), ("13.0", "cuda13", ",cuda13")],
)
def test_make_takes_the_extra_of_torchs_cuda(tmp_path, cuda, tests, demo):
    """The programs of the Makefile's own recipes, run beside a stand-in for torch of another build."""
    codes = re.findall(r"^\textra=.*?/python -c '(.*?)'", makefile(), re.MULTILINE)
    (tmp_path / "torch.py").write_text(f"class version:\n    cuda = {cuda!r}\n")
    found = []
    for code in codes:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path,
            env={"PYTHONPATH": str(tmp_path)},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found.append(done.stdout.strip())
    assert found == [demo, tests]  # the demo's environment is made first


def test_requirements_of_extras_and_groups_are_printed():
    """As the Makefile's targets install them, so that nothing of ours is built for the pages or the tools."""
    command = [sys.executable, ROOT / "tools" / "requirements.py"]
    done = subprocess.run([*command, "docs", "cuda12"], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [*extra("docs"), *extra("cuda12")] and extra("docs"), done.stderr
    done = subprocess.run([*command, "doc"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "no extra and no dependency group 'doc'" in done.stderr
    for group in re.findall(r"tools/requirements\.py (\w+)", (ROOT / "Makefile").read_text()):
        assert extra(group), group


def test_versions_are_the_same_everywhere():
    """Of Python: classifiers, cibuildwheel, tools/wheel.py; of torch: the requirement, the check, the matrix."""
    project = (ROOT / "pyproject.toml").read_text()
    tool = (ROOT / "tools" / "wheel.py").read_text()
    oldest, newest = map(int, re.search(r"^OLDEST, NEWEST = (\d+), (\d+)", tool, re.MULTILINE).groups())
    minors = [str(minor) for minor in range(oldest, newest + 1)]
    assert re.findall(r"Python :: 3\.(\d+)", project) == minors
    assert re.findall(r'"cp3(\d+)-manylinux', project) == minors and f'requires-python = ">=3.{oldest}"' in project
    least, below = re.search(r'"torch>=2\.(\d+),<2\.(\d+)"', project).groups()
    compat = (ROOT / "collectives" / "torch_compat.py").read_text()
    assert f'OLDEST = "2.{least}"' in compat
    tested = re.findall(r"2\.(\d+)\.\d+", re.search(r"^MATRIX \?= (.*)$", makefile(), re.MULTILINE)[1])
    assert (tested[0], int(tested[-1]) + 1) == (least, int(below))


def test_the_workflows_are_yaml_and_run_what_is_there():
    yaml = pytest.importorskip("yaml")
    folder = ROOT / ".github" / "workflows"
    jobs = {path.stem: yaml.safe_load(path.read_text())["jobs"] for path in folder.glob("*.yml")}
    commands = [step.get("run", "") for each in jobs.values() for job in each.values() for step in job["steps"]]
    assert "bash .ci/run" in commands and (ROOT / ".ci" / "run").exists()
    assert any("cibuildwheel" in command for command in commands)
    assert all(job["runs-on"] and job["steps"] for each in jobs.values() for job in each.values())
