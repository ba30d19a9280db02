"""Which distribution the doctor's lines install: this package's, from where it came, and never a stranger's."""

from __future__ import annotations

import json
import shutil
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

from collectives.comm import engine as engine_module
from collectives.comm.engine import engines, get_engine
from collectives.doctor import install
from collectives.errors import EngineUnavailable

ROOT = Path(__file__).resolve().parents[2]
PLACEHOLDER = "raise NotImplementedError('collectives is coming soon')"


def add_distribution(folder: Path, name: str, version: str, origin: dict | None = None, files=()) -> None:
    """Make what pip leaves in a folder of packages."""
    path = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    path.mkdir(parents=True)
    (path / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (path / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    if origin is not None:
        (path / "direct_url.json").write_text(json.dumps(origin))


@pytest.mark.parametrize(
    ("origin", "source"),
    [
        (None, "/path/to/the/wheel/or/checkout"),
        ({"url": "file:///a/b.whl", "archive_info": {}}, "file:///a/b.whl"),
        ({"url": "file:///a%20b", "dir_info": {}}, "file:///a%20b"),
        ({"url": "https://host/x.git", "vcs_info": {"vcs": "git", "commit_id": "ab12"}}, "git+https://host/x.git@ab12"),
    ],
    ids=["unknown", "a wheel", "a folder", "a repository"],
)
def test_the_package_is_installed_again_from_where_it_came(tmp_path, monkeypatch, origin, source):
    add_distribution(tmp_path, "torch-collectives", "0.1.7", origin)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert install._reinstall() == f"pip install --force-reinstall --no-deps {source}"


def test_a_strangers_package_in_place_of_ours(tmp_path):
    """`pip install collectives`, in a Python of its own: the doctor runs by its path, and names the cure."""
    venv.create(tmp_path, symlinks=True)
    python = tmp_path / "bin" / "python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path)}))
    shutil.copytree(ROOT / "collectives", site / "collectives", ignore=shutil.ignore_patterns("__pycache__", "*.c*"))
    (site / "collectives" / "__init__.py").write_text(PLACEHOLDER)
    add_distribution(site, "collectives", "0.0.1", files=["collectives/__init__.py"])
    add_distribution(site, "torch-collectives", "0.1.0", {"url": "file:///a.whl"}, ["collectives/__init__.py"])
    command = [str(python), str(site / "collectives" / "doctor" / "__main__.py"), "--json"]
    done = subprocess.run(command, cwd="/", env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, timeout=170)
    assert done.returncode == 1 and "doctor: importing torch" in done.stderr, done.stderr
    findings = {each["name"]: each for each in json.loads(done.stdout)["findings"]}
    assert findings["package.name"]["status"] == "error" and "'collectives' 0.0.1" in findings["package.name"]["text"]
    cure = "pip uninstall -y collectives && pip install --force-reinstall --no-deps file:///a.whl"
    assert findings["package.name"]["remedy"] == cure


def test_no_text_of_the_package_tells_anyone_to_install_a_strangers_package():
    for path in (ROOT / "collectives").rglob("*.py"):
        for line in path.read_text().splitlines():
            words = line.partition("pip install")[2].replace("'", " ").replace('"', " ").split()
            names = {word.partition("[")[0].partition("=")[0].rstrip(".,:;") for word in words}
            assert not names & {"collectives", "torch-collectives"}, (path, line)  # no index has the second one


def test_a_machine_without_a_gpu_is_told_so_and_not_where_nccl_was_looked_for(monkeypatch):
    monkeypatch.setattr(engine_module, "_nccl_candidates", lambda: ["/nowhere/libnccl.so.2"])
    monkeypatch.setattr(engine_module, "_loaded", {})
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (reason,) = [each.reason for each in engines() if each.name == "nccl"]
    assert "engine 'nccl' can't be used: no CUDA device is there for torch" in reason and "/nowhere" not in reason
    with pytest.raises(EngineUnavailable, match="no CUDA device is there") as caught:
        get_engine("nccl")
    assert "nvidia-nccl" not in str(caught.value)
    monkeypatch.setenv("COLLECTIVES_NCCL_LIBRARY", "/elsewhere/libnccl.so.2")  # what the user has named is said
    with pytest.raises(EngineUnavailable, match="/elsewhere/libnccl.so.2: no such file"):
        get_engine("nccl")
