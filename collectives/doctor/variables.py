"""Environment variables: which are set of those that are read here, and which set nothing or can't be used.

A value is shown only for these variables, and never where a name looks like that of a secret.
"""

from __future__ import annotations

import os
import re
import shlex
import warnings
from collections.abc import Mapping

from ..environment import check_variables, find_unknown
from ..errors import InvalidArgument
from .finding import ERROR, OK, WARNING, Finding

__all__ = ["check_environment", "shown_variables"]

_SHOWN = re.compile(
    r"(COLLECTIVES|NCCL|GLOO|TORCH_NCCL|TORCH_GLOO|HOROVOD|OMP|KMP|MALLOC|CUPY)_\w+$"
    r"|(CUDA_(VISIBLE_DEVICES|DEVICE_ORDER|HOME|MODULE_LOADING|LAUNCH_BLOCKING)|NVIDIA_VISIBLE_DEVICES"
    r"|MKL_NUM_THREADS|GLIBC_TUNABLES|XDG_CACHE_HOME|LD_LIBRARY_PATH|LD_PRELOAD|CONDA_PREFIX|VIRTUAL_ENV|PYTHONPATH"
    r"|TORCH_DISTRIBUTED_DEBUG|TORCH_CPP_LOG_LEVEL|PYTORCH_CUDA_ALLOC_CONF)$"
)
_SECRET = re.compile(r"TOKEN|SECRET|PASS|CREDENTIAL|AUTH|COOKIE|PRIVATE|API_?KEY|ACCESS_?KEY", re.IGNORECASE)
_HIDDEN = "(not shown)"
_PREFIX = "COLLECTIVES_"


def shown_variables(environ: Mapping[str, str], names: re.Pattern = _SHOWN) -> dict[str, str]:
    """Return the set variables with such names and their values; secrets' values are replaced."""
    found = {}
    for name in sorted(environ):
        if names.match(name):
            value = re.sub(r"://[^/@\s]*@", "://(not shown)@", environ[name])
            found[name] = _HIDDEN if _SECRET.search(name) else value
    return found


def check_environment(environ: Mapping[str, str] | None = None) -> list[Finding]:
    """Check the variables that are set. ``environ``: default ``os.environ``."""
    env = os.environ if environ is None else environ
    values = shown_variables(env)
    text = " ".join(f"{name}={value}" for name, value in values.items()) or "none that is read here is set"
    found = [Finding("variables", OK, text, values=values)]
    for name, near in sorted(find_unknown(env).items()):
        value = env[name] if not _SECRET.search(name) else "..."
        found.append(
            Finding(
                f"variables.{name}", WARNING,
                f"{name} is unknown to this version and sets nothing" + (f"; {near} is known" if near else ""),
                f"unset {name}" + (f"; export {near}={shlex.quote(value)}" if near else ""),
            )
        )  # fmt: skip
    try:
        _check_values()
    except InvalidArgument as error:
        named = re.search(rf"{_PREFIX}\w+", error.message)
        found.append(Finding("variables.value", ERROR, error.message, f"unset {named[0] if named else ''}".strip()))
    return found


def _check_values() -> None:
    """Check values as a communicator does, without its warnings of unknown names."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_variables()
