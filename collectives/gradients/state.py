"""HookState: which ranks average, and how; everything about it is checked when it is made."""

from __future__ import annotations

import gc
import math
import numbers
import os
import weakref

import torch
import torch.distributed as dist

from ..arrays import kind_of
from ..comm.communicator import Communicator
from ..comm.memory import ReturningBuffers
from ..compression.base import Bucket, Plain, Wire, parse_wire
from ..compression.by_name import make_wire
from ..compression.hierarchical import Hierarchical
from ..errors import InvalidArgument, InvalidUsage
from ..layout import WIRE_BLOCKS, WIRE_FORMATS
from ..optim import _Optimizer
from ..parameter_names import Names
from ..rendezvous.process_groups import get_default_group
from ..torch_patches import scalers_in_use
from .compiled import enroll
from .local_sgd import LocalSGD
from .pipeline import Reduction
from .zero import ShardedStep

__all__ = ["HookState", "check_group"]

_ALGORITHMS = ("native", "ring", "direct")


class HookState:
    """The state of `fused_allreduce`: which ranks average, and how. All of it composes.

    `comm`: a `Communicator` to use; or `process_group`: a torch process group over whose ranks one is opened at first
    use; with neither, the default group. Where torch's DDP was built over a subgroup, it must be named here
    (`collectives.DistributedDataParallel` names its own): a state that names none is refused then.

    The wire. `wire`: "fp32" (as they are), "bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "int8" (these three with a scale for
    each `block` values, 128, 256 or 512), or "powersgd:RANK" (Vogels 2019). Whatever it is, sums are taken in fp32, in
    rank order, and rounded to the wire once. `error_feedback`: what is lost is kept in fp32, by parameter, and added in
    the next step. `stochastic_rounding`: the wire rounds at random, with the unrounded value as the mean.
    `average`: divide by the number of ranks, in fp32; False leaves the sum. `predivide`: divide by this before the sum
    and by the rest behind it, for sums of fp16 that would overflow on NCCL. `algorithm`: "native", "ring" or "direct"
    (fp32 alone). `deterministic`: the bits depend on the ranks' gradients alone, not on buckets, streams or
    engine; clipping then takes a pass of its own for the norm. `streams`: spread buckets over so many communicators
    with a stream (host: a thread) each; None: COLLECTIVES_STREAMS, else 1. `hierarchical`: True reduces inside each
    machine first and sends only parts of the result between them; "auto" and False leave that to the engine.

    What follows the sum. `max_norm`: clip the gradient of all parameters to this norm, as
    ``torch.nn.utils.clip_grad_norm_`` does after the backward; `norm_type`: 2, another p, or infinity (2 is found in
    the reduction's own pass). `check_finite`: count non-finite values; only with `optimizer` does it leave a step out.
    `optimizer`: a `collectives.optim` one, stepped inside of the backward: each rank reduces and updates its part of
    each bucket and all gather the parameters, so that its state takes 1/n of the memory; see
    `collectives.gradients.zero`. Where max_norm, check_finite or a GradScaler must see all first, the updates wait for
    the last bucket; non-finite gradients leave the step out on all ranks.
    `local_steps`: k, or (first, k), for post-local SGD: after `first` averaged steps each rank goes on with its own
    gradients and the models are averaged at every k-th step (Lin 2018). A GradScaler is looked for when it is first of
    concern; ``state.grad_scaler = scaler`` names it, and False says that there is none.

    `zero_copy`: on the host, make large buckets shared memory at their addresses once DDP keeps them, so that they are
    averaged with no staging copy, where malloc has given them mappings of their own (the state's repr tells; it depends
    on their size, 32 MiB being enough, and on what was freed before). A child that is forked then can't change them,
    and is not to read them: it may see what the parent writes later.

    ``fully_shard(module, hook_state=...)`` takes a state, too: its gradients go by that wire, and are clipped and
    stepped as above; make `optimizer` from the sharded parameters and set it (``state.optimizer = optimizer``).
    `gather` is for it alone: the format, one of the 16-bit and 8-bit wires', in which parameters are gathered, while
    the rank that owns them keeps them as they are. One state may serve all units of a model, but not DDP beside them.

    Residuals and the like are saved by the parameters' names, in the modules on which the hook was registered with this
    state; `register` names those of others.

    After a step: `grad_norm`, `nonfinite`, `bytes_on_wire`, `stats()`. One state may serve several DDP modules of the
    same group. Picklable, with all that training needs to go on bit for bit: communicator and group are left out and
    opened again at first use; an optimizer is to be given again (``state.optimizer = optimizer``), and takes over what
    was saved of its state. `state_dict()` is for another number of ranks. Raises `InvalidArgument`, with the reason,
    for what doesn't go together.
    """

    def __init__(
        self, comm: Communicator | None = None, *, process_group=None, wire: str = "fp32", block: int = 256,
        error_feedback: bool = False, stochastic_rounding: bool = False, average: bool = True,
        predivide: float | None = None, algorithm: str = "native", deterministic: bool = False,
        streams: int | None = None, max_norm: float | None = None, norm_type: float = 2, check_finite: bool = False,
        optimizer=None, local_steps=None, hierarchical="auto", zero_copy: bool = True, gather: str | None = None,
    ):  # fmt: skip
        if comm is not None and not isinstance(comm, Communicator):
            raise InvalidArgument(f"comm must be a collectives.Communicator or None, not {kind_of(comm)}")
        if comm is not None and process_group is not None:
            raise InvalidArgument("comm and process_group both say which ranks average: give one of them")
        self.units = None  # what `collectives.sharded` has made of it; then it is none for DDP
        self._options = {
            "wire": wire, "block": block, "error_feedback": error_feedback, "stochastic_rounding": stochastic_rounding,
            "average": average, "predivide": predivide, "algorithm": algorithm, "deterministic": deterministic,
            "streams": _streams(streams), "max_norm": max_norm, "norm_type": norm_type, "check_finite": check_finite,
            "local_steps": local_steps, "hierarchical": hierarchical, "zero_copy": zero_copy,
            "gather": gather,
        }  # fmt: skip
        _check(self._options, optimizer)
        self.comm = comm
        self.names = Names()
        self._number = enroll(self)
        self._group = None
        self._pickled_size = None
        self._returning = ReturningBuffers()
        self._scaler = None  # False: there is none; a weak reference; None: not looked for yet
        self._optimizer = None
        self._saved_optimizer = None
        self._local = None if local_steps is None else LocalSGD(*_local_steps(local_steps))
        self._wire = self._make_wire()
        self.shares_memory = zero_copy and isinstance(self._wire, Plain)  # other wires send from memory of their own
        self.reduction = Reduction(
            self._wire, average=average, predivide=predivide, streams=self._options["streams"], max_norm=max_norm,
            norm_type=norm_type, check_finite=check_finite, deterministic=deterministic, sharded=None,
            local=self._local, scaler=self._find_scaler, told=self._told, names=self.names,
        )  # fmt: skip
        if optimizer is not None:
            self.optimizer = optimizer
        if process_group is not None:
            self.process_group = process_group

    def __getattr__(self, name):
        options = self.__dict__.get("_options", {})
        if name in options:
            return options[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name, value):
        if name in self.__dict__.get("_options", {}):
            raise InvalidUsage(f"{name} is fixed when a HookState is made: make another one with {name}={value!r:.60}")
        super().__setattr__(name, value)

    def _make_wire(self) -> Wire:
        options = self._options
        algorithm = None if options["algorithm"] == "native" else options["algorithm"]
        names = ("block", "error_feedback", "stochastic_rounding", "deterministic")
        given = {name: options[name] for name in names}
        wire = make_wire(options["wire"], algorithm=algorithm, names=self.names, **given)
        return Hierarchical(wire) if options["hierarchical"] is True else wire

    def _told(self) -> dict:
        """Give what must be the same on all ranks."""
        told = {name: value for name, value in self._options.items() if name != "zero_copy"}
        told["optimizer"] = type(self._optimizer).__name__ if self._optimizer is not None else None
        told["loaded from a saved state"] = self.reduction.buckets.resumes
        told["what the wire starts from"] = self._wire.starts_from()
        return told

    # ---- What is known after a step.

    @property
    def grad_norm(self) -> float | None:
        """The norm of the last backward's reduced gradient, before clipping; None where nothing asks for it.

        Without the factor of a GradScaler, but for deferred updates, of which only the scaler knows it. On a GPU it
        waits for it.
        """
        norm = self.reduction.norm
        return norm if norm is None or isinstance(norm, float) else norm.item()

    @property
    def nonfinite(self) -> int | None:
        """The number of non-finite values in the last backward's reduced gradient; None where nothing asks for it."""
        found = self.reduction.nonfinite
        return found if found is None else int(found)

    @property
    def bytes_on_wire(self) -> int:
        """The bytes that this rank has sent for the last backward, as rings send them: 2(n-1)/n of what is reduced."""
        return self.reduction.bytes_on_wire

    def stats(self) -> dict:
        """Give totals since the state was made: backwards, buckets, bytes, and seconds spent inside of the hook.

        ``ratio``: the bytes on the wire by what fp32 would have sent.
        """
        totals = dict(self.reduction.totals)
        as_fp32 = totals["bytes_as_fp32"]
        return {**totals, "ratio": totals["bytes_on_wire"] / as_fp32 if as_fp32 else 1.0}

    # ---- Ranks.

    @property
    def process_group(self):
        """The process group whose ranks average; None: the default group, or `comm`'s ranks."""
        return self._group

    @process_group.setter
    def process_group(self, group):
        if not isinstance(group, dist.ProcessGroup):
            raise InvalidArgument(f"process_group must be a torch.distributed.ProcessGroup, not {kind_of(group)}")
        if self.comm is not None:
            raise InvalidArgument("this state has a communicator, which says which ranks average")
        self._group = group
        self._pickled_size = None

    def own_group(self):
        """Give the process group to open a communicator over; `InvalidUsage` where there is none."""
        if self._group is not None:
            return self._group
        world = get_default_group("the hook's", "give HookState a comm or process_group")
        if self._pickled_size not in (None, world.size()):
            raise InvalidUsage(
                f"this HookState was pickled with a group of {self._pickled_size} ranks and the default group has "
                f"{world.size()}: set its process_group"
            )
        return world

    def see(self, comm, bucket: Bucket) -> None:
        """Look whether a bucket on the host comes again, and let the engine use its memory where it lies."""
        if bucket.index == 0:
            self._returning.begin()
        self._returning.see(comm, bucket.flat, lambda: bucket.params[0])

    # ---- Modules.

    def register(self, module: torch.nn.Module) -> None:
        """Take note of a module whose gradients this state serves: its parameters' names are those that are saved.

        ``register_comm_hook(state, collectives.fused_allreduce)`` does it. It is to be called where that is not so, as
        for a hook of one's own that calls `fused_allreduce` for several modules; on all ranks in the same order.
        """
        self.names.register(module.module if isinstance(module, torch.nn.parallel.DistributedDataParallel) else module)

    # ---- The optimizer and the scaler.

    @property
    def optimizer(self):
        """The optimizer that is stepped inside of the backward, or None."""
        return self._optimizer

    @optimizer.setter
    def optimizer(self, optimizer):
        _check(self._options, optimizer)
        sharded = ShardedStep(optimizer) if self.units is None else self.units.stepping(optimizer)
        if self._saved_optimizer is not None:
            sharded.load_state_dict(self._saved_optimizer)
            self._saved_optimizer = None
        self._optimizer = optimizer
        self.reduction.sharded = sharded

    def optimizer_state_dict(self, *, full: bool = True) -> dict:
        """Give the state of `optimizer`: all of it, as torch's optimizers give theirs, or this rank's part.

        `full`: a collective, which all ranks must call; the result fits the same optimizer without a hook, and any
        number of ranks.
        """
        return self._sharded().state_dict(full=full)

    def load_optimizer_state_dict(self, state_dict: dict) -> None:
        """Load what `optimizer_state_dict` gave, or a state dict of torch's optimizer of that name."""
        self._sharded().load_state_dict(state_dict)

    def _sharded(self) -> ShardedStep:
        if self.reduction.sharded is None:
            raise InvalidUsage("this state steps no optimizer: give HookState an optimizer=")
        return self.reduction.sharded

    @property
    def grad_scaler(self):
        """The GradScaler whose factor the gradients have; None: looked for; False: there is none."""
        return self._scaler() if isinstance(self._scaler, weakref.ref) else self._scaler

    @grad_scaler.setter
    def grad_scaler(self, scaler):
        if scaler is not None and scaler is not False and not isinstance(scaler, torch.amp.GradScaler):
            raise InvalidArgument(f"grad_scaler must be a torch.amp.GradScaler, None or False, not {kind_of(scaler)}")
        self._scaler = weakref.ref(scaler) if scaler else scaler

    def _find_scaler(self):
        if self._scaler is False:
            return None
        if isinstance(self._scaler, weakref.ref) and self._scaler() is None:
            self._scaler = None  # another one may have taken its place
        if self._scaler is None:
            found = scalers_in_use()
            if len(found) > 1:
                found = None
                gc.collect()  # an earlier training's, which nobody holds any more, but in a cycle: on all ranks alike
                found = scalers_in_use()
            if len(found) > 1:
                raise InvalidUsage(
                    f"there are {len(found)} GradScalers in use: name this module's, state.grad_scaler = scaler, or "
                    "False where its loss isn't scaled"
                )
            self.grad_scaler = found[0] if found else False
        scaler = self.grad_scaler
        return scaler if scaler and scaler.is_enabled() and scaler._scale is not None else None

    # ---- Pickling.

    def __getstate__(self):
        size = self._pickled_size
        if self.comm is not None:
            size = self.comm.size
        elif self._group is not None and self._group is not dist.group.WORLD:
            size = self._group.size()
        sharded = self.reduction.sharded
        return {
            "layouts": self.reduction.buckets.state_dict(),
            "ranks": self.reduction.ranks or self.reduction.buckets.ranks,  # the latter if not used since loading
            "options": self._options,
            "size": size,
            "wire": self._wire.state_dict(),
            "optimizer": self._saved_optimizer if sharded is None else sharded.state_dict(full=False),
            "local": None if self._local is None else self._local.state_dict(),
            "totals": self.reduction.totals,
        }

    def state_dict(self) -> dict:
        """Give what training needs to go on with any number of ranks; a collective, the same on all of them.

        Residuals are the ranks' mean, so that what the average is owed stays the same; the optimizer's state is full.
        (Pickling the state on each rank and loading it there goes on bit for bit, with as many ranks.)
        """
        wire, lanes = self._wire.state_dict(), self.reduction.lanes
        residuals = wire.get("residuals", {})
        if residuals and not lanes:
            raise InvalidUsage("residuals that were loaded wait for their parameters: call it after a backward")
        for name in sorted(residuals):
            mean = residuals[name].to(lanes[0].comm.device)
            lanes[0].comm.all_reduce(mean, "avg", algorithm="native")
            residuals[name] = mean.cpu()
        return {
            "wire": wire,
            "size": lanes[0].comm.size if lanes else None,
            "optimizer": None if self._optimizer is None else self.optimizer_state_dict(),
            "local": None if self._local is None else self._local.state_dict(),
        }

    def load_state_dict(self, state: dict) -> None:
        """Take what `state_dict` gave, on every rank alike; a local call."""
        wire = dict(state["wire"])
        if wire.get("residuals") and not self._options["average"]:
            # A sum is owed what all ranks kept: fewer ranks keep more each.
            size = self.comm.size if self.comm is not None else self.own_group().size()
            share = state["size"] / size
            wire["residuals"] = {name: residual * share for name, residual in wire["residuals"].items()}
        self._wire.load_state_dict(wire)
        self.reduction.buckets.expect()
        if self._local is not None and state["local"] is not None:
            self._local.load_state_dict(state["local"])
        if state["optimizer"] is not None:
            if self._optimizer is None:
                self._saved_optimizer = state["optimizer"]
            else:
                self.load_optimizer_state_dict(state["optimizer"])

    def __setstate__(self, state):
        self.__init__(**state["options"])
        self._pickled_size = state["size"]
        self._wire.load_state_dict(state["wire"])
        self._saved_optimizer = state["optimizer"]
        if self._local is not None:
            self._local.load_state_dict(state["local"])
        layouts = state["layouts"] if "layouts" in state else state["layout"] and [state["layout"]]  # of one module
        self.reduction.buckets.load(layouts, state["ranks"])
        self.reduction.totals.update(state["totals"])

    def __repr__(self):
        over = self.comm if self.comm is not None else self._group
        shared = self._returning.told() if self._options["zero_copy"] else "off"
        defaults = {"zero_copy": None, "average": None, "streams": 1, **_DEFAULTS}
        others = [f"{key}={value!r}" for key, value in self._options.items() if value != defaults.get(key, value)]
        words = ["default group" if over is None else str(over), f"average={self._options['average']}"]
        words += [other for other in others if not other.startswith(("average=", "zero_copy="))]
        if self._optimizer is not None:
            words.append(f"optimizer={type(self._optimizer).__name__}")
        return f"HookState({', '.join(words)}, zero_copy: {shared})"


