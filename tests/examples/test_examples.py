"""The other examples, each on 2 ranks with few steps: what they find is so. The launchers run the digits."""

import json

import pytest
import torch

from tests.examples.running import fork_example


def result_of(name, *options, cwd):
    """Run an example; give its result, after what all of them promise."""
    found, out, err = fork_example(name, *options, cwd=cwd)
    assert found == 0, out + err
    *_, plot, last = out.splitlines()
    assert plot == f"plot: out/{name.removesuffix('.py')}.png"
    assert (cwd / plot.removeprefix("plot: ")).read_bytes().startswith(b"\x89PNG")
    assert "\r" not in out + err  # no bar in a pipe
    result = json.loads(last)
    assert result["ranks"] == 2 and result["identical_parameters"] is True
    return result


def test_gradient_accumulation(tmp_path):
    result = result_of("gradient_accumulation.py", "--batch-size", "256", "--micro-batches", "4", cwd=tmp_path)
    assert result["test_accuracy"] >= 0.95
    assert 0 < result["gradient_difference"] < 1e-5  # two orders of summing: equal bits would be one and the same thing
    assert result["bytes_a_step_without_no_sync"] == 4 * result["bytes_a_step"] > 0
    assert result["learning_rate"] == pytest.approx(0.02 * 2 * 256 / 64)
    assert 0 < result["steps_clipped"] < 40


def test_activation_checkpointing(tmp_path):
    options = ("--steps", "4", "--layers", "6", "--width", "64", "--context", "32")
    result = result_of("activation_checkpointing.py", *options, cwd=tmp_path)
    assert result["equal_gradients"] is True and result["equal_parameters"] is True
    assert result["loss_last"]["checkpointed"] == result["loss_last"]["plain"] < result["loss_first"]
    # All that a block of n x 64 numbers keeps is n x 64 numbers, of more than 10 times as many.
    inputs = 6 * 8 * 32 * 64 * 4
    assert inputs < result["saved_bytes"]["checkpointed"] < 0.25 * result["saved_bytes"]["plain"]
    assert result["saved_bytes"]["plain"] > 10 * inputs
    assert result["optimizer_share"]["plain"] == pytest.approx(0.5, abs=0.01)


def test_save_and_resume(tmp_path):
    name, small = "save_and_resume.py", ("--steps", "12", "--hidden", "64")
    result = result_of(name, *small, cwd=tmp_path)
    assert result["losses_apart"] <= 0.01 and result["losses_equal_without_hook_states"] is False
    assert (result["resumed_at"], result["steps"]) == (6, 12)
    folder = tmp_path / "out" / "save_and_resume"
    written = {path.name for path in folder.iterdir()}
    assert written == {"training.pt", "hook_of_rank_0.pt", "hook_of_rank_1.pt", "end.json"}

    again = result_of(name, *small, "--resume", cwd=tmp_path)
    assert again["losses_apart"] == result["losses_apart"] and again["loss_last"] == result["loss_last"]


def test_load_on_rank_0(tmp_path):
    result = result_of("load_on_rank_0.py", "--steps", "30", "--hidden", "64", cwd=tmp_path)
    assert result["bit_for_bit"] is True and result["identical_without_sending"] is False  # so that it can fail
    assert (result["loaded_at"], result["steps"]) == (15, 30)
    folder = tmp_path / "out" / "load_on_rank_0"
    assert {path.name for path in folder.iterdir()} == {"middle.pt", "end.pt"}
    saved = torch.load(folder / "end.pt")
    assert saved["step"] == 30 and saved["optimizer"]["state"][0]["step"] == 30


def test_char_gpt(tmp_path):
    model = ("--layers", "1", "--width", "64", "--context", "32", "--held-out", "64", "--limit", "300000")
    result = result_of("char_gpt.py", *model, "--steps", "80", "--compare", "bf16,int8", cwd=tmp_path)
    losses = result["losses"]
    assert list(losses) == ["fp32", "bf16", "int8"]
    assert losses["fp32"] < result["loss_of_frequencies"] - 0.2
    assert all(0.99 < ratio <= 1.01 for ratio in result["loss_ratios"].values())
    assert result["bytes_ratios"]["bf16"] == pytest.approx(0.5, abs=2e-3)
    assert 0.25 < result["bytes_ratios"]["int8"] <= 0.27

    # In shards the same steps: the norm by which they are clipped is summed in another order.
    sharded = result_of("char_gpt.py", *model, "--steps", "80", "--sharded", cwd=tmp_path)
    assert sharded["sharded"] is True and result["sharded"] is False
    assert sharded["losses"]["fp32"] == pytest.approx(losses["fp32"], abs=1e-3)


