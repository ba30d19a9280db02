"""PowerSGD: gradient matrices go over the wire as two thin factors.

A gradient M of rows x columns becomes P Q^T with `rank` columns each. P = M Q is summed over the
ranks and made orthonormal, Q = M^T P is averaged, and every rank applies P Q^T. That is one step of
a power iteration that begins with the last step's Q. The difference to M stays in this rank's
residual and is added to its next gradient. Source: Vogels, Karimireddy, Jaggi, PowerSGD: Practical
Low-Rank Gradient Compression, NeurIPS 2019, and torch's powerSGD_hook.
"""

from __future__ import annotations

import zlib

import torch

from ..cuda_state import refuse_capture
from ..errors import InvalidArgument
from ..parameter_names import ParameterNames
from .averaging import all_reduce_average, plan_reduction
from .base import Compressor
from .bucket import Bucket, Scaling
from .error_feedback import Residuals
from .grad_stats import add_grad_stats
from .low_rank import LowRankPlan, LowRankStep, orthonormalise, view_stack

__all__ = ["PowerSGD"]


class PowerSGD(Compressor):
    """The wire "powersgd:RANK": matrices as two factors of `rank` columns, all other parameters as
    they are.

    A parameter is compressed if its factors have less than half of its elements. The matrix is its
    first dimension by all others, in the order of the gradient's memory. Everything is computed in
    fp32 (fp64 for fp64). `error_feedback`: keep what compression loses and add it to the next
    gradient; without it training with a low rank mostly fails. All ranks get the same bits if their
    processors are of one kind.

    If any rank's matrix isn't finite all ranks get NaN for it. Q and the residual stay as they were
    before the step; on the host the residual to within a rounding, and 0 where this rank's own
    gradient isn't finite.
    """

    def __init__(self, rank: int, *, error_feedback: bool = True, parameter_names: ParameterNames | None = None):
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
            raise InvalidArgument(f"the rank of PowerSGD must be an int from 1 up, not {rank!r:.60}")
        self.rank = rank
        self.error_feedback = error_feedback
        self._parameter_names = parameter_names or ParameterNames()
        self.residuals = Residuals(self._parameter_names)
        self._plans: dict[tuple, LowRankPlan] = {}  # by bucket
        self._starts: dict[int, tuple] = {}  # id of a parameter -> (parameter, its view of a plan's `start`, the plan)
        self._loaded: dict[str, torch.Tensor] = {}
        self._random: dict[tuple, torch.Tensor] = {}  # first Qs

    @torch.no_grad()
    def reduce(self, comm, bucket: Bucket, scaling: Scaling, *, grad_stats: torch.Tensor | None = None) -> int:
        """Reduce a bucket in place; return the bytes that this rank sends.

        These are 2(n-1)/n of the factors and of all uncompressed gradients. Blocks on the host; on
        CUDA everything is on torch's current stream and nobody waits. `grad_stats`: fp64, 2
        elements, to which this rank's part of the result's sum of squares and of the number of its
        non-finite elements is added; the parts of all ranks make up the whole.
        """
        plan = self._get_plan(comm, bucket)
        sent = _reduce_uncompressed(comm, plan, bucket.flat, scaling)
        if plan.matrices:
            residual = self.residuals.get(bucket) if self.error_feedback else None
            step = LowRankStep(plan, bucket.flat, residual, scaling.prescale)
            step.project()
            comm.all_reduce(plan.p)
            for stack in plan.p_stacks:
                orthonormalise(view_stack(plan.p, stack))
            step.project_back()
            all_reduce_average(comm, plan.q)  # NaN throughout where the sum of P isn't finite
            finite = step.finish(comm.size * scaling.postscale / (scaling.divisor or 1))
            self._keep_start(plan, finite)
            sent += 2 * (comm.size - 1) * (plan.p.nbytes + plan.q.nbytes) // comm.size
        if grad_stats is not None:
            _add_own_stats(bucket.flat, comm, grad_stats)
        return sent

    def _keep_start(self, plan: LowRankPlan, finite: list) -> None:
        """Make this step's Q the next one's start, where it is finite."""
        for stack in plan.q_stacks:
            random = self._random_start(stack[2], stack[3], plan.acc_dtype, plan.device)
            orthonormalise(view_stack(plan.q, stack), random)
        if all(good is True for good in finite):
            plan.start.copy_(plan.q)
            return
        for matrix, good in zip(plan.matrices, finite, strict=True):
            if good is not False:
                matrix.start.copy_(matrix.q if good is True else torch.where(good, matrix.q, matrix.start))

    # ---- State.

    def _get_plan(self, comm, bucket: Bucket) -> LowRankPlan:
        """Return the plan of a bucket.

        A new plan takes over its parameters' Qs from older plans or loaded state.
        """
        key = (bucket.index, id(bucket.params[0]))  # one state may serve several modules
        plan = self._plans.get(key)
        if plan is not None and plan.matches(bucket):
            plan.use()
            return plan
        refuse_capture(bucket.flat.device, "each replay would start PowerSGD anew for a new bucket: make steps first")
        plan = LowRankPlan(bucket, self.rank, comm)
        members = set(map(id, plan.params))
        for other, old in list(self._plans.items()):
            if not members.isdisjoint(map(id, old.params)):
                del self._plans[other]
        names = self._parameter_names.lookup(plan.params) if self._loaded else [None] * len(plan.params)
        for matrix in plan.matrices:
            param, name = plan.params[matrix.index], names[matrix.index]
            known = self._starts.get(id(param))
            if known is not None and known[0] is param and known[1].shape == matrix.start.shape:
                known[2].use()  # another bucket's plan, whose last stream may be another one
                matrix.start.copy_(known[1])
            elif name is not None and name in self._loaded:
                loaded = self._loaded.pop(name)
                if loaded.shape != matrix.start.shape:
                    raise InvalidArgument(
                        f"the loaded Q of {name} is of shape {tuple(loaded.shape)}, this one's of "
                        f"{tuple(matrix.start.shape)}: was it saved with another model or rank?"
                    )
                matrix.start.copy_(loaded)
            else:
                matrix.start.copy_(self._random_start(*matrix.start.shape, plan.acc_dtype, plan.device))
            self._starts[id(param)] = (param, matrix.start, plan)
        self._plans[key] = plan
        return plan

    def _random_start(self, width: int, columns: int, dtype, device) -> torch.Tensor:
        """Return a random Q, which depends on the shape alone: a resumed run has the same one."""
        key = (width, columns, dtype, device)
        if key not in self._random:
            generator = torch.Generator().manual_seed(0)
            drawn = torch.randn(1, width, columns, generator=generator, dtype=torch.float64)
            orthonormalise(drawn)
            self._random[key] = drawn[0].to(device, dtype)
        return self._random[key]

    def unclaimed_names(self) -> list[str]:
        return sorted({*self._loaded, *self.residuals.unclaimed_names()})

    def state_checksum(self) -> int:
        """Return a checksum of the loaded Qs.

        With different Qs the ranks would sum products of different matrices.
        """
        number = 0
        for name in sorted(self._loaded):
            values = self._loaded[name].detach().cpu().contiguous()
            number = zlib.crc32(values.view(torch.uint8).numpy().tobytes(), zlib.crc32(name.encode(), number))
        return number

    def state_dict(self) -> dict:
        """Return rank, Qs and residuals, as copies on the host by parameter name.

        Raises `InvalidArgument` where a parameter is in no registered module.
        """
        params = [param for param, *_ in self._starts.values()]
        starts = dict(self._loaded)
        for name, (param, start, _) in zip(self._parameter_names.lookup(params), self._starts.values(), strict=True):
            if name is None:
                raise InvalidArgument(
                    f"a parameter of shape {tuple(param.shape)} has no name, by which its Q could be saved: let the "
                    "state know its module, state.register(module)"
                )
            starts[name] = start.detach().cpu().clone()
        return {"rank": self.rank, "q": starts, "residuals": self.residuals.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        """Load a `state_dict` in place of all that is there.

        Each entry waits until its parameter comes. Raises `InvalidArgument` for the state of
        another rank, and for residuals without error feedback.
        """
        if "rank" not in state:
            raise InvalidArgument("the state to load was saved with another wire than PowerSGD")
        if state["rank"] != self.rank:
            raise InvalidArgument(f"the state is of PowerSGD with rank {state['rank']}, this one has rank {self.rank}")
        if state["residuals"] and not self.error_feedback:
            raise InvalidArgument("the state has residuals, which PowerSGD without error feedback would lose")
        self._plans, self._starts = {}, {}
        self._loaded = dict(state["q"])
        self.residuals.load_state_dict(state["residuals"])


def _reduce_uncompressed(comm, plan: LowRankPlan, flat: torch.Tensor, scaling: Scaling) -> int:
    """Reduce the gradients that are not compressed, in one operation; return the bytes sent."""
    if not plan.uncompressed:
        return 0
    parts = [flat[begin:end] for begin, end in plan.uncompressed]
    buffer = parts[0] if plan.uncompressed_buffer is None else torch.cat(parts, out=plan.uncompressed_buffer)
    reduction = plan_reduction(comm, scaling, buffer.dtype)
    reduction.before(buffer)
    comm.all_reduce(buffer, reduction.op)
    reduction.after(buffer)
    if plan.uncompressed_buffer is not None:
        torch._foreach_copy_(parts, list(buffer.split([part.numel() for part in parts])))
    return 2 * (comm.size - 1) * buffer.nbytes // comm.size


def _add_own_stats(flat: torch.Tensor, comm, grad_stats: torch.Tensor) -> None:
    """Add the statistics of this rank's 1/n of a reduced bucket."""
    shard_numel = flat.numel() // comm.size
    end = (comm.rank + 1) * shard_numel if comm.rank < comm.size - 1 else flat.numel()
    add_grad_stats(flat[comm.rank * shard_numel : end], grad_stats)
