"""HookState: the options of `fused_allreduce`, and everything that it keeps from step to step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist

from ..arrays import kind_of
from ..comm.communicator import Communicator
from ..comm.registration import BufferRegistrationCache
from ..compression import Bucket, NoCompression
from ..errors import InvalidArgument, InvalidUsage
from ..optim import FusedOptimizer
from ..parameter_names import ParameterNames
from ..rendezvous.process_groups import get_default_group
from ..torch_compat import open_process_groups
from .compilation import compile_gradient_kernels
from .compiled import register_state
from .ddp_fast_path import FastPath
from .ddp_reducer import DDPReducer
from .optimizer_in_backward import OptimizerInBackward
from .options import HookOptions, check_names, list_options
from .pipeline import GradientPipeline
from .saved_state import common_state, load_common_state, pickled_state, restore_pickled_state
from .scaler_lookup import ScalerLookup
from .unused_states import forget, watch
from .zero import ShardedStep

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..argument_types import HookArguments

__all__ = ["HookState", "has_lost_group"]


def has_lost_group(state: HookState) -> bool:
    """Return whether a state's group was named by a module and has been destroyed since, as in elastic jobs."""
    return state.group_from_module and state.process_group not in open_process_groups()


def _describe_comm(given) -> str:
    """Return what was passed in place of a communicator, and for a model what to write."""
    if isinstance(given, torch.nn.Module):
        hint = ": the model gets the state, by ddp.register_comm_hook(HookState(), collectives.fused_allreduce)"
        return kind_of(given) + hint
    return kind_of(given)


