"""The fit of a surface, under srun and both mpiruns, with no change."""

import json
import shutil
from functools import partial

import pytest
import torch

from tests.examples.running import fork_example, run_example

LAUNCHERS = {
    "openmpi": ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", "2"],
    "mpich": ["mpiexec.hydra", "-n", "2"],
}


def test_both_ranks_find_the_surface_and_write_their_checkpoints(tmp_path):
    check_fit(fork_example, tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("launcher", LAUNCHERS.values(), ids=LAUNCHERS)
def test_under_mpirun(launcher, tmp_path):
    if shutil.which(launcher[0]) is None:
        pytest.skip(f"{launcher[0]} is not installed")
    check_fit(partial(run_example, launcher), tmp_path)


def check_fit(start, tmp_path):
    code, out, err = start("fit_surface.py", cwd=tmp_path)
    assert code == 0, out + err
    *_, plot, last = out.splitlines()
    assert plot == "plot: out/fit_surface.png" and (tmp_path / "out" / "fit_surface.png").exists()
    result = json.loads(last)
    assert (result["ranks"], result["identical_parameters"], result["checkpoints_read_back"]) == (2, True, True)
    assert result["found"] == pytest.approx(result["truth"], abs=0.01)
    assert 0 <= result["difference_to_one_process"] < 1e-5
    assert result["faster"] == (result["step_ms"] < result["step_ms_one_process"])

    folder = tmp_path / "out" / "fit_surface"
    assert {path.name for path in folder.iterdir()} == {"rank_0.pt", "rank_1.pt"}
    first, second = (torch.load(folder / f"rank_{rank}.pt") for rank in range(2))
    assert (first["rank"], second["rank"], second["ranks"], second["step"]) == (0, 1, 2, 300)
    assert all(torch.equal(first["model"][name], second["model"][name]) for name in first["model"])
    weight, bias = first["model"]["fit.weight"], first["model"]["fit.bias"]
    assert [*weight[0].tolist(), bias.item()] == pytest.approx(list(result["found"].values()), abs=1e-4)
