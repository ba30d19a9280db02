"""What ``import horovod`` finds in a process that was spawned by one where `collectives.horovod.install` was called."""

from collectives.horovod import install

__all__ = []

install()