class HookState:
    """State of `fused_allreduce`: the ranks that average, the options, and what is kept from step
    to step.

    All options compose. Their names, defaults and meanings are those of
    `collectives.gradients.options.HookOptions`: ``HookState(wire="int8", error_feedback=True)``.

    With `optimizer`, each rank reduces and updates its shard of each bucket and all ranks
    all-gather the parameters, so that the optimizer's state takes 1/n of the memory; see
    `collectives.gradients.zero`. If max_norm, check_finite or a GradScaler needs all gradients
    first, the updates wait for the last bucket; non-finite gradients leave the step out on all
    ranks.

    ``fully_shard(module, hook_state=...)`` takes a state, too: its gradients go by that wire, and
    are clipped and stepped as above. Make `optimizer` from the sharded parameters and set it
    (``state.optimizer = optimizer``). One state may serve all units of a model, but no DDP module
    as well.

    Residuals and other state are saved by the parameters' names, in the modules on which the hook
    was registered with this state; `register` names the parameters of others.

    After a step: `grad_norm`, `nonfinite`, `bytes_on_wire`, `stats()`. One state may serve several
    DDP modules of the same group. A state can be pickled, with all that training needs to go on:
    bit for bit with the fp32 wire and without `max_norm`, else to a rounding in the first step,
    since a new DDP object has other buckets there. Communicator and group are left out and opened
    again at first use; an optimizer must be set again (``state.optimizer = optimizer``), and takes
    over the saved state. `state_dict()` is for another number of ranks.

    Args:
        comm: The communicator of the ranks that average. None: see `process_group`.
        process_group: A torch process group, over whose ranks a communicator is opened at first
            use. None: that of `comm`, and without one the default group. If torch's DDP was built
            over a subgroup, name that group here; else the state is refused
            (`collectives.DistributedDataParallel` names its own).
        optimizer: An optimizer of `collectives.optim` that is stepped inside of the backward.
        grad_scaler: The GradScaler that scales the loss. False: none does. None: the only one in
            use when it first matters; several are an error then. It can be set later
            (``state.grad_scaler = scaler``), and isn't pickled.
        **options: The options of `HookOptions`.

    Raises:
        InvalidArgument: With the reason, for options that don't go together.
        TypeError: For a name that is no option.
    """

    options: HookOptions
    """The options, which don't change."""
    comm: Communicator | None
    """The communicator that was given, or None."""

    def __init__(
        self, comm: Communicator | None = None, *, process_group: dist.ProcessGroup | None = None,
        optimizer: FusedOptimizer | None = None, grad_scaler: torch.amp.GradScaler | Literal[False] | None = None,
        **options: Unpack[HookArguments],
    ):  # fmt: skip
        if comm is not None and not isinstance(comm, Communicator):
            raise InvalidArgument(f"comm must be a collectives.Communicator or None, not {_describe_comm(comm)}")
        if comm is not None and process_group is not None:
            raise InvalidArgument("comm and process_group both say which ranks average: give one of them")
        check_names("HookState", self.__init__, options)
        self.options = HookOptions(**options)
        self.comm = comm
        self.units = None  # set by `collectives.sharded`; then the state is refused for DDP
        self.parameter_names = ParameterNames()
        self.registered = False  # `register` was called
        self._number = register_state(self)
        self._group, self.group_from_module = None, False  # a DistributedDataParallel of ours has named it
        self.pickled_size = None  # the ranks of a state that was unpickled
        self._registrations = BufferRegistrationCache()
        self._scaler_lookup = ScalerLookup()
        self.saved_optimizer = None  # state that waits for its optimizer
        self.pipeline = GradientPipeline(self.options, self.parameter_names, self._scaler_lookup.find)
        self.compressor = self.pipeline.compressor
        # Other compressors send from memory of their own.
        self.shares_memory = self.options.zero_copy and isinstance(self.compressor, NoCompression)
        self.reducer, self.fast_path = DDPReducer(self.pipeline), FastPath()
        self.grad_scaler = grad_scaler
        if optimizer is not None:
            self.optimizer = optimizer
        if process_group is not None:
            self.process_group = process_group
        watch(self)

    def __getattr__(self, name):
        options = self.__dict__.get("options")
        if options is not None and name in vars(options):
            return getattr(options, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name, value):
        if "options" in self.__dict__ and name in vars(self.options):
            raise InvalidUsage(f"{name} is fixed when a HookState is made: make another one with {name}={value!r:.60}")
        super().__setattr__(name, value)

    # ---- Results of a step.

    @property
    def grad_norm(self) -> float | None:
        """The norm of the last backward's reduced gradient, before clipping.

        None where no option needs it. A GradScaler's factor is divided out, except with deferred
        updates, where only the scaler knows it. On a GPU this waits for the norm.
        """
        norm = self.pipeline.norm
        return norm if norm is None or isinstance(norm, float) else norm.item()

    @property
    def nonfinite(self) -> int | None:
        """The number of non-finite values in the last backward's reduced gradient.

        None where no option needs it.
        """
        found = self.pipeline.nonfinite
        return found if found is None else int(found)

    @property
    def bytes_on_wire(self) -> int:
        """The bytes sent for the last backward, as rings send: 2(n-1)/n of what is reduced."""
        return self.pipeline.bytes_on_wire

    def stats(self) -> dict:
        """Return totals since the state was made: backwards, buckets, bytes, seconds in the hook.

        The entry ``"ratio"`` is the bytes on the wire divided by the bytes that fp32 would have
        sent.
        """
        totals = dict(self.pipeline.totals)
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
        self._group, self.group_from_module = group, False
        self.pickled_size = None

    def get_process_group(self):
        """Return the process group to open a communicator over.

        Raises `InvalidUsage` where there is none.
        """
        if self._group is not None and not has_lost_group(self):
            return self._group
        world = get_default_group("the hook's", "give HookState a comm or process_group")
        if self.pickled_size not in (None, world.size()):
            raise InvalidUsage(
                f"this HookState was pickled with a group of {self.pickled_size} ranks and the default group has "
                f"{world.size()}: set its process_group"
            )
        return world

    def share_memory(self, comm, bucket: Bucket) -> None:
        """Register a bucket's memory with NCCL, if the bucket has come back at the same address; on the
        host, note whether the engine uses it in place.
        """
        if bucket.index == 0:
            self._registrations.begin_round()
        self._registrations.observe(comm, bucket.flat, lambda: bucket.params[0])

    # ---- Modules.

    def register(self, module: torch.nn.Module) -> None:
        """Register a module whose gradients this state serves: state is saved by its parameters'
        names.

        ``register_comm_hook(state, collectives.fused_allreduce)`` does it. Call it for modules
        where that is not so, such as those of your own hook that calls `fused_allreduce` for
        several modules; on all ranks in the same order.
        """
        module = module.module if isinstance(module, torch.nn.parallel.DistributedDataParallel) else module
        self.registered = True
        self.parameter_names.register(module)
        compile_gradient_kernels(module.parameters(), options=self.options, steps=self.optimizer is not None)

    # ---- The optimizer and the scaler.

    @property
    def optimizer(self):
        """The optimizer that is stepped inside of the backward, or None."""
        step = self.pipeline.optimizer_step
        return None if step is None else step.optimizer

    @optimizer.setter
    def optimizer(self, optimizer):
        self.options.check_optimizer(optimizer)
        if self.units is not None:
            if self.options.parameters_as_bucket_view:
                raise InvalidArgument(
                    "parameters_as_bucket_view is for DDP's buckets: fully_shard's units are flat and gathered in place"
                )
            step = self.units.make_step(optimizer)
        else:
            step = ShardedStep(optimizer, parameters_as_bucket_view=self.options.parameters_as_bucket_view)
        if self.saved_optimizer is not None:
            step.load_state_dict(self.saved_optimizer)
            self.saved_optimizer = None
        self.pipeline.compose(step)
        params = [each for group in optimizer.param_groups for each in group["params"]]
        compile_gradient_kernels(params, options=self.options, steps=True)

    def optimizer_state_dict(self, *, full: bool = True) -> dict:
        """Return the state of `optimizer`.

        Args:
            full: Return all of the state, as torch's optimizers do: a collective, which all ranks
                must call. The result fits the same optimizer without a hook, and any number of
                ranks. False: return this rank's part.
        """
        return self._get_step().state_dict(full=full)

    def load_optimizer_state_dict(self, state_dict: dict) -> None:
        """Load an `optimizer_state_dict`, or a state dict of torch's optimizer of that name."""
        self._get_step().load_state_dict(state_dict)

    def _get_step(self) -> OptimizerInBackward:
        if self.pipeline.optimizer_step is None:
            raise InvalidUsage("this state steps no optimizer: give HookState an optimizer=")
        return self.pipeline.optimizer_step

    @property
    def grad_scaler(self):
        """The GradScaler that scales the gradients; None: looked for; False: there is none."""
        return self._scaler_lookup.scaler

    @grad_scaler.setter
    def grad_scaler(self, scaler):
        self._scaler_lookup.scaler = scaler

    def find_scaler(self):
        """Return the GradScaler in use, or None.

        Raises `InvalidUsage` where it isn't clear which one that is.
        """
        return self._scaler_lookup.find()

    # ---- Pickling, and state dicts.

    def __getstate__(self):
        return pickled_state(self)

    def __setstate__(self, state):
        self.__init__(**state["options"])
        restore_pickled_state(self, state)
        forget(self)

    def state_dict(self) -> dict:
        """Return what training needs to go on with any number of ranks, the same on all; a collective.

        Residuals are the mean of the ranks' residuals, so that the next averages still receive all of
        them; the optimizer's state is full.
        """
        return common_state(self)

    def load_state_dict(self, state: dict) -> None:
        """Load a `state_dict`, the same on every rank; a local call."""
        load_common_state(self, state)

    def __repr__(self):
        over = self.comm if self.comm is not None else self._group
        shared = self._registrations.describe() if self.zero_copy else "off"
        words = ["default group" if over is None else str(over), f"average={self.average}"]
        changed = self.options.changed().items()
        words += [f"{name}={value!r}" for name, value in changed if name not in ("average", "zero_copy")]
        if self.optimizer is not None:
            words.append(f"optimizer={type(self.optimizer).__name__}")
        if self.options.parameters_as_bucket_view and self.optimizer is not None:
            words.append("parameters of {} of {} buckets gathered in place".format(*self._get_step().gathered_in_place))
        return f"HookState({', '.join(words)}, zero_copy: {shared})"


# For help() and inspect.signature: each option with its default, as HookOptions lists them.
HookState.__init__.__signature__ = list_options(HookState.__init__)
