"""Launcher variables: which launcher has started this process, what contradicts, whether the master is found."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from ..errors import InvalidArgument
from ..launcher import Identity, detect_launcher
from .finding import ERROR, OK, WARNING, Finding
from .probe import start_python
from .variables import shown_variables

__all__ = ["check_launcher", "is_launcher_variable", "read_identity"]

_NAMES = re.compile(
    r"(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|GROUP_WORLD_SIZE|ROLE_RANK|ROLE_WORLD_SIZE|MASTER_ADDR"
    r"|MASTER_PORT|TORCHELASTIC_\w+|OMPI_COMM_WORLD_\w+|OMPI_MCA_orte_hnp_uri|PMI_RANK|PMI_SIZE|PMI_LOCAL_\w+"
    r"|PMIX_RANK|PMIX_NAMESPACE|MPI_LOCAL\w+|SLURM_(PROCID|LOCALID|NODEID|NTASKS|NPROCS|NNODES|STEP_ID|STEPID"
    r"|STEP_NUM_TASKS|STEP_NUM_NODES|STEP_NODELIST|STEP_TASKS_PER_NODE|TASKS_PER_NODE|JOB_ID|JOBID|NODELIST"
    r"|JOB_NODELIST|JOB_NUM_NODES|RESTART_COUNT))$"
)
_LIMIT = 5.0  # seconds to find or reach the master
_REACH = """
import socket
addresses = sorted({{each[4][0] for each in socket.getaddrinfo({name!r}, {port!r}, type=socket.SOCK_STREAM)}})
emit(addresses=addresses)
if {connect!r}:
    socket.create_connection(({name!r}, {port!r}), timeout=3).close()
    emit(reached=True)
"""


def is_launcher_variable(name: str) -> bool:
    """Return whether a launcher sets a variable of this name, which a rank of another job must not have."""
    return bool(_NAMES.match(name))


def read_identity() -> Identity | None:
    """Return this process's place in its job; None where the variables contradict each other."""
    try:
        return detect_launcher()
    except InvalidArgument:
        return None


def check_launcher(environ: Mapping[str, str] | None = None) -> list[Finding]:
    """Check the launcher's variables. ``environ``: default ``os.environ``."""
    env = os.environ if environ is None else environ
    values: dict = {"variables": shown_variables(env, _NAMES)}
    seen = " ".join(f"{name}={value}" for name, value in values["variables"].items())
    try:
        found = detect_launcher(env)
    except InvalidArgument as error:
        named = [name for name in dict.fromkeys(re.findall(r"[A-Z][A-Z_]{3,}", error.message)) if name in env]
        text = f"{error.message}. Set: {seen}"
        return [Finding("launcher", ERROR, text, "unset " + " ".join(named or values["variables"]), values)]
    values |= {
        "launcher": found.launcher, "rank": found.rank, "size": found.size, "local_rank": found.local_rank,
        "local_size": found.local_size, "master_addr": found.master_addr, "master_port": found.master_port,
    }  # fmt: skip
    text = "none: this process is alone" if found.launcher == "alone" else (
        f"{found.launcher}: rank {found.rank} of {found.size}, local rank {found.local_rank} of {found.local_size}"
        + (f", master {found.master_addr}:{found.master_port}" if found.master_addr else "")
    )  # fmt: skip
    findings = [Finding("launcher", OK, text + (f". Set: {seen}" if seen else ""), values=values)]
    findings += _check_unused(env, found)
    if found.master_addr is not None and found.size > 1:
        findings += _check_master(found, values)
    return findings


def _check_unused(env: Mapping[str, str], found: Identity) -> list[Finding]:
    """Return findings for variables by which a program would seem to have ranks that don't come."""
    tasks = env.get("SLURM_NTASKS", "").strip()
    if found.launcher == "alone" and tasks.isdigit() and int(tasks) > 1:
        text = f"SLURM_NTASKS={tasks}, but srun has not started this process, so it is alone"
        return [Finding("launcher.slurm", WARNING, text, f"srun -n {tasks} python -m collectives.doctor")]
    stray = [name for name in ("MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE") if env.get(name)]
    if found.launcher == "alone" and stray:
        text = f"{' and '.join(stray)} {'is' if len(stray) == 1 else 'are'} set, but no rank or size is: this is alone"
        return [Finding("launcher.stray", WARNING, text, "unset " + " ".join(stray))]
    return []


def _check_master(found: Identity, values: dict) -> list[Finding]:
    """Look the master's name up, and connect where torchrun's agent serves a store there."""
    connect = found.agent_store
    program = _REACH.format(name=found.master_addr, port=found.master_port, connect=connect)
    outcome = start_python(program, _LIMIT).wait()
    values["master_addresses"] = outcome.values.get("addresses", [])
    values["master_reached"] = outcome.values.get("reached") if connect else None
    address = f"{found.master_addr}:{found.master_port}"
    if not values["master_addresses"]:
        text = f"the name of MASTER_ADDR={found.master_addr} is not found: {outcome.error}"
        return [Finding("launcher.master", ERROR, text, f"getent hosts {found.master_addr}   # or an IP address")]
    if connect and not outcome.values.get("reached"):
        text = f"nothing answers at {address}, where torchrun's agent has the job's store: {outcome.error}"
        return [Finding("launcher.master", ERROR, text, f"nc -vz {found.master_addr} {found.master_port}")]
    # Not by what a host's name resolves to: on that host itself it is often 127.0.1.1.
    here = re.fullmatch(r"localhost|127\..*|::1", found.master_addr, re.IGNORECASE)
    if here and found.local_size is not None and found.local_size < found.size:
        text = f"MASTER_ADDR={found.master_addr} is each node's own address, and the ranks are on several nodes"
        return [Finding("launcher.master", ERROR, text, "export MASTER_ADDR=<the address of rank 0's node>")]
    return []
