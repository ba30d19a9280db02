"""The parameters of a unit: each one's two forms, and the flat buffers in which they lie.

A group is the parameters of one dtype, trainable or frozen, laid out one after the other in a flat buffer of
``ranks x share`` elements, of which rank r owns elements ``[r * share, (r + 1) * share)``, its shard. A parameter's
*piece* is what of it lies in this rank's shard, as a Parameter that the optimizer steps; its *full* form is a Parameter
of the original shape, a view of the gathered buffer while there is one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from ..comm.communicator import Communicator
from ..errors import InvalidArgument, InvalidUsage
from ..kernels import pack
from ..layout import Layout, bucket_layout, pad_count
from ..torch_compat import TensorBase
from .buffer_pool import LEAST_LENT, Loans
from .changes import take_hooks
from .quantized_gather import Codec
from .streams import HostCopies

__all__ = ["Group", "Ranks", "Slot", "shard_layout"]

_data_ptr, _numel = TensorBase.data_ptr, TensorBase.numel


class Ranks(NamedTuple):
    """Who holds a unit: `shard`, the ranks that have a piece each; None: this rank has all of it.

    `world`: all ranks, over which gradients are averaged; `replicas`: those with the same piece; None: `shard` is all.
    `group`: torch's process group of `shard`'s ranks, where it is known, for people's own collectives.
    """

    shard: Communicator | None
    replicas: Communicator | None
    world: Communicator
    group: object = None

    @property
    def rank(self) -> int:
        return 0 if self.shard is None else self.shard.rank

    @property
    def size(self) -> int:
        return 1 if self.shard is None else self.shard.size


def shard_layout(counts: list[int], dtypes, ranks: int, align: int = 0) -> tuple[Layout, int]:
    """Place parameters of so many elements in a flat buffer; give their places and the elements of a rank's shard.

    Each parameter, and each shard, begins at a multiple of 16 bytes in all the `dtypes` that are on the way.
    """
    narrowest = min(dtype.itemsize for dtype in dtypes)
    layout = bucket_layout(counts, narrowest)
    each = -(-layout.total // ranks)
    return layout, max(pad_count(each, narrowest), -(-each // align) * align if align else 0)


class Slot:
    """A parameter: `names`, of which the first is its own and others are those of tied weights; where modules hold it
    (`places`); elements ``[start, start + piece.numel())`` of it are this rank's, at `begin` in the shard.
    """

    __slots__ = (
        "arrived", "begin", "came", "count", "expected", "fresh", "full", "kept", "names", "offset", "piece", "places",
        "shape", "shown", "start", "trains", "watched",
    )  # fmt: skip

    def __init__(self, names: list[str], places: list[tuple[nn.Module, str]], original: nn.Parameter):
        self.names = names
        self.places = places
        self.shape = original.shape
        self.count = original.numel()
        self.offset = self.begin = self.start = 0
        self.piece: nn.Parameter | None = None
        self.full: nn.Parameter | None = None
        self.shown: torch.Tensor | None = None  # what the modules hold while a state dict is made or loaded
        self.kept: torch.Tensor | None = None  # gradients that wait for a synchronised backward, in the wider dtype
        self.came = False  # a gradient has come in this backward
        self.arrived = False  # or in one before, since the last that was synchronised
        self.trains = original.requires_grad
        self.watched = False  # told when its gradient comes
        self.expected = self.trains  # so it was in the last one
        self.fresh = False  # the piece had no gradient before this backward's

    @property
    def name(self) -> str:
        return self.names[0]

    def __repr__(self):
        return f"<Slot {self.name}, {tuple(self.shape)}, {self.piece.numel()} of {self.count} elements here>"


class Group:
    """Parameters that lie in one flat buffer; see the module.

    `device`: where the unit computes; `store`: where the shard lies. `persistent`: the gathered buffer stays, and the
    shard is part of it. `align`: the shard is a multiple of so many elements; 0: of 16 bytes. `codec`: in which format
    it is gathered, where that is fewer bytes; None: as `gather_dtype`. `copies`: those between `store` and `device`,
    where they differ.
    """

    def __init__(
        self, slots: list[Slot], originals: list[nn.Parameter], ranks: Ranks, loans: Loans, *, device: torch.device,
        store: torch.device, pinned: bool, gather_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None,
        persistent: bool, align: int = 0, codec: Codec | None = None, copies: HostCopies | None = None,
    ):  # fmt: skip
        self.slots = slots
        self.ranks = ranks
        self.loans = loans
        self.copies = HostCopies() if copies is None else copies
        self.device = device
        self.store = store
        self.pinned = pinned
        first = originals[0]
        self.dtype = first.dtype
        self.requires_grad = first.requires_grad
        casts = self.dtype.is_floating_point
        self.gather_dtype = gather_dtype if casts and gather_dtype is not None else self.dtype
        self.reduce_dtype = reduce_dtype if casts and reduce_dtype is not None else self.gather_dtype
        self.codec = codec if codec is not None and casts and codec.saves(self.gather_dtype) else None
        as_it_is = self.gather_dtype == self.dtype and self.store == device and self.codec is None
        self.persistent = persistent and as_it_is
        dtypes = (self.dtype, self.gather_dtype, self.reduce_dtype)
        narrowest = min(dtype.itemsize for dtype in dtypes)
        self.layout, self.share = shard_layout([slot.count for slot in slots], dtypes, ranks.size, align)
        self.total = ranks.size * self.share
        self.gathered: torch.Tensor | None = None  # the flat buffer, while there is one
        self.whole: torch.Tensor | None = None  # the persistent one
        self.near: torch.Tensor | None = None  # a larger part than the shard, kept for the backward
        self.grad: torch.Tensor | None = None  # the gradients' shard, once there was one
        self.steps = 0  # of optimizers
        self._stub = torch.empty((), dtype=self.gather_dtype, device=device)
        self._simple = self.reduce_dtype.itemsize == narrowest  # whether the kernel's own padding is this layout's
        for slot, offset in zip(slots, self.layout.offsets, strict=True):
            slot.offset = offset
        ends = [*self.layout.offsets[1:], self.total]
        # The elements between parameters and behind the last: padding.
        self._gaps = [(s.offset + s.count, end) for s, end in zip(slots, ends, strict=True) if s.offset + s.count < end]
        self._make_shard([original.detach() for original in originals], first.device)
        self._make_forms(originals)

    # ---- Making it.

    @property
    def offloads(self) -> bool:
        """Tell whether the shard lies on another device than where the unit computes."""
        return self.store != self.device

    @property
    def shares_memory(self) -> bool:
        """Tell whether the full parameters lie where the pieces do, so that a step changes what autograd has saved."""
        return self.persistent or (
            self.ranks.shard is None and self.gather_dtype == self.dtype and self.store == self.device
        )

    def _new_shard(self, device: torch.device) -> torch.Tensor:
        """Give memory for the shard, of undefined contents."""
        host_engine = self.ranks.world._on_host and device.type == "cpu"
        if self.persistent and device.type != "meta":
            self.whole = self._empty(self.total, host_engine, device)
            return self.whole[self.ranks.rank * self.share :][: self.share]
        return self._empty(self.share, host_engine, device)

    def _empty(self, n: int, shared: bool, device) -> torch.Tensor:
        if shared and n * self.dtype.itemsize >= LEAST_LENT:
            return self.ranks.world.empty(n, self.dtype)
        pinned = self.pinned and self.offloads and device.type == "cpu"
        return torch.empty(n, dtype=self.dtype, device=device, pin_memory=pinned)

    def _make_shard(self, data: list[torch.Tensor], device: torch.device) -> None:
        self.flat = self._new_shard(device if device.type == "meta" else self.store)
        if device.type != "meta":
            self.flat.zero_()  # padding travels, too, and in 8 bits it shares a scale with its neighbours
        low = self.ranks.rank * self.share
        for slot, values in zip(self.slots, data, strict=True):
            begin = min(max(slot.offset, low), low + self.share)
            end = min(max(slot.offset + slot.count, low), low + self.share)
            slot.begin, slot.start = begin - low, begin - slot.offset if end > begin else 0
            if device.type != "meta" and end > begin:
                self.flat[slot.begin : end - low].copy_(values.reshape(-1)[slot.start : slot.start + end - begin])

    def _piece_of(self, flat: torch.Tensor, slot: Slot, n: int) -> torch.Tensor:
        """View a slot's part of a shard, in as many dimensions as the parameter has, so that ``p.dim()`` is right."""
        part = flat[slot.begin : slot.begin + n]
        if n == slot.count:
            return part.view(slot.shape)
        # With the 1s in front: an embedding of (n, 1), read by mistake, would broadcast in silence.
        return part.view(*[1] * (len(slot.shape) - 1), n)

    def _elements_here(self, slot: Slot) -> int:
        low = self.ranks.rank * self.share
        return max(0, min(slot.offset + slot.count, low + self.share) - max(slot.offset, low))

    def _make_forms(self, originals: list[nn.Parameter]) -> None:
        for slot, original in zip(self.slots, originals, strict=True):
            piece = self._piece_of(self.flat, slot, self._elements_here(slot))
            slot.piece = nn.Parameter(piece, requires_grad=self.requires_grad)
            slot.full = nn.Parameter(self._hidden(slot), requires_grad=self.requires_grad)
            for form in (slot.piece, slot.full):
                form.__dict__.update(original.__dict__)
            take_hooks(slot, original)
        self._note()

    def _note(self) -> None:
        self._addresses = [slot.piece.data_ptr() for slot in self.slots]
        self._counts = [slot.piece.numel() for slot in self.slots]

    def _hidden(self, slot: Slot) -> torch.Tensor:
        """Give what takes a full parameter's place while nothing is gathered: its shape, and the memory of one."""
        if not slot.count:
            return torch.empty(slot.shape, dtype=self.gather_dtype, device=self.device)
        return self._stub.expand(slot.shape)

    def check(self) -> None:
        """Look whether the pieces still lie in the shard. Where others do, of the same size, take their values over;
        raise `InvalidArgument`, which names the parameter, for those of other sizes or types.
        """
        pieces = [slot.piece for slot in self.slots]
        if self.grad is not None and self.ranks.shard is not None and all(piece.grad is None for piece in pieces):
            self.grad = None  # by zero_grad: others can have its memory until the backward
        if list(map(_data_ptr, pieces)) == self._addresses and list(map(_numel, pieces)) == self._counts:
            return
        for slot, count in zip(self.slots, self._counts, strict=True):
            data = slot.piece.data
            if data.numel() != count:
                raise InvalidArgument(
                    f"{slot.name} was resized after it was sharded: this rank's piece has {data.numel()} elements "
                    f"and had {count}; change modules before fully_shard, or values only"
                )
            if data.dtype != self.dtype:
                raise InvalidArgument(
                    f"{slot.name} was made {data.dtype} after it was sharded as {self.dtype}: convert the module "
                    "before fully_shard, or compute in another dtype by mp_policy"
                )
            if count and data.device.type not in (self.store.type, "meta"):
                raise InvalidArgument(
                    f"{slot.name} was moved to {data.device} after it was sharded on {self.store}: move the module "
                    "before fully_shard"
                )
        self.adopt()

    @torch.no_grad()
    def adopt(self) -> None:
        """Bring pieces that were given other memory back into the shard, which is made again if it was meta."""
        self.copies.wait()
        if any(slot.piece.device.type == "meta" for slot in self.slots if slot.piece.numel()):
            return  # start_gather says so
        if self.flat.device.type == "meta":
            self.flat = self._new_shard(self.store).zero_()
        for slot in self.slots:
            count = slot.piece.numel()
            place = self._piece_of(self.flat, slot, count)
            if count and slot.piece.data_ptr() != place.data_ptr():
                place.copy_(slot.piece.detach().view(place.shape))
            slot.piece.data = place
            torch.autograd.graph.increment_version(slot.piece)
        self._note()

    def give_memory(self) -> None:
        """Give a shard on the meta device memory, of zeros. The pieces stay the objects that they are."""
        if self.flat.device.type != "meta":
            return
        self.flat = self._new_shard(self.store).zero_()
        for slot in self.slots:
            piece = nn.Parameter(self._piece_of(self.flat, slot, slot.piece.numel()), requires_grad=slot.trains)
            piece.__dict__.update(slot.piece.__dict__)
            torch.utils.swap_tensors(slot.piece, piece)
        self._note()

    # ---- Gathering.

    def start_gather(self, *, async_op: bool = False, custom=None):
        """Begin to gather; give a Work, or None where it is done. The buffer is `gathered` from here on."""
        ranks = self.ranks
        if self.flat.device.type == "meta":
            raise InvalidArgument(
                f"{self.slots[0].name} is on the meta device: give it memory first, by module.to_empty(device=...) and "
                "its initialisation, param_init_fn, or a checkpoint"
            )
        if ranks.shard is None and self.shares_memory:
            self.gathered = self.flat
            return None
        self.gathered = self.whole if self.persistent else self.lend(self.total, self.gather_dtype, custom)
        return self._gather(self.gathered, async_op, custom)

    def keep_near(self, neighbours: Communicator) -> None:
        """Keep this rank's part, among its neighbours, of what is gathered."""
        part = self.total // neighbours.size
        self.near = self.gathered[neighbours.rank * part :][:part].clone()

    def start_gather_near(self, neighbours: Communicator, async_op: bool):
        """Begin to gather from what the neighbours have kept."""
        self.gathered = self.lend(self.total, self.gather_dtype)
        return neighbours.all_gather(self.gathered, self.near, async_op=async_op)

    def help_gather(self, custom=None) -> None:
        """Take part in a gather that only others need."""
        if self.ranks.shard is not None:
            out = self.whole if self.persistent else self.lend(self.total, self.gather_dtype, custom)
            work = self._gather(out, False, custom)
            if work is not None:
                work.wait()

    def _gather(self, out: torch.Tensor, async_op: bool, custom):
        ranks, inp = self.ranks, self.flat
        if self.codec is not None and ranks.shard is not None:
            if custom is not None:
                raise InvalidUsage("a custom all-gather sends parameters as they are: leave HookState's gather out")
            shard = self.flat
            if self.offloads:
                shard = self.copies.to_device(torch.empty(self.share, dtype=self.dtype, device=self.device), shard)
            return self.codec.gather(ranks.shard, shard, out, self.lend, async_op=async_op)
        if not self.persistent and (self.gather_dtype != self.dtype or self.store != self.device):
            inp = out[ranks.rank * self.share :][: self.share]
            if self.offloads:
                self.copies.to_device(inp, self.flat)
            else:
                inp.copy_(self.flat)
        if ranks.shard is None:
            return None
        if custom is not None:
            return custom(out, inp, ranks.group or ranks.shard, async_op)
        return ranks.shard.all_gather(out, inp, async_op=async_op)

    def gather_masters(self) -> torch.Tensor:
        """Gather the pieces as they are, in their own dtype; give the flat buffer. A collective of ``ranks.shard``.

        It goes by the engine's own all-gather, also where people have set another, since that may round.
        """
        if self.flat.device.type == "meta":
            raise InvalidUsage(f"{self.slots[0].name} is on the meta device and has no values yet: materialize() it")
        ranks = self.ranks
        if ranks.shard is None:
            return self.flat
        out, inp = self.whole if self.persistent else self.lend(self.total, self.dtype), self.flat
        if self.store != self.device:
            inp = out[ranks.rank * self.share :][: self.share].copy_(self.flat)
        ranks.shard.all_gather(out.view(torch.uint8), inp.view(torch.uint8))
        return out

    def gather_beside(self, values, dtype: torch.dtype) -> torch.Tensor:
        """Gather what lies as some of the pieces do, given as (slot, tensor or None for 0); as `gather_masters`."""
        ranks = self.ranks
        own = torch.zeros(self.share, dtype=dtype, device=self.device)
        for slot, value in values:
            if value is not None:
                own[slot.begin : slot.begin + value.numel()].copy_(value.detach().reshape(-1))
        if ranks.shard is None:
            return own
        out = self.lend(self.total, dtype)
        ranks.shard.all_gather(out.view(torch.uint8), own.view(torch.uint8))
        return out

    def lend(self, n: int, dtype: torch.dtype, custom=None) -> torch.Tensor:
        """Give a buffer on the unit's device for as long as somebody views it."""
        if custom is not None and hasattr(custom, "allocate"):
            return custom.allocate((n,), dtype=dtype, device=self.device)
        if self.ranks.world._on_host and n * dtype.itemsize >= LEAST_LENT:
            return self.loans.take(self.ranks.world, n, dtype)
        return torch.empty(n, dtype=dtype, device=self.device)

    def show(self) -> None:
        """Let the full parameters view what is gathered."""
        flat = self.gathered
        for slot in self.slots:
            slot.full.data = flat[slot.offset : slot.offset + slot.count].view(slot.shape)

    def hide(self) -> None:
        """Let go of what is gathered."""
        self.gathered = None
        for slot in self.slots:
            slot.full.data = self._hidden(slot)

    @torch.no_grad()
    def write_back(self) -> None:
        """Take over into the shard what was written to the full parameters."""
        if self.gathered is None or self.gathered.data_ptr() == self.flat.data_ptr() or self.persistent:
            return
        own = self.gathered[self.ranks.rank * self.share :][: self.share]
        if self.codec is not None and self.ranks.shard is not None:
            # What nobody has written to is the shard, rounded.
            shard = self.flat.to(own.device)
            own = torch.where(own == self.codec.rounded(shard, own.dtype), shard, own.to(shard.dtype))
        self.flat.copy_(own)

    # ---- Gradients.

    def gather_gradients(self) -> None:
        """Gather the pieces' gradients for what is shown, but for parameters that have none on any rank."""
        there = [slot.piece.grad is not None and (slot.piece.numel() > 0 or not slot.count) for slot in self.slots]
        there = torch.tensor(there, dtype=torch.uint8, device=self.device)
        flat = torch.zeros(self.share, dtype=self.dtype, device=self.device)
        for slot in self.slots:
            if slot.piece.grad is not None:
                self._piece_of(flat, slot, slot.piece.numel()).copy_(slot.piece.grad)
        whole = flat
        if self.ranks.shard is not None:
            whole = torch.empty(self.total, dtype=self.dtype, device=self.device)
            self.ranks.shard.all_gather(whole, flat)
            self.ranks.shard.all_reduce(there, "max")
        for slot, has in zip(self.slots, there.tolist(), strict=True):
            if has and slot.shown is not None:
                part = whole[slot.offset : slot.offset + slot.count].view(slot.shape)
                slot.shown.grad = part.to(slot.shown.device)

    def take_gradients_back(self) -> None:
        for slot in self.slots:
            if slot.shown.grad is not None and slot.piece.grad is not None:
                here = slot.shown.grad.reshape(-1)[slot.start : slot.start + slot.piece.numel()]
                slot.piece.grad.copy_(here.view(slot.piece.shape))

    def keep(self) -> None:
        """Leave the full gradients for a later backward to be added to, in the dtype of the reduction."""
        if self.reduce_dtype == self.gather_dtype:
            return
        for slot in self.slots:
            if slot.full.grad is not None:
                grad = slot.full.grad.to(self.reduce_dtype)
                slot.kept = grad if slot.kept is None else slot.kept.add_(grad)
                slot.full.grad = None

    def has_gradients(self) -> bool:
        return any(slot.full.grad is not None or slot.kept is not None for slot in self.slots)

    @torch.no_grad()
    def take_gradients(self, custom=None) -> torch.Tensor:
        """Put the full gradients into a flat buffer and give it; where there are none it is 0."""
        flat = None
        if self.ranks.shard is None and self.reduce_dtype == self.dtype and self.store == self.device:
            flat = self._own_grad() if all(slot.piece.grad is None for slot in self.slots) else None
        if flat is None:
            flat = self.lend(self.total, self.reduce_dtype, custom)
        tensors, offsets = [], []
        for slot in self.slots:
            grad = slot.full.grad
            if slot.kept is not None:
                grad = slot.kept if grad is None else slot.kept.add_(grad)
                slot.kept = None
            slot.full.grad = None
            if grad is not None:
                tensors.append(grad.to_dense() if grad.layout != torch.strided else grad)
                offsets.append(slot.offset)
        if flat.is_cpu or self.dtype.is_complex:
            # Reading a list that is new each time takes the kernel's table longer than the host takes to copy it.
            if len(tensors) < len(self.slots):
                flat.zero_()
            for begin, end in self._gaps:
                flat[begin:end].zero_()
            views = [flat[at : at + each.numel()].view(each.shape) for at, each in zip(offsets, tensors, strict=True)]
            if views:
                torch._foreach_copy_(views, tensors)
        elif len(tensors) == len(self.slots) and self._simple:
            pack([each.contiguous() for each in tensors], flat)
            flat[self.layout.total :].zero_()
        else:
            flat.zero_()
            if tensors:
                pack([each.contiguous() for each in tensors], flat, offsets=offsets)
        return flat

    def _own_grad(self) -> torch.Tensor:
        """Give the memory of the gradients' shard."""
        if self.grad is None or self.grad.numel() != self.share:
            if self.ranks.shard is None:  # reduced where it lies
                self.grad = self._empty(self.share, self.ranks.world._on_host, self.store)
            else:
                self.grad = self._empty(self.share, False, self.store)
        return self.grad

    def output(self) -> tuple[torch.Tensor, bool]:
        """Give where this rank's part of the reduced gradients is to go, and whether that is the gradients' shard."""
        fits = self.reduce_dtype == self.dtype and self.store == self.device
        if fits and all(slot.piece.grad is None for slot in self.slots):
            return self._own_grad(), True
        return torch.empty(self.share, dtype=self.reduce_dtype, device=self.device), False

    @torch.no_grad()
    def take_in(self, part: torch.Tensor, in_place: bool) -> None:
        """Make this rank's part of the reduced gradients the pieces' gradients, or add it to those they have.

        Where the pieces lie on the host their values are there once `copies` has been waited for.
        """
        grad = self._own_grad()
        if self.offloads:
            self._take_to_host(part, grad)
            return
        if not in_place and all(slot.piece.grad is None for slot in self.slots):
            grad.copy_(part)
            in_place = True
        for slot in self.slots:
            count = slot.piece.numel()
            if slot.piece.grad is None:
                slot.fresh = True
            if in_place or slot.piece.grad is None:
                view = self._piece_of(grad, slot, count)
                if not in_place:
                    view.copy_(self._piece_of(part, slot, count))
                slot.piece.grad = view
            else:
                slot.piece.grad.add_(self._piece_of(part, slot, count).to(slot.piece.grad))

    def _take_to_host(self, part: torch.Tensor, grad: torch.Tensor) -> None:
        fresh = [slot for slot in self.slots if slot.piece.grad is None]
        added = [slot for slot in self.slots if slot.piece.grad is not None and slot.piece.numel()]
        for slot in fresh:
            slot.fresh = True
            slot.piece.grad = self._piece_of(grad, slot, slot.piece.numel())
        if not added:
            self.copies.to_host(grad, part)
            return
        arrived = self._empty(self.share, False, self.store)

        @torch.no_grad()
        def take():
            for slot in fresh:
                self._piece_of(grad, slot, slot.piece.numel()).copy_(self._piece_of(arrived, slot, slot.piece.numel()))
            for slot in added:
                if slot.piece.grad is not None:
                    slot.piece.grad.add_(self._piece_of(arrived, slot, slot.piece.numel()))

        self.copies.to_host(arrived, part, take)
