"""CommConfig: settings of a communicator that NCCL takes when it is opened (``ncclConfig_t``)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist

from .._nccl import CONFIG_FIELDS, Library, format_version
from ..arrays import kind_of
from ..errors import InvalidArgument

__all__ = [
    "CommConfig",
    "gather_config",
    "merge_config",
    "order_launches",
    "order_launches_of_torch",
    "parse_config",
    "to_nccl",
]

_CTA_POLICIES = ("default", "efficiency", "zero")  # NCCL's codes 0, 1, 2
_ZERO_CTA_SINCE = 22803
_MAX_CTAS = 64  # NCCL's MAXCHANNELS; versions with a lower limit cap what is above it
_MAX_TEXT = 64  # characters of a name: a config is part of the records of a rendezvous
_END = 2**31

_LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"
_LAUNCH_ORDER_SINCE = 22602


def _flag(value):
    if isinstance(value, bool) or (type(value) is int and value in (0, 1)):
        return bool(value)
    raise ValueError("True or False")


def _integer(low: int, end: int = _END):
    def parse(value):
        if type(value) is int and low <= value < end:
            return value
        raise ValueError(f"an int from {low} to {end - 1}" if end < _END else f"an int of at least {low}")

    return parse


def _name(value):
    if isinstance(value, str) and 0 < len(value) <= _MAX_TEXT and value.isascii() and value.isprintable():
        return value
    raise ValueError(f"a str of 1 to {_MAX_TEXT} printable ASCII characters")


def _policy(value):
    if type(value) is int and 0 <= value < len(_CTA_POLICIES):
        return _CTA_POLICIES[value]
    if isinstance(value, str) and value in _CTA_POLICIES:
        return value
    raise ValueError(f"one of {', '.join(map(repr, _CTA_POLICIES))}")


# Field -> (NCCL's name of it, the function that checks a value).
_FIELDS = {
    "cga_cluster_size": ("cgaClusterSize", _integer(0, 9)),
    "min_ctas": ("minCTAs", _integer(1, _MAX_CTAS + 1)),
    "max_ctas": ("maxCTAs", _integer(1, _MAX_CTAS + 1)),
    "net_name": ("netName", _name),
    "split_share": ("splitShare", _flag),
    "traffic_class": ("trafficClass", _integer(0)),
    "comm_name": ("commName", _name),
    "collnet_enable": ("collnetEnable", _flag),
    "cta_policy": ("CTAPolicy", _policy),
    "shrink_share": ("shrinkShare", _flag),
    "nvls_ctas": ("nvlsCTAs", _integer(1, _MAX_CTAS + 1)),
    "n_channels_per_net_peer": ("nChannelsPerNetPeer", _integer(1, _MAX_CTAS + 1)),
    "nvlink_centric_sched": ("nvlinkCentricSched", _flag),
    "graph_usage_mode": ("graphUsageMode", _integer(0, 3)),
    "num_rma_ctx": ("numRmaCtx", _integer(0)),
    "max_p2p_peers": ("maxP2pPeers", _integer(1)),
    "graph_stream_ordering": ("graphStreamOrdering", _flag),
    "launch_order_implicit": ("launchOrderImplicit", _flag),
    "num_rma_sig": ("numRmaSig", _integer(0)),
    "rma_eager_init": ("rmaEagerInit", _flag),
    "host_cft_mode": ("hostCftMode", _integer(0)),
    "nvls_host_mode": ("nvlsHostMode", _integer(0)),
}


@dataclass(frozen=True)
class CommConfig:
    """Settings of a communicator, for `init`, `Communicator` and `Communicator.split`.

    The names are those of ``ProcessGroupNCCL.Options().config``, and each is a field of
    ``ncclConfig_t``. None is NCCL's default, and in a split the parent's value. All ranks of a
    communicator give the same. The host engine checks the values, and they have no effect there.
    NCCL's variables (NCCL_MIN_CTAS, NCCL_CTA_POLICY, ...) take precedence over these.

    Args:
        min_ctas: The least number of CTAs, and so of SMs, of a collective's kernel, 1 to 64 (NCCL
            2.17).
        max_ctas: The largest number of CTAs, 1 to 64 (NCCL 2.17).
        cga_cluster_size: The number of CTAs in a cluster on Hopper and newer, 0 to 8 (NCCL 2.17).
        net_name: The network module, such as "IB" or "Socket" (NCCL 2.17).
        split_share: Whether the children of a split share this communicator's resources; the abort
            of one then ends all (NCCL 2.18).
        traffic_class: The network's traffic class (NCCL 2.26).
        comm_name: The name in logs and profiles (NCCL 2.27).
        collnet_enable: Whether to use IB SHARP (NCCL 2.27).
        cta_policy: "default", "efficiency" (few CTAs, NCCL 2.27), or "zero" (copy engines in place
            of CTAs where they can be used, NCCL 2.28.3); see `gather_config`.
        shrink_share: As `split_share`, for `Communicator.shrink` (NCCL 2.27).
        nvls_ctas: The number of CTAs of NVLS kernels, 1 to 64 (NCCL 2.27).
        n_channels_per_net_peer: The number of network channels for each pair of ranks, 1 to 64
            (NCCL 2.28).
        nvlink_centric_sched: Whether to order sends and receives by NVLink domains (NCCL 2.28).
        graph_usage_mode: 0 for no CUDA graphs, 1 for one graph, 2 for several graphs or both (NCCL
            2.29).
        num_rma_ctx: The number of contexts of one-sided operations (NCCL 2.29).
        max_p2p_peers: The most peers at one time of sends and receives (NCCL 2.30).
        graph_stream_ordering: Whether to order operations while a graph is captured (NCCL 2.30.7).
        launch_order_implicit: Whether to order the kernels of several communicators of a GPU as the
            host launches them (NCCL 2.31).
        num_rma_sig: The number of signals of one-sided operations (NCCL 2.31).
        rma_eager_init: Whether one-sided operations are set up at once (NCCL 2.31).
        host_cft_mode: NCCL's code (2.31).
        nvls_host_mode: NCCL's code (2.32).

    Raises:
        InvalidArgument: For a value that NCCL doesn't take, and, when a communicator is opened, for
            a field that came with a later NCCL than the loaded one.
    """

    min_ctas: int | None = None
    max_ctas: int | None = None
    cga_cluster_size: int | None = None
    net_name: str | None = None
    split_share: bool | None = None
    traffic_class: int | None = None
    comm_name: str | None = None
    collnet_enable: bool | None = None
    cta_policy: str | None = None
    shrink_share: bool | None = None
    nvls_ctas: int | None = None
    n_channels_per_net_peer: int | None = None
    nvlink_centric_sched: bool | None = None
    graph_usage_mode: int | None = None
    num_rma_ctx: int | None = None
    max_p2p_peers: int | None = None
    graph_stream_ordering: bool | None = None
    launch_order_implicit: bool | None = None
    num_rma_sig: int | None = None
    rma_eager_init: bool | None = None
    host_cft_mode: int | None = None
    nvls_host_mode: int | None = None

    def __post_init__(self):
        for name, value in self.to_dict().items():
            try:
                object.__setattr__(self, name, _FIELDS[name][1](value))
            except ValueError as error:
                raise InvalidArgument(f"config: {name} must be {error}, not {value!r}") from None
        if None not in (self.min_ctas, self.max_ctas) and self.min_ctas > self.max_ctas:
            raise InvalidArgument(f"config: min_ctas={self.min_ctas} is more than max_ctas={self.max_ctas}")

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that are not None, by name."""
        return {each.name: value for each in fields(self) if (value := getattr(self, each.name)) is not None}

    def __repr__(self):
        return f"CommConfig({', '.join(f'{name}={value!r}' for name, value in self.to_dict().items())})"


