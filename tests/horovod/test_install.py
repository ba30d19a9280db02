"""An unchanged Horovod program runs, however it is started; and the name horovod is ours, or nobody's."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from collectives.horovod.__main__ import main
from tests import launching
from tests.programs import run_forked, run_python

PROGRAM = Path(__file__).with_name("mnist_program.py")
SHORT = [sys.executable, "-m", "collectives.horovod"]


def results_of(command, env, count):
    """Run a command and give what its ranks found, which must be the same."""
    with launching.started((command, env)) as running:
        _, codes, output = launching.finish(running)
    assert codes == [0], output
    found = [json.loads(text) for text in re.findall(r"FOUND ({.*?})", output)]  # mpirun may join lines
    assert sorted(each.pop("rank") for each in found) == list(range(count)), output
    assert found == [found[0]] * count
    return found[0]


@pytest.fixture(scope="module")
def by_srun():
    """What the program found by srun, as a file, with workers that are spawned."""
    srun = [sys.executable, launching.SRUN, "-n", "2"]
    command = launching.forked([*srun, *SHORT, str(PROGRAM), "--workers", "1"])
    return results_of(command, launching.clean_environment(), 2)


def test_an_unchanged_program(by_srun):
    assert by_srun["losses"][0] > 2 * by_srun["losses"][-1] and by_srun["accuracy"] > 0.8
    assert by_srun["size"] == 2 and by_srun["local"] == [True, 2]


@pytest.mark.thorough
def test_an_unchanged_program_under_mpirun(by_srun):
    """As a module, with no worker: the same losses."""
    if shutil.which("mpirun.openmpi") is None:
        pytest.skip("mpirun.openmpi is not installed")
    mpirun = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    by_mpirun = results_of([*mpirun, *SHORT, "-m", "tests.horovod.mnist_program"], launching.clean_environment(), 2)
    assert by_mpirun == by_srun


def test_whose_name_it_is(tmp_path):
    """Another package of the name, as pip would have installed it, is refused when it was imported, or passed over."""
    for package in ("horovod", "horovod/torch"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("theirs = True\n")
    text = f"""
import horovod.torch as theirs
import importlib, importlib.util, sys
import collectives.horovod as ours
try:
    ours.install()
except RuntimeError as error:
    assert "the package horovod was imported before ({tmp_path}/horovod/__init__.py)" in str(error), error
else:
    raise AssertionError("not refused")
assert sys.modules["horovod.torch"] is theirs
for name in [name for name in sys.modules if name.startswith("horovod")]:
    del sys.modules[name]
ours.install()
ours.install()
import horovod
import horovod.torch as hvd, horovod.torch.elastic, horovod.torch.mpi_ops as ops
from horovod.torch.elastic import TorchState, run
from horovod.torch.compression import Compression
from horovod.common.process_sets import ProcessSet, global_process_set
assert hvd is ours and horovod.torch.elastic is ours.elastic and ops.allreduce_ is ours.allreduce_
assert Compression is ours.Compression and ProcessSet is ours.ProcessSet and not hasattr(horovod, "theirs")
assert importlib.util.find_spec("horovod").name == "horovod" and horovod.__version__.startswith("0.28")
for missing in ("horovod.common.util", "horovod.tensorflow"):
    try:
        importlib.import_module(missing)
    except ModuleNotFoundError:
        continue
    raise AssertionError(missing)
"""
    done = run_python(text, PYTHONPATH=f"{tmp_path}:{launching.clean_environment()['PYTHONPATH']}")
    assert done.returncode == 0, done.stderr


def test_the_command(tmp_path, capsys):
    program = tmp_path / "program.py"
    (tmp_path / "beside.py").write_text("value = 7\n")
    program.write_text(
        "import sys, horovod.torch as hvd, beside\n"
        "hvd.init()\n"
        "print(sys.argv, __name__, __file__, beside.value, hvd.size(), '' in sys.path)\n"
        "sys.exit(int(sys.argv[1]))\n"
    )
    done = run_forked([*SHORT[1:], str(program), "3", "-m"], launching.clean_environment(), 60)
    assert done.returncode == 3, done.stderr
    assert done.stdout == f"['{program}', '3', '-m'] __main__ {program} 7 1 False\n"
    with pytest.raises(SystemExit) as ended:
        main(["nowhere.py"])
    assert ended.value.code == 2 and "can't open file 'nowhere.py': no such file in " in capsys.readouterr().err
    for wrong in ([], ["-m"], ["-x", "y"]):
        with pytest.raises(SystemExit) as ended:
            main(wrong)
        assert ended.value.code == 2
        assert capsys.readouterr().err.startswith("usage: python -m collectives.horovod")
