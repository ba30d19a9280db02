"""Communicator and its parts: engines, asynchronous work, groups, memory, algorithms, watchdog."""

from .agree import ComparedValue, all_gather_bytes, all_gather_object, verify_same
from .common_memory import allocate_common, is_on_one_host
from .communicator import Communicator
from .config import CommConfig, gather_config
from .engine import Engine, EngineInfo, engines, get_engine, parse_device, resolve_device
from .liveness import RankExits, describe_exit, has_ended, publish_process, this_process
from .malloc import keep_freed_memory
from .mem_pool import use_mem_pool
from .registration import BufferRegistrationCache, Registration
from .tags import make_tag
from .waiting import RankWait, call_with_timeout, first_line, format_ranks, log_while_waiting
from .watchdog import StatusStore, watch
from .work import Work

__all__ = [
    "BufferRegistrationCache",
    "CommConfig",
    "Communicator",
    "ComparedValue",
    "Engine",
    "EngineInfo",
    "RankExits",
    "RankWait",
    "Registration",
    "StatusStore",
    "Work",
    "all_gather_bytes",
    "all_gather_object",
    "allocate_common",
    "call_with_timeout",
    "describe_exit",
    "engines",
    "first_line",
    "format_ranks",
    "gather_config",
    "get_engine",
    "has_ended",
    "is_on_one_host",
    "keep_freed_memory",
    "log_while_waiting",
    "make_tag",
    "parse_device",
    "publish_process",
    "resolve_device",
    "this_process",
    "use_mem_pool",
    "verify_same",
    "watch",
]
