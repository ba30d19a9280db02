"""Low-rank factors of a bucket's gradient matrices: PowerSGD's memory for a bucket, and its
arithmetic in one step.

On the host the arithmetic is cheap and passes over the matrix are not. So there are five passes,
all in place: the gradient is added to the residual, two passes read the sum for P and Q, one writes
the result and one subtracts it from the sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..optimizer_state import same_objects
from .bucket import Bucket
from .scratch import use_on_current_stream

__all__ = ["LowRankPlan", "LowRankStep", "Matrix", "orthonormalise", "view_stack"]

_MIN_GAIN = 2  # the matrix must have this many times the elements of P and Q; torch's default, too
# A column is linearly dependent on the others if at most this part of its length is left without
# their directions: that part is rounding errors.
_DEPENDENT = 1e-5
_CHUNK_NUMEL = {"cpu": 1 << 18, "cuda": 1 << 24}  # of scratch memory; on the host half a second-level cache


class Matrix(NamedTuple):
    """A compressed gradient: its place in the bucket, and its factors, transposed so that columns
    are contiguous.
    """

    index: int  # of its parameter
    begin: int
    rows: int
    columns: int
    p: torch.Tensor  # rank x rows; on the wire
    q: torch.Tensor  # rank x columns; on the wire
    start: torch.Tensor  # rank x columns, orthonormal: what the next step begins with

    def view_in(self, flat: torch.Tensor) -> torch.Tensor:
        """View this matrix in a flat tensor as long as the bucket."""
        return flat[self.begin : self.begin + self.rows * self.columns].view(self.rows, self.columns)


class LowRankPlan:
    """Memory for a bucket's reduction, made when the bucket first comes, and which parameters are
    compressed.
    """

    def __init__(self, bucket: Bucket, rank: int, comm):
        self.params = list(bucket.params)
        self.offsets = list(bucket.offsets)
        self.numel = bucket.flat.numel()
        self.dtype = bucket.flat.dtype
        self.device = bucket.flat.device
        self.acc_dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        found = []
        uncompressed: list[list[int]] = []  # [begin, end] in the bucket
        ends = [*self.offsets[1:], self.numel]
        for index, (param, begin, end) in enumerate(zip(self.params, self.offsets, ends, strict=True)):
            rows = param.shape[0] if param.dim() > 1 else 0
            columns = param.numel() // rows if rows else 0
            width = min(rank, rows, columns)
            if width and (rows + columns) * width * _MIN_GAIN < rows * columns:
                found.append((index, begin, rows, columns, width))
                begin += rows * columns  # padding between this parameter and the next one
            if begin < end:
                if uncompressed and uncompressed[-1][1] == begin:
                    uncompressed[-1][1] = end
                else:
                    uncompressed.append([begin, end])
        self.uncompressed = [tuple(each) for each in uncompressed]
        self.uncompressed_buffer = None
        if len(uncompressed) > 1:
            self.uncompressed_buffer = comm.empty(sum(end - begin for begin, end in uncompressed), self.dtype)
        # Factors of the same shape lie next to each other, so that one call makes all of them
        # orthonormal.
        p_places, p_total, self.p_stacks = _stack_by_shape([(width, rows) for _, _, rows, _, width in found])
        q_places, q_total, self.q_stacks = _stack_by_shape([(width, columns) for *_, columns, width in found])
        self.p, self.q = comm.empty(p_total, self.acc_dtype), comm.empty(q_total, self.acc_dtype)
        self.start = torch.zeros(q_total, dtype=self.acc_dtype, device=self.device)
        self.matrices = []
        for (index, begin, rows, columns, width), p_at, q_at in zip(found, p_places, q_places, strict=True):
            p = self.p[p_at : p_at + width * rows].view(width, rows)
            q, start = (each[q_at : q_at + width * columns].view(width, columns) for each in (self.q, self.start))
            self.matrices.append(Matrix(index, begin, rows, columns, p, q, start))
        self.scratch: torch.Tensor | None = None
        self.stream = None  # the last one that used the memory
        self.use()

    def use(self) -> None:
        """Order the memory on torch's current stream."""
        memory = (self.p, self.q, self.start, self.uncompressed_buffer, self.scratch)
        self.stream = use_on_current_stream(self.stream, *(each for each in memory if each is not None))

    def matches(self, bucket: Bucket) -> bool:
        """Return whether a bucket has this plan's parameters at the same offsets."""
        flat = bucket.flat
        return (
            (flat.numel(), flat.dtype, flat.device) == (self.numel, self.dtype, self.device)
            and bucket.offsets == self.offsets
            and same_objects(bucket.params, self.params)
        )

    def row_chunks(self, matrix: Matrix) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield slices of a matrix's rows with scratch memory for them, as many rows at a time as
        stay in a cache.
        """
        step = min(matrix.rows, max(1, _CHUNK_NUMEL[self.device.type] // matrix.columns))
        if self.scratch is None or self.scratch.numel() < step * matrix.columns:
            self.scratch = torch.empty(step * matrix.columns, dtype=self.acc_dtype, device=self.device)
        for first in range(0, matrix.rows, step):
            count = min(step, matrix.rows - first)
            yield slice(first, first + count), self.scratch[: count * matrix.columns].view(count, matrix.columns)


class LowRankStep:
    """Arithmetic of one reduction of a bucket's matrices.

    M is the gradient, or the sum of the gradient and the residual. On the host the sum overwrites
    the residual. It is recomputed in scratch memory for each use in two cases: on CUDA, where the
    host doesn't check whether the factors are finite (it would wait for the GPU), and for fp64,
    whose residual is fp32.
    """

    def __init__(self, plan: LowRankPlan, flat: torch.Tensor, residual: torch.Tensor | None, prescale: float):
        self.plan = plan
        self.flat = flat
        self.residual = residual
        self.prescale = prescale
        self.checks_finite = _checks_finite(flat)
        self.in_place = residual is not None and self.checks_finite and plan.acc_dtype == torch.float32
        self.recomputes = residual is not None and not self.in_place
        self.same_dtype = flat.dtype == plan.acc_dtype

    def inputs(self, matrix: Matrix) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield M by rows: (rows, their values)."""
        gradient = matrix.view_in(self.flat)
        if self.in_place:
            yield slice(None), matrix.view_in(self.residual)
        elif self.same_dtype and not self.recomputes:
            yield slice(None), gradient
        else:
            for rows, scratch in self.plan.row_chunks(matrix):
                if self.recomputes:
                    torch.add(matrix.view_in(self.residual)[rows], gradient[rows], alpha=self.prescale, out=scratch)
                else:
                    scratch.copy_(gradient[rows])
                yield rows, scratch

    def project(self) -> None:
        """Add the gradients to the residuals, and compute each P = M Q."""
        for matrix in self.plan.matrices:
            if self.in_place:
                matrix.view_in(self.residual).add_(matrix.view_in(self.flat), alpha=self.prescale)
            for rows, part in self.inputs(matrix):
                torch.mm(part, matrix.start.t(), out=matrix.p.t()[rows])
        self._scale(self.plan.p)

    def project_back(self) -> None:
        """Compute each Q = M^T P."""
        for matrix in self.plan.matrices:
            q, weight = matrix.q, 0
            for rows, part in self.inputs(matrix):
                torch.addmm(q, matrix.p[:, rows], part, beta=weight, out=q)
                weight = 1
        self._scale(self.plan.q)

    def _scale(self, factors: torch.Tensor) -> None:
        if self.residual is None and self.prescale != 1.0:
            factors.mul_(self.prescale)

    def finish(self, scale: float) -> list:
        """Write the results, `scale` times P Q^T, and the residuals.

        Returns for each matrix whether it was finite. The list has bools on the host, and tensors
        on CUDA.
        """
        plan = self.plan
        finite = [True] * len(plan.matrices)
        if not self.checks_finite:
            finite = [torch.isfinite(matrix.q).all() for matrix in plan.matrices]
        elif not torch.isfinite(plan.q).all():
            finite = [bool(torch.isfinite(matrix.q).all()) for matrix in plan.matrices]
        for matrix, good in zip(plan.matrices, finite, strict=True):
            if good is False:
                self._undo(matrix)
            else:
                self._write(matrix, good, scale)
        return finite

    def _write(self, matrix: Matrix, good, scale: float) -> None:
        """Write a matrix's result and its residual.

        `good`: True, or a tensor that says whether the matrix is finite.
        """
        gradient, p, q = matrix.view_in(self.flat), matrix.p.t(), matrix.q
        scaled = q if scale == 1.0 else q * scale
        residual = None if self.residual is None else matrix.view_in(self.residual)
        back = 1.0 / scale if scale else 0.0
        if self.same_dtype and not self.recomputes:
            torch.mm(p, scaled, out=gradient)
            if residual is not None:
                residual.addmm_(p, q, alpha=-1.0)
            return
        for rows, scratch in self.plan.row_chunks(matrix):
            out = gradient[rows]
            if self.recomputes:
                torch.add(residual[rows], out, alpha=self.prescale, out=scratch)
                if self.same_dtype:
                    torch.mm(p[rows], scaled, out=out)
                else:
                    out.copy_(torch.mm(p[rows], scaled))
                # The residual includes the rounding error of the result.
                scratch.sub_(out, alpha=back)
                residual[rows].copy_(scratch if good is True else torch.where(good, scratch, residual[rows]))
            else:
                out.copy_(torch.mm(p[rows], scaled, out=scratch))
                if residual is not None:
                    residual[rows].sub_(out, alpha=back)

    def _undo(self, matrix: Matrix) -> None:
        """Make a matrix's result NaN, and restore its residual."""
        gradient = matrix.view_in(self.flat)
        if self.in_place:
            # Restored to within a rounding. Where this rank's own gradient isn't finite the old
            # value is lost.
            matrix.view_in(self.residual).sub_(gradient, alpha=self.prescale).nan_to_num_(0.0, 0.0, 0.0)
        gradient.fill_(torch.nan)


