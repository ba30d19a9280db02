"""What a `HookState` says: of an optimizer of torch's, and at exit where nothing has used it."""

import dataclasses
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from collectives import HookState
from collectives.errors import InvalidArgument
from collectives.gradients.options import HookOptions

ROOT = Path(__file__).resolve().parents[2]


def refusal(optimizer):
    with pytest.raises(InvalidArgument) as caught:
        HookState(optimizer=optimizer)
    return caught.value.message


@pytest.mark.parametrize(
    "make, line",
    [
        (lambda p: torch.optim.AdamW(p), "collectives.optim.AdamW(parameters)"),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "collectives.optim.SGD(parameters, lr=0.1, momentum=0.9)"),
        (lambda p: torch.optim.Adam(p, fused=True, eps=1e-6), "collectives.optim.Adam(parameters, eps=1e-06)"),
    ],
)
def test_torchs_optimizers_get_the_line_to_write(make, line):
    parameters = [torch.nn.Parameter(torch.zeros(3))]
    theirs = make(parameters)
    message = refusal(theirs)
    assert f"Write optimizer={line}: it takes the same arguments and state_dict" in message
    import collectives.optim

    ours = eval(line, {"collectives": collectives, "parameters": parameters})
    ours.load_state_dict(theirs.state_dict())
    for key in ("lr", "weight_decay"):
        assert ours.param_groups[0][key] == theirs.param_groups[0][key]


def test_others_get_no_line():
    parameters = [torch.nn.Parameter(torch.zeros(3))]
    assert "Write" not in refusal(torch.optim.RMSprop(parameters))
    assert "differentiable=True is torch's alone" in refusal(torch.optim.SGD(parameters, differentiable=True))


PROGRAMS = {
    "unregistered": "state, other = HookState(wire='bf16'), HookState()",
    "registered": "state = HookState(); state.register(torch.nn.Linear(2, 2))",
    "loaded": "state = pickle.loads(pickle.dumps(HookState()))",
    "failed": "state = HookState(); raise ZeroDivisionError",
    "forked": "state = HookState(); child = os.fork()\nif child: os.waitpid(child, 0); del state",
    "dropped": "state = HookState(); del state",
}


@pytest.mark.thorough
def test_a_state_that_nothing_used_is_warned_of_once_at_exit():
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    begun = {
        name: subprocess.Popen(
            [sys.executable, "-c", "import os, pickle, torch\nfrom collectives import HookState\n" + text],
            env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for name, text in PROGRAMS.items()
    }  # fmt: skip
    said = {name: process.communicate(timeout=240)[1] for name, process in begun.items()}
    assert said["unregistered"].count("UserWarning: HookState(") == 1
    assert "(and 1 more): it was registered nowhere, so its options had no effect" in said["unregistered"]
    assert "no backward has used it, so its options had no effect" in said["registered"]
    for name in ("loaded", "failed", "forked", "dropped"):
        assert "UserWarning" not in said[name], name


def test_all_arguments_are_shown_and_others_refused():
    shown = inspect.signature(HookState).parameters
    assert list(shown)[:4] == ["comm", "process_group", "optimizer", "grad_scaler"]
    assert {field.name: field.default for field in dataclasses.fields(HookOptions)} == {
        name: parameter.default for name, parameter in list(shown.items())[4:]
    }
    for name in HookOptions.__dataclass_fields__:
        assert f"    {name}: " in HookOptions.__doc__
    with pytest.raises(TypeError, match="unexpected keyword argument 'wires': did you mean 'wire'"):
        HookState(wires="int8")
    with pytest.raises(TypeError, match="did you mean 'process_group'"):
        HookState(process_groups=None)
    with pytest.raises(TypeError, match="'local_steps'. It takes wire, block"):
        HookState(local_steps=4)