def check_group(ddp) -> None:
    """Raise `InvalidUsage` for a DDP object over a part of the default group's ranks, for a state that names none.

    The others would never come to the communicator over all ranks.
    """
    group = ddp.process_group
    if dist.is_initialized() and group is not dist.group.WORLD and group.size() != dist.group.WORLD.size():
        raise InvalidUsage(
            f"this DistributedDataParallel object is over a process group of {group.size()} of the "
            f"{dist.group.WORLD.size()} ranks, and the hook's state names no ranks, which means all of them: register "
            "it with HookState(process_group=group), or use collectives.DistributedDataParallel, which names its own"
        )


_DEFAULTS = {
    "wire": "fp32", "block": 256, "error_feedback": False, "stochastic_rounding": False, "predivide": None,
    "algorithm": "native", "deterministic": False, "max_norm": None, "norm_type": 2, "check_finite": False,
    "local_steps": None, "hierarchical": "auto", "gather": None,
}  # fmt: skip


def _check(options: dict, optimizer) -> None:
    """Refuse what can't be, and what doesn't go together."""
    for name in ("error_feedback", "stochastic_rounding", "average", "deterministic", "check_finite", "zero_copy"):
        if not isinstance(options[name], bool):
            raise InvalidArgument(f"{name} must be True or False, not {options[name]!r}")
    wire, _ = parse_wire(options["wire"])
    block = options["block"]
    if isinstance(block, bool) or not isinstance(block, int) or block not in WIRE_BLOCKS:
        raise InvalidArgument(f"block must be one of {', '.join(map(str, WIRE_BLOCKS))}, not {block!r:.60}")
    gather = options["gather"]
    if gather is not None and (not isinstance(gather, str) or gather not in WIRE_FORMATS):
        formats = ", ".join(map(repr, WIRE_FORMATS))
        raise InvalidArgument(f"gather must be None or one of {formats}, not {gather!r:.60}")
    algorithm = options["algorithm"]
    if not isinstance(algorithm, str) or algorithm not in _ALGORITHMS:
        raise InvalidArgument(f"algorithm must be one of {', '.join(map(repr, _ALGORITHMS))}, not {algorithm!r:.60}")
    for name in ("predivide", "max_norm"):
        if options[name] is not None:
            _positive(name, options[name])
    _positive("norm_type", options["norm_type"], infinite=True)
    hierarchical = options["hierarchical"]
    if not isinstance(hierarchical, bool) and hierarchical != "auto":
        raise InvalidArgument(f"hierarchical must be True, False or 'auto', not {hierarchical!r:.60}")
    if optimizer is not None and not isinstance(optimizer, _Optimizer):
        raise InvalidArgument(
            f"optimizer must be a collectives.optim SGD, Adam or AdamW, whose kernels step parts of parameters, not "
            f"{kind_of(optimizer)}"
        )
    local = options["local_steps"]
    if local is not None:
        _local_steps(local)
    both = [
        (options["predivide"] is not None and not options["average"],
         "predivide splits the division of an average in two, and average=False divides nothing"),
        (algorithm != "native" and wire != "fp32",
         f"a wire of {wire} is always an all-to-all and an all-gather with fused kernels: leave algorithm out"),
        (algorithm == "ring" and options["deterministic"],
         "a ring's order of summing depends on where in a bucket an element lies: use 'direct' or 'native'"),
        (options["deterministic"] and wire not in ("fp32", "bf16", "fp16"),
         f"the bits of {wire} depend on where buckets begin and end: deterministic takes fp32, bf16 and fp16"),
        (options["deterministic"] and options["stochastic_rounding"],
         "random bits are drawn by the place in a bucket: deterministic can't be had with stochastic_rounding"),
        (local is not None and optimizer is not None,
         "with local_steps the ranks' parameters differ, and a sharded optimizer needs them equal"),
        (local is not None and (options["max_norm"] is not None or options["check_finite"]),
         "with local_steps each rank steps on its own gradients, which the hook doesn't look at: clip them with "
         "torch.nn.utils.clip_grad_norm_"),
        (optimizer is not None and options["deterministic"] and options["max_norm"] is not None,
         "a sharded optimizer's norm is of parts, whose places depend on buckets: deterministic takes max_norm without "
         "optimizer"),
        (hierarchical is True and (algorithm != "native" or options["deterministic"]),
         "hierarchical sums machine by machine, not in rank order and by no other algorithm"),
        (hierarchical is True and (options["error_feedback"] or wire == "powersgd"),
         "hierarchical sends parts of what a machine's ranks have summed: no rank's own error could be fed back, and "
         "no matrix is whole"),
        (hierarchical is True and optimizer is not None,
         "the parts of a sharded optimizer are those of a flat reduce-scatter: leave hierarchical out"),
    ]  # fmt: skip
    for wrong, reason in both:
        if wrong:
            raise InvalidArgument(reason)


def _positive(name: str, value, *, infinite: bool = False) -> None:
    number = isinstance(value, numbers.Real) and not isinstance(value, bool) and not math.isnan(value)
    if not number or value <= 0 or (math.isinf(value) and not infinite):
        raise InvalidArgument(f"{name} must be a number above 0, not {value!r:.60}")


def _whole(name: str, value, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidArgument(f"{name} must be a whole number from {least}, not {value!r:.60}")
    return value


def _local_steps(value) -> tuple[int, int]:
    """Give (every, after)."""
    if isinstance(value, tuple | list) and len(value) == 2:
        return _whole("local_steps[1]", value[1], 1), _whole("local_steps[0]", value[0], 0)
    return _whole("local_steps", value, 1), 0


def _streams(value) -> int:
    if value is None:
        named = os.environ.get("COLLECTIVES_STREAMS", "").strip() or "1"
        if not (named.isascii() and named.isdigit() and 0 < int(named) <= 64):
            raise InvalidArgument(f"COLLECTIVES_STREAMS={named}: must be a whole number from 1 to 64")
        return int(named)
    if _whole("streams", value, 1) > 64:
        raise InvalidArgument(f"streams must be at most 64, not {value}")
    return value
