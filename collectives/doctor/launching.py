"""Environment variables: those that set something or nothing, and those of the launcher of this process."""

from __future__ import annotations

import os
import re
import shlex
import warnings
from collections.abc import Mapping

from ..environment import check_variables, find_unknown
from ..errors import InvalidArgument
from ..launcher import Identity, detect_launcher
from .probe import Probe
from .report import ERROR, OK, WARNING, Finding

__all__ = ["check_launcher", "check_variables_set", "is_launcher_variable", "read_identity"]

# Only variables that something here reads are shown, and never a value whose name looks like that of a secret.
_SHOWN = re.compile(
    r"(COLLECTIVES|NCCL|GLOO|TORCH_NCCL|TORCH_GLOO|HOROVOD|OMP|KMP|MALLOC|CUPY)_\w+$"
    r"|(CUDA_(VISIBLE_DEVICES|DEVICE_ORDER|HOME|MODULE_LOADING|LAUNCH_BLOCKING)|NVIDIA_VISIBLE_DEVICES"
    r"|MKL_NUM_THREADS|GLIBC_TUNABLES|XDG_CACHE_HOME|LD_LIBRARY_PATH|LD_PRELOAD|CONDA_PREFIX|VIRTUAL_ENV|PYTHONPATH"
    r"|TORCH_DISTRIBUTED_DEBUG|TORCH_CPP_LOG_LEVEL|PYTORCH_CUDA_ALLOC_CONF)$"
)
_SECRET = re.compile(r"TOKEN|SECRET|PASS|CREDENTIAL|AUTH|COOKIE|PRIVATE|API_?KEY|ACCESS_?KEY", re.IGNORECASE)
_LAUNCHER = re.compile(
    r"((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+|OMPI_COMM_WORLD_\w+"
    r"|OMPI_MCA_orte_hnp_uri|PMI_(RANK|SIZE|LOCAL_\w+)|PMIX_(RANK|NAMESPACE)|MPI_LOCAL\w+|SLURM_(PROCID|LOCALID|NODEID"
    r"|NTASKS|NPROCS|NNODES|STEP_ID|STEPID|STEP_NUM_TASKS|STEP_NUM_NODES|STEP_NODELIST|STEP_TASKS_PER_NODE"
    r"|TASKS_PER_NODE|JOB_ID|JOBID|NODELIST|JOB_NODELIST|JOB_NUM_NODES|RESTART_COUNT))$"
)
_MASTER_S = 5.0  # limit to find or reach the master
_REACH = """
import socket
addresses = sorted({{each[4][0] for each in socket.getaddrinfo({name!r}, {port!r}, type=socket.SOCK_STREAM)}})
emit(addresses=addresses)
if {connect!r}:
    socket.create_connection(({name!r}, {port!r}), timeout=3).close()
    emit(reached=True)
"""


def _show(env: Mapping[str, str], names: re.Pattern) -> dict[str, str]:
    """Return the set variables with such names and their values; secrets' values are replaced."""
    return {
        name: "(not shown)" if _SECRET.search(name) else re.sub(r"://[^/@\s]*@", "://(not shown)@", env[name])
        for name in sorted(env)
        if names.match(name)
    }


def _join(variables: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in variables.items())


def check_variables_set() -> list[Finding]:
    """Check the variables that are set: unknown names, and values that can't be used."""
    values = _show(os.environ, _SHOWN)
    findings = [Finding("variables", OK, _join(values) or "none that is read here is set", values=values)]
    for name, near in sorted(find_unknown(os.environ).items()):
        text, remedy = f"{name} is unknown to this version and sets nothing", f"unset {name}"
        if near:
            value = "..." if _SECRET.search(name) else os.environ[name]
            text, remedy = f"{text}; {near} is known", f"{remedy}; export {near}={shlex.quote(value)}"
        findings.append(Finding(f"variables.{name}", WARNING, text, remedy))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of unknown names
            check_variables()
    except InvalidArgument as error:
        named = re.search(r"COLLECTIVES_\w+", error.message)
        findings.append(Finding("variables.value", ERROR, error.message, f"unset {named[0] if named else ''}".strip()))
    return findings


