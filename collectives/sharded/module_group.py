"""Module group: the modules of ``fully_shard([a, b])``, which are one unit."""

from __future__ import annotations

from torch import nn

from ..arrays import kind_of
from ..errors import InvalidArgument

__all__ = ["ModuleGroup", "members_of", "parse_modules"]


def parse_modules(modules: list | tuple) -> ModuleGroup | nn.Module:
    """Return the group of a list of modules; a single module as it is. A module inside of another one
    of the list belongs to that one.

    Raises `InvalidArgument` for an empty list, for what is no module, and for a module that is there
    twice.
    """
    strangers = [kind_of(each) for each in modules if not isinstance(each, nn.Module)]
    if strangers or not modules:
        what = f"a list with {strangers[0]}" if strangers else "an empty list"
        raise InvalidArgument(f"module must be a torch.nn.Module or a list of them, not {what}", op="fully_shard")
    if len(set(modules)) < len(modules):
        twice = next(each for each in modules if sum(each is other for other in modules) > 1)
        raise InvalidArgument(f"a {type(twice).__name__} is in the list twice", op="fully_shard")
    inside = {part for each in modules for part in each.modules() if part is not each}
    roots = [each for each in modules if each not in inside]
    return roots[0] if len(roots) == 1 else ModuleGroup(roots)


def members_of(module: nn.Module) -> list[nn.Module]:
    """Return the modules of a group; of another module that module alone."""
    return list(module) if isinstance(module, ModuleGroup) else [module]


class ModuleGroup(nn.ModuleList):
    """Modules that are one unit: it is gathered before the forward of the first one that runs, and
    resharded after that of the last one.

    `left`: those that have not run since the unit was gathered. `current`: the position of the one
    that began last. The group is in no other module.
    """

    def __init__(self, modules):
        super().__init__(modules)
        self.left: set[nn.Module] = set()
        self.current = 0

    @property
    def unit_name(self) -> str:
        """Text for errors."""
        return f"[{', '.join(type(each).__name__ for each in self)}]"

    @property
    def form(self) -> tuple:
        """What the collectives of a forward that begins with `current` depend on."""
        return self.current, *(each.training for each in self)

    def enter(self, module: nn.Module) -> bool:
        """Note that a module's forward begins; return whether it is the first one."""
        members = list(self)
        self.current = next(at for at, each in enumerate(members) if each is module)
        is_first = not self.left
        if is_first:
            self.left = set(members)
        return is_first

    def leave(self, module: nn.Module) -> bool:
        """Note that a module's forward has ended; return whether all have run."""
        was_left = module in self.left
        self.left.discard(module)
        return was_left and not self.left
