"""The variables of the environment that are read: of launchers, of this package, of NCCL and Gloo."""

from __future__ import annotations

import difflib
import importlib
import os
import re
import socket

from .findings import Section

__all__ = ["examine_variables"]

_SHOWN = re.compile(
    r"(RANK|WORLD_SIZE|GROUP_RANK|ROLE_RANK|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_WORLD_SIZE|MASTER_ADDR|MASTER_PORT"
    r"|TORCHELASTIC_\w+|OMPI_COMM_WORLD_\w+|PMI_\w+|PMIX_(RANK|NAMESPACE)|MPI_LOCAL\w+|SLURM_(PROCID|NTASKS|LOCALID"
    r"|JOB_ID|STEP_ID|STEP_NODELIST|NNODES|NTASKS_PER_NODE)|COLLECTIVES_\w+|NCCL_\w+|GLOO_\w+|HOROVOD_\w+"
    r"|TORCH_(NCCL|DISTRIBUTED)_\w+|CUDA_\w+|OMP_NUM_THREADS|LD_LIBRARY_PATH|LD_PRELOAD|PYTHONPATH)"
)
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY", re.I)
_SECONDS = 2


def examine_variables(section: Section) -> None:
    """Fill in the variables that matter and are set, and what the launcher's say together."""
    for name in sorted(os.environ):
        if _SHOWN.fullmatch(name) and not _SECRET.search(name):
            section.values[name] = os.environ[name]
    if not section.values:
        section.values["set"] = "none"
    _examine_names(section)
    try:
        launcher = importlib.import_module("collectives.launcher")
    except Exception:  # the installation's section says why
        return
    try:
        identity = launcher.detect_launcher()
    except ValueError as error:
        section.fail(f"the launcher's variables contradict each other: {error}", "unset those that are left over")
        return
    section.values["launcher"] = f"{identity.launcher}: rank {identity.rank} of {identity.size}"
    if identity.launcher == "alone" and os.environ.get("SLURM_NTASKS", "1") not in ("", "1"):
        section.warn(
            f"SLURM_NTASKS={os.environ['SLURM_NTASKS']} is set, and srun did not start this process: it is alone",
            "srun python ..., in place of python ... in the batch script",
        )
    if identity.launcher == "env" and identity.size > 1 and not identity.master_addr:
        section.warn("RANK and WORLD_SIZE are set, and MASTER_ADDR is not", "export MASTER_ADDR=... MASTER_PORT=29500")
    if identity.rank and identity.master_addr and identity.master_port:
        _try_master(section, identity.master_addr, identity.master_port)


def _examine_names(section: Section) -> None:
    try:
        known = importlib.import_module("collectives.environment").KNOWN
    except Exception:  # the installation's section says why
        return
    for name in sorted(os.environ):
        if name.startswith("COLLECTIVES_") and name not in known and not name.startswith("COLLECTIVES_TEST_"):
            near = difflib.get_close_matches(name, sorted(known), 1)
            remedy = f"unset {name}" + (f"; export {near[0]}=..." if near else "")
            section.warn(f"{name} is unknown to this version and sets nothing", remedy)


def _try_master(section: Section, host: str, port: int) -> None:
    try:
        socket.create_connection((host, port), _SECONDS).close()
        section.values["rendezvous"] = f"{host}:{port} answers"
    except OSError as error:
        section.values["rendezvous"] = f"{host}:{port}: {error}"
        section.warn(
            f"nothing answers at MASTER_ADDR:MASTER_PORT ({host}:{port}: {error})",
            "start rank 0, or correct MASTER_ADDR and MASTER_PORT",
        )