def test_sharded_digits(tmp_path):
    result = result_of("sharded_digits.py", "--epochs", "2", "--hidden", "512", cwd=tmp_path)
    ways = ["DDP", "one unit", "wrap policy", "CPU offload"]
    assert result["equal_to_ddp"] == dict.fromkeys(ways, True)
    assert result["test_accuracy"] == dict.fromkeys(ways, result["test_accuracy"]["DDP"])
    assert result["loss_last"]["DDP"] < 0.5 * result["loss_first"]
    assert list(result["step_ms"]) == ways and min(result["step_ms"].values()) > 0
    # 14 MiB of parameters, gradients and moments on a rank, or half of that and what is in use. Less would be
    # a wrong measurement; more is what malloc keeps, from run to run 20 to 33: tests/sharded/test_memory.py counts.
    peak, kept = result["peak_mib"], 16 * result["parameters"] / 2**20
    assert peak["DDP"] > kept and peak["wrap policy"] > kept / 2


@pytest.mark.thorough
def test_sharded_muon(tmp_path):
    model = ("--layers", "1", "--width", "64", "--context", "32", "--held-out", "64", "--limit", "300000")
    result = result_of("sharded_muon.py", *model, "--steps", "60", cwd=tmp_path)
    assert result["equal_to_ddp"] is True
    losses, state = result["losses"], result["state_bytes"]
    assert losses["Muon"] == losses["Muon, DDP"] < losses["AdamW"] < result["loss_first"]
    # Momentum of the matrices of a block, which are 12 times 64 x 64, and two moments of the rest.
    matrices = 4 * 12 * 64 * 64
    assert matrices < state["Muon, DDP"] < 8 * result["parameters"]
    assert state["Muon, DDP"] / 3 < state["Muon"] < state["Muon, DDP"] * 2 / 3


@pytest.mark.thorough
def test_sharded_t5(tmp_path):
    model = ("--layers", "1", "--width", "64", "--limit", "2000000", "--learning-rate", "0.01", "--samples", "1")
    result = result_of("sharded_t5.py", *model, "--steps", "50", "--batch-size", "4", cwd=tmp_path)
    assert result["saved_is_trained"] is True
    assert result["held_out_loss"] < result["loss_of_frequencies"] - 0.2 < result["loss_first"]
    assert result["held_out_loss_of_saved_in_fp32"] == pytest.approx(result["held_out_loss"], abs=0.03)  # bf16: 2**-8
    saved = torch.load(tmp_path / "out" / "sharded_t5.pt", weights_only=True)
    assert {value.dtype for value in saved.values()} == {torch.float32}
    tied = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
    assert all(torch.equal(saved[name], saved[tied[0]]) for name in tied)
    assert sum(saved[name].numel() for name in saved if name not in tied[1:]) == result["parameters"]


def test_custom_sharded_wrapper(tmp_path):
    found, out, err = fork_example("custom_sharded_wrapper.py", cwd=tmp_path)
    assert found == 0, out + err
    result = json.loads(out.splitlines()[-1])
    assert result["last_loss"] < 0.1 * result["first_loss"]
    whole = 256 * 256 + 4 * 256  # int8, and a scale a row
    assert whole / 2 <= result["base_bytes_on_a_rank"] < whole / 2 + 64


def test_horovod_digits(tmp_path):
    name, both = "horovod_digits.py", {"sgd": True, "adamw": True}
    result = result_of(name, "--epochs", "2", cwd=tmp_path)
    assert result["equal_to_ddp"] == both and result["resumed_at_step"] == 0
    written = {path.name for path in (tmp_path / "out" / "horovod_digits").iterdir()}
    assert written == {"sgd.pt", "adamw.pt"}

    # In new processes: the DDP that it must be equal to was never interrupted.
    again = result_of(name, "--epochs", "3", "--resume", "--optimizers", "adamw", cwd=tmp_path)
    assert again["equal_to_ddp"] == {"adamw": True} and again["resumed_at_step"] == 2 * 23
    assert again["loss_first"]["adamw"] == result["loss_first"]["adamw"] > 2 * again["loss_last"]["adamw"]
