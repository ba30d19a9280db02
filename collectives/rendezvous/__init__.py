"""Rendezvous: how ranks find each other, and the communicators that are opened over them.

`join` selects how the ranks exchange the records that bring the unique id from rank 0 to the other
ranks: over a torch store (`store`, `tcp_store`), by the job's name (`by_name`), or over MPI
(`mpi`). `peers` has the records and the outcome, `job_store` the store that outlives it, and `open`
opens a communicator over it. `world` has the communicator of the whole job, `process_groups` those
of torch's process groups, and `control` small ones on host memory over the ranks of another
communicator.
"""

from .control import bootstrap_on_host, dup_on_host, open_control
from .join import identify_process, join_over_store, join_rendezvous
from .open import open_communicator
from .peers import PeerInfo, Rendezvous
from .process_groups import (
    drop_communicator,
    get_communicator,
    get_default_group,
    get_group_timeout,
    init_process_group,
)
from .world import init

__all__ = [
    "PeerInfo",
    "Rendezvous",
    "bootstrap_on_host",
    "drop_communicator",
    "dup_on_host",
    "get_communicator",
    "get_default_group",
    "get_group_timeout",
    "identify_process",
    "init",
    "init_process_group",
    "join_over_store",
    "join_rendezvous",
    "open_communicator",
    "open_control",
]