def _checks_finite(flat: torch.Tensor) -> bool:
    """Return whether the host checks the factors before it goes on.

    On CUDA the check would wait for the GPU.
    """
    return flat.is_cpu


def _stack_by_shape(shapes: list[tuple[int, int]]) -> tuple[list[int], int, list[tuple[int, int, int, int]]]:
    """Place arrays of these shapes in a flat buffer, those of the same shape next to each other.

    Returns each array's offset, the buffer's length, and (offset, count, *shape) of each stack of
    one shape.
    """
    places, stacks, total = [0] * len(shapes), [], 0
    for shape in dict.fromkeys(shapes):
        members = [index for index, other in enumerate(shapes) if other == shape]
        stacks.append((total, len(members), *shape))
        for index in members:
            places[index] = total
            total += shape[0] * shape[1]
    return places, total, stacks


def view_stack(flat: torch.Tensor, stack: tuple[int, int, int, int]) -> torch.Tensor:
    """View a stack, (offset, count, rank, length), of factors as count x rank x length."""
    offset, count, width, length = stack
    return flat[offset : offset + count * width * length].view(count, width, length)


def orthonormalise(vectors: torch.Tensor, replacement: torch.Tensor | None = None) -> None:
    """Make the rows of each matrix orthonormal, in place, by Gram-Schmidt.

    `vectors`: count x rank x length. A row that depends on those before it becomes 0.
    `replacement`: rank x length, replaces rows that are 0. Non-finite values make a row and all
    after it NaN. Doesn't wait for a GPU.
    """
    # Scale first: the squares of very large and small values would overflow and underflow.
    largest = torch.linalg.vector_norm(vectors, torch.inf, dim=2, keepdim=True)
    zero = largest == 0
    if replacement is not None:
        torch.where(zero, replacement, vectors, out=vectors)
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
