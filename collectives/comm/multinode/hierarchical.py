"""The collectives over several machines: our engine inside of each machine, bytes over Gloo between them.

Reductions go in three steps: inside, each carrier (`machines.Layout`) gets its piece of the machine's sum; the carriers
with one number exchange their pieces, each one sums its part of the piece, in the order of the machines, and sends the
result to the others (of two machines each sums all of it); inside, the pieces are gathered. So each element is summed
in one order: all ranks have the same bits, and they depend on nothing but the arrays and on which rank is where. Types
narrower than fp32 travel as fp32 until they are rounded, once, at the end.

Every call begins with a frame between the carriers: what is called, and small arrays along with it.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from ..._nccl import DTYPES, OPS
from ...arrays import ITEMSIZE, TORCH_CODES
from ...errors import Mismatch
from ...kernels import abi
from ...kernels.execution import Statistics, run_on_host
from ...kernels.reduction import kernel_of
from ...layout import TILE
from ..fingerprint import compare, describe
from .gloo import Lost, Mesh
from .topology import Layout

__all__ = ["Across", "Message", "Reduction", "Unlike"]

_F32, _INT64, _UINT8 = DTYPES["float32"], DTYPES["int64"], DTYPES["uint8"]
_SUM, _AVG = OPS["sum"], OPS["avg"]
_EXACT = (OPS["max"], OPS["min"])  # nothing is rounded, so nothing wider is needed on the way
_TORCH = {code: dtype for dtype, code in TORCH_CODES.items()}
_FLOATING = {code for code, dtype in _TORCH.items() if dtype.is_floating_point}

_WORDS = 8  # int64 of a frame's head: sequence, the call's fingerprint, a digest of the dtype's name, 0
_HEAD = 8 * _WORDS
SMALL = 8192  # bytes that travel in a frame
_INSIDE_MORE_S = 3.0  # by which waits inside are longer that may be for a rank that waits for another machine
_SUM_BLOCK = 1 << 16  # elements; of an average over a number of ranks that is no power of two


class Unlike(Exception):
    """A `Mismatch` between machines, in the communicator's numbers."""

    def __init__(self, error: Mismatch):
        super().__init__(str(error))
        self.error = error


class Reduction(NamedTuple):
    """What to do with elements. `scalar`: a premultiplied sum's number, `op` is a sum then."""

    dtype: int
    op: int
    scalar: float | int | None = None


class Message(NamedTuple):
    """One side of a message between two ranks; `words`: what its head compares."""

    sends: bool
    address: int
    count: int
    dtype: int
    peer: int
    words: tuple[int, ...]
    label: str | None = None


