"""PowerSGD: gradient matrices go over the wire as two thin factors.

A gradient M of rows x columns becomes P Q^T with `rank` columns each: P = M Q is summed over the ranks and made
orthonormal, Q = M^T P is averaged, and every rank applies P Q^T. That is one step of a power iteration which begins
with the last step's Q; what it misses stays in this rank's residual and is added to its next gradient. Source: Vogels,
Karimireddy, Jaggi, PowerSGD: Practical Low-Rank Gradient Compression, NeurIPS 2019, and torch's powerSGD_hook.

On the host the arithmetic is cheap and passes over the matrix are not, so there are five, all in place: the gradient
is added to the residual, two read the sum for P and Q, one writes the result and one takes it from the sum.
"""

from __future__ import annotations

import operator
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..errors import InvalidArgument
from ..parameter_names import Names
from .base import Bucket, Factor, Residuals, Wire, add_share, follow

__all__ = ["PowerSGD"]

_LEAST_GAIN = 2  # how many times fewer elements than the matrix P and Q must have; torch's default, too
_DEPENDENT = 1e-5  # a column of which no more than this part is left without the others' directions is rounding errors
_PIECE = {"cpu": 1 << 18, "cuda": 1 << 24}  # elements of scratch memory; on the host half a second-level cache


class _Matrix(NamedTuple):
    """A compressed gradient: where it lies in its bucket, and its factors, transposed: their columns are contiguous."""

    index: int  # of its parameter
    begin: int
    rows: int
    columns: int
    p: torch.Tensor  # rank x rows; on the wire
    q: torch.Tensor  # rank x columns; on the wire
    start: torch.Tensor  # rank x columns, orthonormal: what the next step begins with

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """View this matrix in a flat tensor as long as the bucket."""
        return flat[self.begin : self.begin + self.rows * self.columns].view(self.rows, self.columns)