def is_launcher_variable(name: str) -> bool:
    """Return whether a launcher sets a variable of this name, which a rank of another job must not have."""
    return bool(_LAUNCHER.match(name))


def read_identity() -> Identity | None:
    """Return this process's place in its job; None where the variables contradict each other."""
    try:
        return detect_launcher()
    except InvalidArgument:
        return None


def check_launcher(environ: Mapping[str, str] | None = None) -> list[Finding]:
    """Check the launcher's variables. `environ`: default ``os.environ``."""
    env = os.environ if environ is None else environ
    values: dict = {"variables": _show(env, _LAUNCHER)}
    seen = f". Set: {_join(values['variables'])}" if values["variables"] else ""
    try:
        found = detect_launcher(env)
    except InvalidArgument as error:
        named = [name for name in dict.fromkeys(re.findall(r"[A-Z][A-Z_]{3,}", error.message)) if name in env]
        remedy = "unset " + " ".join(named or values["variables"])
        return [Finding("launcher", ERROR, error.message + seen, remedy, values)]
    names = ("launcher", "rank", "size", "local_rank", "local_size", "master_addr", "master_port")
    values |= {name: getattr(found, name) for name in names}
    text = "none: this process is alone"
    if found.launcher != "alone":
        text = f"{found.launcher}: rank {found.rank} of {found.size}, local {found.local_rank} of {found.local_size}"
        text += f", master {found.master_addr}:{found.master_port}" if found.master_addr else ""
    findings = [Finding("launcher", OK, text + seen, values=values)]
    tasks = env.get("SLURM_NTASKS", "").strip()
    stray = [name for name in ("MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE") if env.get(name)]
    if found.launcher == "alone" and tasks.isdigit() and int(tasks) > 1:
        text = f"SLURM_NTASKS={tasks}, but srun has not started this process, so it is alone"
        findings.append(Finding("launcher.slurm", WARNING, text, f"srun -n {tasks} python -m collectives.doctor"))
    elif found.launcher == "alone" and stray:
        text = f"set, but no rank or size is, so this process is alone: {' '.join(stray)}"
        findings.append(Finding("launcher.stray", WARNING, text, "unset " + " ".join(stray)))
    if found.master_addr is not None and found.size > 1:
        findings += _check_master(found, values)
    return findings


def _check_master(found: Identity, values: dict) -> list[Finding]:
    """Look the master's name up, and connect where torchrun's agent serves a store there."""
    program = _REACH.format(name=found.master_addr, port=found.master_port, connect=found.agent_store)
    outcome = Probe(program, _MASTER_S).wait()
    values["master_addresses"] = outcome.values.get("addresses", [])
    values["master_reached"] = outcome.values.get("reached") if found.agent_store else None
    # Not by what a host's name resolves to: on that host itself it is often 127.0.1.1.
    is_own = re.fullmatch(r"localhost|127\..*|::1", found.master_addr, re.IGNORECASE)
    if not values["master_addresses"]:
        text = f"the name of MASTER_ADDR={found.master_addr} is not found: {outcome.error}"
        remedy = f"getent hosts {found.master_addr}   # or an IP address"
    elif found.agent_store and not values["master_reached"]:
        text = f"nothing answers at {found.master_addr}:{found.master_port}, where torchrun's agent has the job's " \
               f"store: {outcome.error}"  # fmt: skip
        remedy = f"nc -vz {found.master_addr} {found.master_port}"
    elif is_own and found.local_size is not None and found.local_size < found.size:
        text = f"MASTER_ADDR={found.master_addr} is each node's own address, and the ranks are on several nodes"
        remedy = "export MASTER_ADDR=<the address of rank 0's node>"
    else:
        return []
    return [Finding("launcher.master", ERROR, text, remedy)]