def parse_config(config) -> CommConfig:
    """Return a config that a caller has passed: a `CommConfig`, a dict of its fields, or None."""
    if config is None:
        return CommConfig()
    if isinstance(config, CommConfig):
        return config
    if not isinstance(config, Mapping):
        raise InvalidArgument(f"config must be a collectives.CommConfig or a dict of its fields, not {kind_of(config)}")
    unknown = [name for name in config if name not in _FIELDS]
    if unknown:
        raise InvalidArgument(
            f"config has no field {', '.join(map(repr, unknown))}; there are {', '.join(CommConfig.__match_args__)}"
        )
    return CommConfig(**config)


def merge_config(parent: CommConfig, config: CommConfig) -> CommConfig:
    """Return the config of a child: its own fields, and its parent's where it gives none."""
    return CommConfig(**{**parent.to_dict(), **config.to_dict()})


def to_nccl(config: CommConfig, library: Library) -> dict[str, Any]:
    """Return the fields of ``ncclConfig_t`` for a library, by NCCL's names.

    Raises `InvalidArgument` for a field, or a value of it, that the library does not know yet.
    """
    settings: dict[str, Any] = {"blocking": 1}
    for name, value in config.to_dict().items():
        since = CONFIG_FIELDS[_FIELDS[name][0]]
        if name == "cta_policy":
            since = max(since, _ZERO_CTA_SINCE if value == "zero" else 0)
            value = _CTA_POLICIES.index(value)
        if since > library.version:
            raise InvalidArgument(
                f"config: {name}={getattr(config, name)!r} needs NCCL {format_version(since)}, and the library at "
                f"{library.path} is {format_version(library.version)}"
            )
        settings[_FIELDS[name][0]] = value
    if "minCTAs" in settings:  # NCCL refuses a minimum without a maximum
        settings.setdefault("maxCTAs", _MAX_CTAS)
    if CONFIG_FIELDS["launchOrderImplicit"] <= library.version and _LAUNCH_ORDER not in os.environ:
        settings.setdefault("launchOrderImplicit", 1)
    return settings


def order_launches(version: int) -> None:
    """Set NCCL_LAUNCH_ORDER_IMPLICIT=1 for NCCL 2.26 to 2.30, unless it is set. `version`: as 23203.

    With it the kernels of several communicators on one GPU run in the order in which the host has
    launched them, so that communicators on different streams can't deadlock. NCCL reads the
    variable at the first launch of the process. From 2.31 on it is a field of the config, which
    `to_nccl` sets; a variable would override what the program gives there.
    """
    if _LAUNCH_ORDER_SINCE <= version < CONFIG_FIELDS["launchOrderImplicit"]:
        os.environ.setdefault(_LAUNCH_ORDER, "1")


def order_launches_of_torch() -> None:
    """Do the same for torch's NCCL at the import: a program may launch by that one first."""
    if torch.version.cuda and dist.is_available() and dist.is_nccl_available():
        major, minor, patch = torch.cuda.nccl.version()[:3]
        order_launches(10000 * major + 100 * minor + patch)


def gather_config(library: Library) -> CommConfig | None:
    """Return the config of a communicator for all-gathers that run beside the computation.

    From NCCL 2.28.3 on it is ``CommConfig(cta_policy="zero")``: all-gathers between registered
    windows (`Communicator.register_window`) then run on the copy engines and take no SMs, where the
    driver and the ranks' places allow it; elsewhere NCCL uses its kernels. None for older libraries
    and for the host engine, where such a communicator gains nothing. For
    ``comm.split(0, config=...)``.
    """
    if library.is_host or library.version < _ZERO_CTA_SINCE:
        return None
    return CommConfig(cta_policy="zero")