class Across:
    """The data's ways over one communicator's ranks, one call at a time.

    ``inside``: the engine's communicator of this machine's ranks.
    """

    def __init__(self, inside, mesh: Mesh, layout: Layout):
        self.inside = inside
        self.mesh = mesh
        self.layout = layout
        self.library = inside.library
        self.seconds: float | None = None
        self.sequence = 0
        self._scratch: dict[str, torch.Tensor] = {}

    # ---- Reductions.

    def all_reduce(self, words, send: int, recv: int, count: int, how: Reduction, share: int = 0) -> None:
        """Reduce; ``share``: address of two doubles to which the results that this rank has made are added, or 0."""
        layout, width = self.layout, ITEMSIZE[how.dtype]
        out = self._aligned("out", recv, count * width, width)
        source, work, carry, op, made = self._prepared(send, out, count, how)
        step = ITEMSIZE[carry]
        piece = 0 if count * step <= SMALL else layout.piece(count)
        main = piece * layout.carriers
        tail = count - main
        try:
            if tail or not main:
                self.inside.all_reduce(source + main * step, work + main * step, tail, carry, op)
            if main:
                self._reduce_pieces(source, work, piece, carry, op)
        finally:
            if made is not None:
                self.inside.destroy_op(made)
        parts = []
        self._later()
        if layout.carries:
            start = layout.local * piece
            sources, sends, receives = self._piece_messages(work + start * step, piece, step) if main else ([], [], [])
            frames = self._meet(words, work + main * step, tail * step, sends, receives)
            self._sum(frames, out + main * width, tail, carry, how)
            if layout.machine == layout.local == 0:
                parts.append((out + main * width, tail))
            if main:
                parts.append(self._sum_piece(sources, out + start * width, piece, carry, how))
        if main:
            if layout.full:
                self.inside.all_gather(out + layout.local * piece * width, out, piece, how.dtype)
            else:
                self._spread((out + j * piece * width, piece * width, j) for j in range(layout.carriers))
        if tail and not layout.full:
            self.inside.broadcast(out + main * width, out + main * width, tail, how.dtype, 0)
        self._land(out, recv, count * width)
        if share:
            self._share(parts, how.dtype, share)

    def reduce(self, words, send: int, recv: int, count: int, how: Reduction, root: int) -> None:
        """Reduce to one rank."""
        mine = self.layout.rank == root
        out = recv if mine else self._borrow("elsewhere", count * ITEMSIZE[how.dtype])
        self.all_reduce(words, send, out, count, how)

    def reduce_scatter(self, words, send: int, recv: int, count: int, how: Reduction, share: int = 0) -> None:
        """Reduce, part r of ``count`` elements to rank r."""
        layout, width = self.layout, ITEMSIZE[how.dtype]
        ranks = len(layout.places)
        out = self._aligned("out", recv, count * width, width)
        source, _, carry, op, made = self._prepared(send, 0, count * ranks, how)
        step = ITEMSIZE[carry]
        nbytes = count * step
        # Here: machine by machine, the machine's own sums of what this carrier's ranks are to get.
        slots = [layout.carried(m) for m in range(len(layout.machines))] if layout.carries else []
        sums = self._borrow("sums", nbytes * sum(map(len, slots)))
        at = {rank: sums + i * nbytes for i, rank in enumerate(r for ranks in slots for r in ranks)}
        try:
            with _Grouped(self.library):
                if layout.in_rows:
                    for ranks in layout.machines:
                        to = at[ranks[layout.local]]
                        self.inside.reduce_scatter(source + ranks[0] * nbytes, to, count, carry, op)
                else:
                    for rank in range(ranks):
                        to = layout.carrier_of(rank)
                        self.inside.reduce(source + rank * nbytes, at.get(rank, 0), count, carry, op, to)
        finally:
            if made is not None:
                self.inside.destroy_op(made)
        results = {}
        self._later()
        if layout.carries:
            self._meet(words)
            mine = layout.carried(layout.machine)
            theirs = self._borrow("theirs", nbytes * len(mine) * len(layout.machines))
            places = {m: theirs + m * len(mine) * nbytes for m in range(len(layout.machines))}
            self.mesh.exchange(
                [(peer, at[slots[m][0]], nbytes * len(slots[m])) for m, peer in layout.peers if slots[m]],
                [(peer, places[m], nbytes * len(mine)) for m, peer in layout.peers],
                self._limit,
            )
            places[layout.machine] = at[mine[0]]
            made_here = self._borrow("results", count * width * len(mine))
            for i, rank in enumerate(mine):
                results[rank] = out if rank == layout.rank else made_here + i * count * width
                self._sum([places[m] + i * nbytes for m in sorted(places)], results[rank], count, carry, how)
        if not layout.full:
            with _Grouped(self.library):
                for local, rank in enumerate(layout.here):
                    carrier = layout.carrier_of(rank)
                    if carrier != local and layout.local == carrier:
                        self.inside.send(results[rank], count, how.dtype, local)
                    if carrier != local and layout.local == local:
                        self.inside.recv(out, count, how.dtype, carrier)
        self._land(out, recv, count * width)
        if share:
            self._share([(out, count)], how.dtype, share)

    # ---- Copies.

    def broadcast(self, words, send: int, recv: int, nbytes: int, root: int) -> None:
        """Send one rank's bytes to all."""
        layout = self.layout
        origin, local = layout.places[root]
        here = layout.machine == origin
        if here:
            self.inside.broadcast(send, recv, nbytes, _UINT8, local)
        small = nbytes <= SMALL
        self._later()
        if layout.carries:
            frames = self._meet(words, recv if small else 0, nbytes if small else 0)
            if small and not here:
                ctypes.memmove(recv, frames[origin], nbytes)
            if not small:
                start, length = layout.part(nbytes, layout.local, layout.carriers)
                parts = [layout.part(length, m) for m in range(len(layout.machines))]
                places = [(recv + start + begin, size) for begin, size in parts]
                own = places[layout.machine]
                # Each machine gets its part from the root's, then all have all from each other.
                if here:
                    self.mesh.exchange([(peer, *places[m]) for m, peer in layout.peers], [], self._limit)
                else:
                    root_peer = layout.machines[origin][layout.local]
                    self.mesh.exchange([], [(root_peer, *own)], self._limit)
                sends = [(peer, *own) for m, peer in layout.peers if m != origin]
                receives = [] if here else [(peer, *places[m]) for m, peer in layout.peers]
                self.mesh.exchange(sends, receives, self._limit)
        if not here and not (small and layout.full):
            if small:
                self.inside.broadcast(recv, recv, nbytes, _UINT8, 0)
            else:
                parts = [layout.part(nbytes, j, layout.carriers) for j in range(layout.carriers)]
                self._spread((recv + start, length, j) for j, (start, length) in enumerate(parts))

    def all_gather(self, words, send: int, recv: int, nbytes: int) -> None:
        """Give every rank all ranks' bytes, in rank order."""
        layout = self.layout
        own = recv + layout.rank * nbytes
        if own != send:
            ctypes.memmove(own, send, nbytes)
        self._gather_inside([layout.here], nbytes, recv, lambda rank: layout.places[rank][1])
        self._later()
        if layout.carries:
            mine = layout.carried(layout.machine)
            small = nbytes * max(len(layout.carried(m)) for m in range(len(layout.machines))) <= SMALL
            if small:
                packed = self._borrow("packed", SMALL)
                for i, rank in enumerate(mine):
                    ctypes.memmove(packed + i * nbytes, recv + rank * nbytes, nbytes)
                frames = self._meet(words, packed, len(mine) * nbytes)
                for m, _ in layout.peers:
                    for i, rank in enumerate(layout.carried(m)):
                        ctypes.memmove(recv + rank * nbytes, frames[m] + i * nbytes, nbytes)
            else:
                self._meet(words)
                self.mesh.exchange(
                    [(peer, recv + rank * nbytes, nbytes) for _, peer in layout.peers for rank in mine],
                    [(peer, recv + rank * nbytes, nbytes) for m, peer in layout.peers for rank in layout.carried(m)],
                    self._limit,
                )
        others = [ranks for m, ranks in enumerate(layout.machines) if m != layout.machine]
        self._gather_inside(others, nbytes, recv, layout.carrier_of)

    def messages(self, messages: list[Message]) -> None:
        """Send and receive between any two ranks; messages of two ranks are matched in order, nothing else is.

        The ones to other machines are started first, so that no machine waits for what another one has yet to send.
        """
        layout = self.layout
        heads, payloads, checks = [], [], []
        local = [m for m in messages if layout.places[m.peer][0] == layout.machine]
        remote = [m for m in messages if layout.places[m.peer][0] != layout.machine]
        sends = [m for m in remote if m.sends]
        receives = [m for m in remote if not m.sends]
        for message in receives:
            head = torch.zeros(_WORDS, dtype=torch.int64)
            checks.append((message, head))
            heads += self.mesh.start([], [(message.peer, head.data_ptr(), _HEAD)])
            payloads += self.mesh.start([], [(message.peer, message.address, message.count * ITEMSIZE[message.dtype])])
        for message in sends:
            head = torch.tensor([0, *message.words], dtype=torch.int64)
            payloads += self.mesh.start([(message.peer, head.data_ptr(), _HEAD)], [])
            payloads += self.mesh.start([(message.peer, message.address, message.count * ITEMSIZE[message.dtype])], [])
            checks.append((None, head))  # holds it
        if local:
            with _Grouped(self.library):
                for message in local:
                    move = self.inside.send if message.sends else self.inside.recv
                    if message.label is not None:
                        self.library.label(None, message.label)
                    move(message.address, message.count, message.dtype, layout.places[message.peer][1])
        if heads:
            self.mesh.wait(heads, self._limit)
        for message, head in checks:
            theirs = tuple(head[1:].tolist())
            if message is not None and theirs != message.words:
                raise Unlike(Mismatch(
                    f"the two sides of a message differ:\n  rank {message.peer} sends: {describe(theirs[:5])}\n  rank "
                    f"{layout.rank} expects: {describe(message.words[:5])}",
                    rank=layout.rank, peers=(message.peer,),
                ))  # fmt: skip
        self.mesh.wait(payloads, self._limit)

    # ---- Steps.

    @property
    def _limit(self) -> float | None:
        """The limit of a wait for another machine: a little above the one inside, where more is known of the cause."""
        return None if self.seconds is None else self.seconds + 1.0

    def begin(self, seconds: float | None) -> None:
        """Begin a call; ``seconds``: limit of each wait."""
        self.seconds = seconds
        self.inside.set_timeout(seconds)

    def _later(self) -> None:
        """After a call's first step: ranks here may wait for one that waits for another machine."""
        if self.seconds is not None:
            self.inside.set_timeout(self.seconds + _INSIDE_MORE_S)

    def _prepared(self, send: int, work: int, count: int, how: Reduction):
        """Give (source, where sums go, their dtype, op inside, the op to destroy) of a reduction's step inside."""
        width = ITEMSIZE[how.dtype]
        floating = how.dtype in _FLOATING
        if floating and width < 4 and how.op not in _EXACT:
            wide = self._borrow("wide", 4 * count)
            source = send
            if send % width:
                source = self._borrow("copy", count * width)
                ctypes.memmove(source, send, count * width)
            factor = 1.0 if how.scalar is None else torch.tensor(how.scalar, dtype=_TORCH[how.dtype]).item()
            self._kernel([source], wide, count, how.dtype, _F32, _SUM, factor)
            return wide, wide, _F32, _SUM if how.op == _AVG else how.op, None
        if how.scalar is not None:
            made = self.inside.create_premul_sum(how.scalar, how.dtype)
            return send, work, how.dtype, made, made
        return send, work, how.dtype, _SUM if how.op == _AVG else how.op, None

    def _reduce_pieces(self, source: int, work: int, piece: int, dtype: int, op: int) -> None:
        layout, nbytes = self.layout, piece * ITEMSIZE[dtype]
        if layout.full:
            self.inside.reduce_scatter(source, work + layout.local * nbytes, piece, dtype, op)
            return
        with _Grouped(self.library):
            for j in range(layout.carriers):
                to = work + j * nbytes if j == layout.local else 0
                self.inside.reduce(source + j * nbytes, to, piece, dtype, op, j)

    def _piece_messages(self, work: int, piece: int, step: int) -> tuple[list, list, list]:
        """Give where the machines' sums of this carrier's part of its piece will be, and the messages to get there."""
        layout = self.layout
        parts = self._parts_to_sum(piece)
        start, length = parts[layout.machine]
        room = -(-length * step // 64) * 64
        theirs = self._borrow("theirs", room * len(parts))
        sources = [theirs + m * room for m in range(len(parts))]
        sources[layout.machine] = work + start * step
        sends = [(peer, work + parts[m][0] * step, parts[m][1] * step) for m, peer in layout.peers]
        return sources, sends, [(peer, sources[m], length * step) for m, peer in layout.peers]

    def _parts_to_sum(self, piece: int) -> list[tuple[int, int]]:
        """Give which part of a piece each machine sums: (start, elements).

        Of two machines both sum all of it, which sends the same bytes once less often; of more each sums its own.
        """
        layout = self.layout
        if len(layout.machines) == 2:
            return [(0, piece)] * 2
        return [layout.part(piece, m) for m in range(len(layout.machines))]

    def _sum_piece(self, sources: list[int], out: int, piece: int, carry: int, how: Reduction) -> tuple[int, int]:
        """Sum this carrier's piece over the machines; give (address, elements) of the part that was made here."""
        layout, width = self.layout, ITEMSIZE[how.dtype]
        parts = self._parts_to_sum(piece)
        start, length = parts[layout.machine]
        self._sum(sources, out + start * width, length, carry, how)
        if len(parts) == 2:  # both have it all; what counts as made here is a half
            start, length = layout.part(piece, layout.machine)
            return out + start * width, length
        self.mesh.exchange(
            [(peer, out + start * width, length * width) for _, peer in layout.peers],
            [(peer, out + parts[m][0] * width, parts[m][1] * width) for m, peer in layout.peers],
            self._limit,
        )
        return out + start * width, length

    def _meet(self, words, payload: int = 0, nbytes: int = 0, sends=(), receives=()) -> list[int]:
        """Exchange frames with the other machines' carriers of this number and compare what they call.

        ``sends`` and ``receives``: messages that go right behind them. Gives the addresses of the payloads, by machine,
        this one's at its place.
        """
        layout = self.layout
        self.sequence += 1
        room = _HEAD + SMALL
        base = self._borrow("frames", room * (len(layout.machines) + 1))
        own = base + room * layout.machine
        head = (ctypes.c_int64 * _WORDS)(self.sequence, *words)
        ctypes.memmove(own, head, _HEAD)
        if nbytes:
            ctypes.memmove(own + _HEAD, payload, nbytes)
        for m, _ in layout.peers:
            ctypes.memset(base + room * m, 0, 8)  # its sequence: nothing has come yet
        # One may come with more than this rank has itself, where the calls differ: there is room for it.
        started = self.mesh.start(
            [(peer, own, _HEAD + nbytes) for _, peer in layout.peers],
            [(peer, base + room * m, room) for m, peer in layout.peers],
        )
        try:
            self.mesh.wait(started + self.mesh.start(sends, receives), self._limit)
        except Lost:
            # An unlike call may have sent too much, or have ended its connections over what it was sent.
            self._compare(base, room, head, arrived=True)
            raise
        return self._compare(base, room, head)

    def _compare(self, base: int, room: int, head, arrived: bool = False) -> list[int]:
        """Raise `Unlike` where heads of frames differ; ``arrived``: look at those alone that have come."""
        layout = self.layout
        addresses = [base + room * m for m in range(len(layout.machines))]
        heads = [(ctypes.c_int64 * _WORDS).from_address(address) for address in addresses]
        if arrived:
            heads = [each if each[0] else head for each in heads]
        if any(bytes(each) != bytes(head) for each in heads):
            ranks = [machine[layout.local] for machine in layout.machines]
            try:
                compare([[tuple(each[1:6])] for each in heads], layout.machine, ranks)
            except Mismatch as error:
                raise Unlike(error) from None
            raise Unlike(Mismatch(
                "the ranks did not make the same call: their arrays have other dtypes, or other calls came before on "
                f"{', '.join(f'rank {r}: call {each[0]}' for r, each in zip(ranks, heads, strict=True))}",
                rank=layout.rank, peers=[peer for _, peer in layout.peers],
            ))  # fmt: skip
        return [address + _HEAD for address in addresses]

    def _gather_inside(self, machines, nbytes: int, recv: int, carrier) -> None:
        """Give the blocks of some machines' ranks, each of which one rank here has, to all ranks here."""
        layout = self.layout
        if len(layout.here) == 1 or not nbytes:
            return
        with _Grouped(self.library):
            for ranks in machines:
                if layout.in_rows:
                    first = recv + ranks[0] * nbytes
                    self.inside.all_gather(first + layout.local * nbytes, first, nbytes, _UINT8)
                    continue
                for rank in ranks:
                    self.inside.broadcast(recv + rank * nbytes, recv + rank * nbytes, nbytes, _UINT8, carrier(rank))

    def _spread(self, pieces) -> None:
        """Send pieces, (address, bytes, local rank that has it), to all ranks of this machine."""
        if len(self.layout.here) > 1:
            with _Grouped(self.library):
                for address, nbytes, local in pieces:
                    self.inside.broadcast(address, address, nbytes, _UINT8, local)

    # ---- Arithmetic and memory.

    def _sum(self, sources: list[int], out: int, count: int, dtype: int, how: Reduction) -> None:
        """Reduce the machines' arrays in their order, and round to the result."""
        if not count:
            return
        if how.op != _AVG:
            self._kernel(sources, out, count, dtype, how.dtype, _SUM if how.scalar is not None else how.op)
            return
        ranks = len(self.layout.places)
        if dtype in _FLOATING and not ranks & (ranks - 1):  # the same bits as the division
            self._kernel(sources, out, count, dtype, how.dtype, _SUM, 1.0 / ranks)
            return
        # The kernel divides by the number of its sources: make it up with zeros, which change nothing.
        block = min(count, _SUM_BLOCK)
        zeros = torch.full((block,), -0.0 if dtype in _FLOATING else 0, dtype=_TORCH[dtype])
        padding = [zeros.data_ptr()] * (ranks - len(sources))
        for start in range(0, count, block):
            some = [source + start * ITEMSIZE[dtype] for source in sources]
            to = out + start * ITEMSIZE[how.dtype]
            self._kernel(some + padding, to, min(block, count - start), dtype, how.dtype, _AVG)

    def _kernel(self, sources, out: int, count: int, dtype: int, to: int, op: int, scale: float = 1.0) -> None:
        table = (ctypes.c_uint64 * len(sources))(*sources)
        args = abi.ReduceArgs(
            abi.Work(-(-count // TILE), 0, 0), ctypes.addressof(table), len(sources), out, count, 0, scale, op, dtype,
            to, 0,
        )  # fmt: skip
        if count:
            run_on_host(kernel_of(dtype, to), args)

    def _share(self, parts, dtype: int, share: int) -> None:
        """Add the squares and the non-finite elements of parts, (address, elements), to two doubles."""
        sums = (ctypes.c_double * 2).from_address(share)
        for address, count in parts:
            if not count:
                continue
            found = Statistics()
            table = (ctypes.c_uint64 * 1)(address)
            work = abi.Work(-(-count // TILE), 0, 0)
            args = abi.ReduceArgs(work, ctypes.addressof(table), 1, address, count, 0, 1.0, _SUM, dtype, dtype, 0)
            found.begin(args.work, found.device, "share")
            run_on_host(kernel_of(dtype, dtype), args)  # onto itself
            found.finish(args.work.tiles)
            sums[0] += found.sum_of_squares.item()
            sums[1] += found.nonfinite.item()

    def _borrow(self, name: str, nbytes: int) -> int:
        """Give the address of scratch memory, which is kept."""
        have = self._scratch.get(name)
        if have is None or have.numel() < nbytes + 64:
            size = 1 << max(14, (nbytes + 63).bit_length())
            self._scratch[name] = have = torch.empty(size, dtype=torch.uint8)
        return -(-have.data_ptr() // 64) * 64

    def _aligned(self, name: str, address: int, nbytes: int, width: int) -> int:
        """Give an address for results that the kernels can use: the caller's, or scratch until `_land`."""
        return self._borrow(name, nbytes) if address % width else address

    def _land(self, out: int, recv: int, nbytes: int) -> None:
        if out != recv:
            ctypes.memmove(recv, out, nbytes)


class _Grouped:
    """A group of the engine's calls."""

    def __init__(self, library):
        self._library = library

    def __enter__(self):
        self._library.group_start()

    def __exit__(self, kind, error, trace):
        if kind is None:
            self._library.group_end()
        else:
            self._library.group_cancel()