class _Plan:
    """What a bucket's reduction needs, made when it first comes: which parameters are compressed, and all memory."""

    def __init__(self, bucket: Bucket, rank: int, comm):
        self.params = list(bucket.params)
        self.offsets = list(bucket.offsets)
        self.numel = bucket.flat.numel()
        self.dtype = bucket.flat.dtype
        self.device = bucket.flat.device
        self.wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        found = []
        rest: list[list[int]] = []  # [begin, end] of what is not compressed
        ends = [*self.offsets[1:], self.numel]
        for index, (param, begin, end) in enumerate(zip(self.params, self.offsets, ends, strict=True)):
            rows = param.shape[0] if param.dim() > 1 else 0
            columns = param.numel() // rows if rows else 0
            width = min(rank, rows, columns)
            if width and (rows + columns) * width * _LEAST_GAIN < rows * columns:
                found.append((index, begin, rows, columns, width))
                begin += rows * columns  # what may lie between it and the next one
            if begin < end:
                if rest and rest[-1][1] == begin:
                    rest[-1][1] = end
                else:
                    rest.append([begin, end])
        self.rest = [tuple(each) for each in rest]
        self.rest_buffer = None
        if len(rest) > 1:
            self.rest_buffer = comm.empty(sum(end - begin for begin, end in rest), self.dtype)
        # Factors of the same shape lie side by side, so that all of them are made orthonormal at once.
        p_places, p_total, self.p_alike = _side_by_side([(width, rows) for _, _, rows, _, width in found])
        q_places, q_total, self.q_alike = _side_by_side([(width, columns) for *_, columns, width in found])
        self.p, self.q = comm.empty(p_total, self.wide), comm.empty(q_total, self.wide)
        self.start = torch.zeros(q_total, dtype=self.wide, device=self.device)
        self.matrices = []
        for (index, begin, rows, columns, width), p_at, q_at in zip(found, p_places, q_places, strict=True):
            p = self.p[p_at : p_at + width * rows].view(width, rows)
            q, start = (each[q_at : q_at + width * columns].view(width, columns) for each in (self.q, self.start))
            self.matrices.append(_Matrix(index, begin, rows, columns, p, q, start))
        self.scratch: torch.Tensor | None = None
        self.stream = None  # that has used its memory last
        self.use()

    def use(self) -> None:
        """Let torch's current stream use its memory."""
        memory = (self.p, self.q, self.start, self.rest_buffer, self.scratch)
        self.stream = follow(self.stream, *(each for each in memory if each is not None))

    def serves(self, bucket: Bucket) -> bool:
        """Whether it was made for a bucket of these parameters, in these places."""
        flat = bucket.flat
        return (
            (flat.numel(), flat.dtype, flat.device) == (self.numel, self.dtype, self.device)
            and bucket.offsets == self.offsets
            and len(bucket.params) == len(self.params)
            and not any(map(operator.is_not, bucket.params, self.params))
        )

    def pieces(self, matrix: _Matrix) -> Iterator[tuple[slice, torch.Tensor]]:
        """Give rows of a matrix, and scratch memory for them, as many at a time as stay in a cache."""
        step = min(matrix.rows, max(1, _PIECE[self.device.type] // matrix.columns))
        if self.scratch is None or self.scratch.numel() < step * matrix.columns:
            self.scratch = torch.empty(step * matrix.columns, dtype=self.wide, device=self.device)
        for first in range(0, matrix.rows, step):
            count = min(step, matrix.rows - first)
            yield slice(first, first + count), self.scratch[: count * matrix.columns].view(count, matrix.columns)


class _Step:
    """One reduction of a bucket's matrices.

    M is the gradient, or with a residual the sum of both. On the host that is made in the residual's place. Where
    nobody looks whether the factors are finite (on CUDA that would wait for the GPU), and for fp64, whose residual is
    fp32, it is made anew in scratch memory each time that it is needed.
    """

    def __init__(self, plan: _Plan, flat: torch.Tensor, residual: torch.Tensor | None, before: float):
        self.plan = plan
        self.flat = flat
        self.residual = residual
        self.before = before
        self.looks = _looks(flat)
        self.in_place = residual is not None and self.looks and plan.wide == torch.float32
        self.anew = residual is not None and not self.in_place
        self.direct = flat.dtype == plan.wide

    def sums(self, matrix: _Matrix) -> Iterator[tuple[slice, torch.Tensor]]:
        """Give M by rows."""
        gradient = matrix.of(self.flat)
        if self.in_place:
            yield slice(None), matrix.of(self.residual)
        elif self.direct and not self.anew:
            yield slice(None), gradient
        else:
            for rows, scratch in self.plan.pieces(matrix):
                if self.anew:
                    torch.add(matrix.of(self.residual)[rows], gradient[rows], alpha=self.before, out=scratch)
                else:
                    scratch.copy_(gradient[rows])
                yield rows, scratch

    def project(self) -> None:
        """Add the gradients to the residuals, and compute each P = M Q."""
        for matrix in self.plan.matrices:
            if self.in_place:
                matrix.of(self.residual).add_(matrix.of(self.flat), alpha=self.before)
            for rows, part in self.sums(matrix):
                torch.mm(part, matrix.start.t(), out=matrix.p.t()[rows])
        self._scale(self.plan.p)

    def project_back(self) -> None:
        """Compute each Q = M^T P."""
        for matrix in self.plan.matrices:
            q, weight = matrix.q, 0
            for rows, part in self.sums(matrix):
                torch.addmm(q, matrix.p[:, rows], part, beta=weight, out=q)
                weight = 1
        self._scale(self.plan.q)

    def _scale(self, factors: torch.Tensor) -> None:
        if self.residual is None and self.before != 1.0:
            factors.mul_(self.before)

    def finish(self, scale: float) -> list:
        """Write the results, `scale` times P Q^T, and what they lack; tell which matrices were finite.

        These are numbers on the host, and tensors on CUDA.
        """
        plan = self.plan
        finite = [True] * len(plan.matrices)
        if not self.looks:
            finite = [torch.isfinite(matrix.q).all() for matrix in plan.matrices]
        elif not torch.isfinite(plan.q).all():
            finite = [bool(torch.isfinite(matrix.q).all()) for matrix in plan.matrices]
        for matrix, good in zip(plan.matrices, finite, strict=True):
            if good is False:
                self._undo(matrix)
            else:
                self._write(matrix, good, scale)
        return finite

    def _write(self, matrix: _Matrix, good, scale: float) -> None:
        gradient, p, q = matrix.of(self.flat), matrix.p.t(), matrix.q
        given = q if scale == 1.0 else q * scale
        residual = None if self.residual is None else matrix.of(self.residual)
        back = 1.0 / scale if scale else 0.0
        if self.direct and not self.anew:
            torch.mm(p, given, out=gradient)
            if residual is not None:
                residual.addmm_(p, q, alpha=-1.0)
            return
        for rows, scratch in self.plan.pieces(matrix):
            out = gradient[rows]
            if self.anew:
                torch.add(residual[rows], out, alpha=self.before, out=scratch)
                if self.direct:
                    torch.mm(p[rows], given, out=out)
                else:
                    out.copy_(torch.mm(p[rows], given))
                # What rounding the result has lost is kept, too.
                scratch.sub_(out, alpha=back)
                residual[rows].copy_(scratch if good is True else torch.where(good, scratch, residual[rows]))
            else:
                out.copy_(torch.mm(p[rows], given, out=scratch))
                if residual is not None:
                    residual[rows].sub_(out, alpha=back)

    def _undo(self, matrix: _Matrix) -> None:
        gradient = matrix.of(self.flat)
        if self.in_place:
            # Back to within a rounding; where this rank's gradient isn't finite itself what was there is lost.
            matrix.of(self.residual).sub_(gradient, alpha=self.before).nan_to_num_(0.0, 0.0, 0.0)
        gradient.fill_(torch.nan)


class PowerSGD(Wire):
    """The wire "powersgd:RANK": matrices as two factors of `rank` columns, all other parameters as they are.

    A parameter is compressed where its factors have less than half of its elements: its first dimension by all others,
    in the order of the gradient's memory. Everything is computed in fp32 (fp64 for fp64). `error_feedback`: keep what
    compression loses and add it to the next gradient; without it training with a low rank mostly fails. `seed`: of the
    first step's Q; the same on all ranks. These get the same bits where their processors are of one kind.

    Where any rank's matrix isn't finite all ranks get NaN for it; Q stays as it was before the step, and so does the
    residual, to within a rounding on the host, but for the elements of its own gradient that aren't finite (0 there).
    """

    def __init__(self, rank: int, *, error_feedback: bool = True, seed: int = 0, names: Names | None = None):
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
            raise InvalidArgument(f"the rank of PowerSGD must be an int from 1 up, not {rank!r:.60}")
        self.rank = rank
        self.error_feedback = error_feedback
        self.seed = seed
        self._names = names or Names()
        self.residuals = Residuals(self._names)
        self._plans: dict[tuple, _Plan] = {}  # by bucket
        self._starts: dict[int, tuple] = {}  # id of a parameter -> (parameter, its part of a plan's `start`, the plan)
        self._loaded: dict[str, torch.Tensor] = {}
        self._random: dict[tuple, torch.Tensor] = {}  # first Qs

    @torch.no_grad()
    def reduce(self, comm, bucket: Bucket, factor: Factor, *, health: torch.Tensor | None = None) -> int:
        """Reduce a bucket in place; give the bytes that this rank sends: 2(n-1)/n of the factors and of all others.

        Blocks on the host; on CUDA everything is on torch's current stream and nobody waits. `health`: fp64, 2
        elements, to which this rank's share of the result's sum of squares and of the number of its non-finite elements
        is added; the shares of all ranks make up the whole.
        """
        plan = self._plan(comm, bucket)
        sent = _reduce_rest(comm, plan, bucket.flat, factor)
        if plan.matrices:
            residual = self.residuals.of(bucket) if self.error_feedback else None
            step = _Step(plan, bucket.flat, residual, factor.before)
            step.project()
            comm.all_reduce(plan.p)
            for place in plan.p_alike:
                _orthonormalise(_stacked(plan.p, place))
            step.project_back()
            comm.all_reduce(plan.q, "avg")  # NaN throughout where the sum of P isn't finite
            finite = step.finish(comm.size * factor.after / (factor.over or 1))
            self._keep(plan, finite)
            sent += 2 * (comm.size - 1) * (plan.p.nbytes + plan.q.nbytes) // comm.size
        if health is not None:
            _add_share(bucket.flat, comm, health)
        return sent

    def _keep(self, plan: _Plan, finite: list) -> None:
        """Make this step's Q the next one's start, where it is finite."""
        for place in plan.q_alike:
            random = self._first(place[2], place[3], plan.wide, plan.device)
            _orthonormalise(_stacked(plan.q, place), random)
        if all(good is True for good in finite):
            plan.start.copy_(plan.q)
            return
        for matrix, good in zip(plan.matrices, finite, strict=True):
            if good is not False:
                matrix.start.copy_(matrix.q if good is True else torch.where(good, matrix.q, matrix.start))

    # ---- What is kept.

    def _plan(self, comm, bucket: Bucket) -> _Plan:
        key = (bucket.index, id(bucket.params[0]))  # one state may serve several modules
        plan = self._plans.get(key)
        if plan is not None and plan.serves(bucket):
            plan.use()
            return plan
        plan = _Plan(bucket, self.rank, comm)
        members = set(map(id, plan.params))
        for other, old in list(self._plans.items()):
            if not members.isdisjoint(map(id, old.params)):
                del self._plans[other]
        names = self._names.of(plan.params) if self._loaded else [None] * len(plan.params)
        for matrix in plan.matrices:
            param, name = plan.params[matrix.index], names[matrix.index]
            known = self._starts.get(id(param))
            if known is not None and known[0] is param and known[1].shape == matrix.start.shape:
                known[2].use()  # another bucket's, which went by another stream
                matrix.start.copy_(known[1])
            elif name is not None and name in self._loaded:
                given = self._loaded.pop(name)
                if given.shape != matrix.start.shape:
                    raise InvalidArgument(
                        f"the loaded Q of {name} is of shape {tuple(given.shape)}, this one's of "
                        f"{tuple(matrix.start.shape)}: was it saved with another model or rank?"
                    )
                matrix.start.copy_(given)
            else:
                matrix.start.copy_(self._first(*matrix.start.shape, plan.wide, plan.device))
            self._starts[id(param)] = (param, matrix.start, plan)
        self._plans[key] = plan
        return plan

    def _first(self, width: int, columns: int, dtype, device) -> torch.Tensor:
        """Give a random Q; it depends on the shape alone, so that a resumed run has the same one."""
        key = (width, columns, dtype, device)
        if key not in self._random:
            generator = torch.Generator().manual_seed(self.seed)
            drawn = torch.randn(1, width, columns, generator=generator, dtype=torch.float64)
            _orthonormalise(drawn)
            self._random[key] = drawn[0].to(device, dtype)
        return self._random[key]

    def unclaimed(self) -> list[str]:
        return sorted({*self._loaded, *self.residuals.unclaimed()})

    def starts_from(self) -> int:
        """Give a checksum of loaded Qs: ranks that multiplied by others would sum what doesn't belong together."""
        number = 0
        for name in sorted(self._loaded):
            values = self._loaded[name].detach().cpu().contiguous()
            number = zlib.crc32(values.view(torch.uint8).numpy().tobytes(), zlib.crc32(name.encode(), number))
        return number

    def state_dict(self) -> dict:
        """Give rank, Qs and residuals, as copies on the host by parameter name.

        Raises `InvalidArgument` where a parameter is in no module that was registered.
        """
        params = [param for param, *_ in self._starts.values()]
        starts = dict(self._loaded)
        for name, (param, start, _) in zip(self._names.of(params), self._starts.values(), strict=True):
            if name is None:
                raise InvalidArgument(
                    f"a parameter of shape {tuple(param.shape)} has no name, by which its Q could be saved: let the "
                    "state know its module, state.register(module)"
                )
            starts[name] = start.detach().cpu().clone()
        return {"rank": self.rank, "q": starts, "residuals": self.residuals.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        """Take what `state_dict` gave, in place of all that is there; it waits until its parameters come.

        Raises `InvalidArgument` for the state of another rank, and for residuals without error feedback.
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


# ---- The parts of a reduction.


def _looks(flat: torch.Tensor) -> bool:
    """Whether the host looks at results before it goes on; on CUDA it would wait for the GPU."""
    return flat.is_cpu


def _reduce_rest(comm, plan: _Plan, flat: torch.Tensor, factor: Factor) -> int:
    """Reduce what is not compressed, in one operation; give the bytes sent."""
    if not plan.rest:
        return 0
    parts = [flat[begin:end] for begin, end in plan.rest]
    buffer = parts[0] if plan.rest_buffer is None else torch.cat(parts, out=plan.rest_buffer)
    if factor.before != 1.0:
        buffer.mul_(factor.before)
    average = factor.over == comm.size
    comm.all_reduce(buffer, "avg" if average else "sum")
    if factor.over and not average:
        buffer.div_(factor.over)
    if factor.after != 1.0:
        buffer.mul_(factor.after)
    if plan.rest_buffer is not None:
        torch._foreach_copy_(parts, list(buffer.split([part.numel() for part in parts])))
    return 2 * (comm.size - 1) * buffer.nbytes // comm.size


def _add_share(flat: torch.Tensor, comm, health: torch.Tensor) -> None:
    part = flat.numel() // comm.size
    own = flat[comm.rank * part : (comm.rank + 1) * part if comm.rank < comm.size - 1 else flat.numel()]
    add_share(own, health)


def _side_by_side(shapes: list[tuple[int, int]]) -> tuple[list[int], int, list[tuple[int, int, int, int]]]:
    """Place arrays of these shapes in a flat buffer, those of the same shape side by side.

    Gives each one's offset, the buffer's length, and (offset, count, *shape) of those that are alike.
    """
    places, alike, total = [0] * len(shapes), [], 0
    for shape in dict.fromkeys(shapes):
        members = [index for index, other in enumerate(shapes) if other == shape]
        alike.append((total, len(members), *shape))
        for index in members:
            places[index] = total
            total += shape[0] * shape[1]
    return places, total, alike


def _stacked(flat: torch.Tensor, place: tuple[int, int, int, int]) -> torch.Tensor:
    offset, count, width, length = place
    return flat[offset : offset + count * width * length].view(count, width, length)


def _orthonormalise(vectors: torch.Tensor, instead: torch.Tensor | None = None) -> None:
    """Make the rows of each matrix orthonormal, in place, by Gram-Schmidt.

    vectors: count x rank x length. A row that depends on those before it becomes 0. `instead`: what takes the place of
    rows that are 0, rank x length. Non-finite values make a row and all after it NaN. No wait for a GPU.
    """
    # Their squares would overflow or underflow long before they do.
    largest = torch.linalg.vector_norm(vectors, torch.inf, dim=2, keepdim=True)
    zero = largest == 0
    if instead is not None:
        torch.where(zero, instead, vectors, out=vectors)
    vectors.div_(largest.masked_fill_(zero, 1.0))
    for index in range(vectors.shape[1]):
        row = vectors[:, index : index + 1]
        before = length = torch.linalg.vector_norm(row, dim=2, keepdim=True)
        if index:
            others = vectors[:, :index]
            for _ in range(2):  # once leaves rounding errors of the row's first length
                row.baddbmm_(torch.bmm(row, others.transpose(1, 2)), others, alpha=-1.0)
            length = torch.linalg.vector_norm(row, dim=2, keepdim=True)
        row.mul_(torch.where(length <= _DEPENDENT * before, 0.0, 1.0 / length))
