"""The engine that a program would use, and why not the other, as a process of its own finds out."""

from __future__ import annotations

import os

from .finding import ERROR, OK, WARNING, Finding
from .probe import Outcome, StartedProbe, start_python

__all__ = ["check_engine", "check_torch", "start_engine_probe"]

_LIMIT = 60.0  # seconds; importing torch from a cold disk is slow
_PROGRAM = """
import importlib, os, warnings
emit(stage="import torch")
import torch
emit(torch={
    "version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip, "path": torch.__path__[0],
    "threads": torch.get_num_threads(), "debug": torch.version.debug,
})
import torch.distributed as dist
emit(distributed={name: getattr(dist, f"is_{name}_available")() for name in ("gloo", "nccl", "mpi", "ucc")}
     if dist.is_available() else {})
emit(stage="import collectives")
import collectives
from collectives import kernels
from collectives.comm.engine import get_engine
emit(stage="list the engines")
emit(engines=[each._asdict() for each in collectives.engines()])
emit(isa=kernels.use_isa(), kernel_threads=kernels.get_num_threads())
emit(stage="choose the engine")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    try:
        emit(chosen=get_engine().name)
    except collectives.errors.CollectivesError as error:
        emit(refused=str(error))
emit(stage="ask CUDA for its devices")
devices, peers = [], []
if torch.cuda.is_available():
    count = torch.cuda.device_count()
    for index in range(count):
        found = torch.cuda.get_device_properties(index)
        devices.append({"name": found.name, "memory": found.total_memory,
                        "capability": f"{found.major}.{found.minor}"})
    peers = [[a == b or torch.cuda.can_device_access_peer(a, b) for b in range(count)] for a in range(count)]
emit(devices=devices, peers=peers)
with open("/proc/self/maps", errors="replace") as file:
    emit(nccl_loaded=sorted({line.split()[-1] for line in file if "/libnccl.so" in line}))
emit(stage="")
"""


def start_engine_probe() -> StartedProbe:
    """Start the process that imports torch and this package; `check_engine` reads what it found."""
    return start_python(_PROGRAM, _LIMIT)


def check_torch(outcome: Outcome) -> list[Finding]:
    """Return the findings about torch itself."""
    torch, backends = outcome.values.get("torch"), outcome.values.get("distributed")
    if torch is None:
        text = f"torch can't be imported: {outcome.error}"
        values = {"error": outcome.error, "output": outcome.output}
        return [Finding("torch", ERROR, text, _torch_remedy(outcome), values)]
    built = f"built for CUDA {torch['cuda']}" if torch["cuda"] else "built without CUDA"
    names = ", ".join(name for name, there in (backends or {}).items() if there) or "none"
    found = [
        Finding("torch", OK, f"{torch['version']}, {built}, backends {names}", values={**torch, "backends": backends})
    ]
    if not backends:
        found.append(Finding("torch.distributed", ERROR, "this torch is built without torch.distributed",
                             "pip install --force-reinstall torch"))  # fmt: skip
    return found


def check_engine(outcome: Outcome, install: str) -> list[Finding]:
    """Return the findings about the engines.

    ``outcome``: of the probe, at its end. ``install``: what fixes the package's own files, "" where
    nothing of them is wrong.
    """
    values = outcome.values
    if "torch" not in values:
        return [Finding("engine", ERROR, "not known, since torch can't be imported", _torch_remedy(outcome))]
    if "engines" not in values:
        text = f"collectives can't be imported: {outcome.error}"
        remedy = install or "python -c 'import collectives'   # its whole traceback"
        if "needs torch" in outcome.error:
            remedy = "pip install --upgrade torch"
        return [Finding("engine", ERROR, text, remedy, {"error": outcome.error, "output": outcome.output})]
    engines = {each["name"]: each for each in values["engines"]}
    chosen = values.get("chosen")
    facts = {"chosen": chosen, "engines": values["engines"], "isa": values.get("isa"),
             "kernel_threads": values.get("kernel_threads"), "nccl_loaded": values.get("nccl_loaded", [])}  # fmt: skip
    parts = []
    for name, each in engines.items():
        state = (
            f"version {each['version']}, {each['path']}" if each["available"] else f"can't be used: {each['reason']}"
        )
        parts.append(f"{name} {state}")
    found = [Finding("engine", OK, f"{chosen or 'none'}; " + "; ".join(parts), values=facts)]
    if chosen is None:
        named = os.environ.get("COLLECTIVES_ENGINE", "").strip()
        # Without it "host" is used where there is no GPU; asked for by name, its library is at fault.
        text = values.get("refused") or engines["host"]["reason"] or outcome.error
        remedy = "unset COLLECTIVES_ENGINE" if named not in ("", "host") else _library_remedy(text, install)
        found[0].status, found[0].text, found[0].remedy = ERROR, text, remedy
    if not engines["host"]["available"] and chosen != "host":
        text = engines["host"]["reason"]
        found.append(Finding("engine.host", ERROR, text, _library_remedy(text, install)))
    if values.get("devices") and not engines["nccl"]["available"]:
        cuda = (values["torch"]["cuda"] or "12").split(".")[0]
        text = f"there are GPUs, but NCCL can't be used: {engines['nccl']['reason']}"
        found.append(Finding("engine.nccl", ERROR, text, f"pip install nvidia-nccl-cu{cuda}"))
    if len(facts["nccl_loaded"]) > 1:
        text = f"several NCCL libraries are loaded, torch's and ours differ: {', '.join(facts['nccl_loaded'])}"
        found.append(Finding("engine.nccl_copies", WARNING, text,
                             f"export COLLECTIVES_NCCL_LIBRARY={facts['nccl_loaded'][0]}"))  # fmt: skip
    if values.get("stage"):  # it did not come to its end
        text = f"the probe stopped at: {values['stage']}: {outcome.error}"
        facts["output"] = outcome.output
        remedy = "nvidia-smi" if "CUDA" in values["stage"] else "python -X faulthandler -c 'import collectives'"
        found.append(Finding("engine.probe", ERROR, text, remedy))
    return found


def _torch_remedy(outcome: Outcome) -> str:
    return "pip install torch" if "No module named" in outcome.error else "pip install --force-reinstall torch"


def _library_remedy(text: str, install: str) -> str:
    for name in ("COLLECTIVES_HOST_LIBRARY", "COLLECTIVES_NCCL_LIBRARY"):
        if os.environ.get(name, "").strip() and name in text:
            return f"unset {name}"
    return install or "pip install --force-reinstall --no-deps collectives"
