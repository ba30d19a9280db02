"""Package horovod of a process that was spawned after `collectives.horovod.install`.

It installs there, too.
"""

from collectives.horovod import install

__all__ = []

install()
