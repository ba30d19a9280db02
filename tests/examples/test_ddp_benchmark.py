"""The benchmark of whole models: small ones, also under mpirun, and the sizes of the real ones."""

import json
import shutil
import sys
from functools import partial

import pytest
import torch

from tests.examples.running import EXAMPLES, fork_example, run_example

NAME, WAYS = "ddp_benchmark.py", ["plain", "hook", "auto"]


def run_benchmark(*options, cwd, start=fork_example):
    code, out, err = start(NAME, "--tiny", "--blocks", "3", *options, cwd=cwd)
    assert code == 0, out + err
    *_, plot, last = out.splitlines()
    assert plot == "plot: out/ddp_benchmark.png" and (cwd / "out" / "ddp_benchmark.png").exists()
    result = json.loads(last)
    assert (result["ranks"], result["identical_parameters"], result["agree"]) == (2, True, True)
    assert result["difference_if_not_reduced"] > 0.1  # so that it can fail
    assert min(result["rates"].values()) > 0
    return result


def test_three_ways_of_a_small_resnet_in_turn(tmp_path):
    result = run_benchmark("--json", "rows/new.jsonl", cwd=tmp_path)
    assert list(result["rates"]) == list(result["by_plain"]) == WAYS
    assert result["gradient_differences"].keys() == {"hook", "auto"}
    assert max(result["gradient_differences"].values()) < 1e-6
    assert result["auto"] == "fused_allreduce on 2 ranks"
    for name, (low, high) in result["spread"].items():
        assert low <= result["rates"][name] <= high
        assert result["rates"][name] * result["step_ms"][name] == pytest.approx(2 * 4 * 1e3, rel=1e-2)
    (row,) = (tmp_path / "rows" / "new.jsonl").read_text().splitlines()
    assert {**result, **json.loads(row)} == json.loads(row)
    assert {"benchmark", "machine", "commit", "torch", "time"} <= json.loads(row).keys()


@pytest.mark.thorough
def test_a_small_bert_in_bf16_under_mpirun(tmp_path):
    if shutil.which("mpirun.openmpi") is None:
        pytest.skip("mpirun.openmpi is not installed")
    mpirun = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    result = run_benchmark(
        *("--model", "bert", "--bf16", "--ways", "hook", "plain"), cwd=tmp_path, start=partial(run_example, mpirun)
    )
    assert list(result["rates"]) == ["plain", "hook"] and "auto" not in result
    assert result["model"] == "bert-tiny" and result["compute"] == "bf16"


def test_the_models_are_those_that_everybody_times(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import models

    with torch.device("meta"):
        resnet, bert = models.ResNet(), models.Bert()
        assert resnet(torch.empty(2, 3, 224, 224)).shape == (2, 1000)
        words, follows = bert(torch.empty(2, 128, dtype=torch.long), torch.empty(2, 20, dtype=torch.long))
    assert words.shape == (2, 20, 30522) and follows.shape == (2, 2)
    assert models.count(resnet) == models.RESNET_50_PARAMETERS == 25_557_032
    heads = (bert.transform, bert.follows)
    assert models.count(bert) == models.BERT_BASE_PARAMETERS
    assert models.count(bert) - sum(map(models.count, heads)) - bert.word_bias.numel() == 109_482_240
    del sys.modules["models"]
