"""The bit by which the fast path finds that a tensor's memory holds the negatives of its values."""

from __future__ import annotations

import weakref

import torch

from collectives import _nccl, arrays
from collectives.arrays import TORCH_CODES, Reader
from tests.comm.test_array_calls import CPU, complex_ones, needs_table, reader_with


def negatives():
    """Tensors whose memory holds their negatives, with one that is the same but for that."""
    of = torch.ones(4)
    yield torch._neg_view(of), of
    yield torch._neg_view(of).resize_(2), of[:2]
    yield torch._neg_view(of).as_strided((3,), (1,)), of[:3]
    yield torch._neg_view(of)[1:].view(3, 1), of[1:].view(3, 1)
    yield complex_ones(1).conj().imag, complex_ones(1).imag
    yield torch._neg_view(of.bfloat16()), of.bfloat16()
    yield torch.nn.Parameter(torch._neg_view(of)), torch.nn.Parameter(of)
    with torch.inference_mode():
        yield torch._neg_view(torch.ones(4)), torch.ones(4)
    changed, plain = torch.ones(4), torch.ones(4)
    changed.data = torch._neg_view(plain)
    yield changed, plain


@needs_table
def test_the_bit_says_what_is_neg_says():
    assert arrays._NEGATIVE_BIT is not None  # found in the torch that is installed
    asks = reader_with(arrays._EXCHANGE)
    looks = _nccl.ArrayReader(
        1, 0, exchange=arrays._EXCHANGE, tensors=(torch.Tensor, torch.nn.Parameter), is_lazy=bool,
        lazy_bit=arrays._NEGATIVE_BIT,
    )  # fmt: skip
    for negative, plain in negatives():
        assert negative.is_neg() and not plain.is_neg()
        assert looks.read(negative) is None
        assert looks.read(plain) == (plain.data_ptr(), plain.numel(), TORCH_CODES[plain.dtype])
        if type(plain) is torch.Tensor:
            assert asks.read(negative) is None and asks.read(plain) == looks.read(plain)
        changed = plain.detach().clone()
        changed.data = negative.detach()  # the same object, now of other memory
        assert looks.read(changed) is None
        changed.data = plain.detach()
        assert looks.read(changed) is not None


@needs_table
def test_a_bit_that_is_not_found_is_asked_for(monkeypatch):
    from collectives import torch_compat

    assert torch_compat.find_negative_bit() == arrays._NEGATIVE_BIT
    monkeypatch.setattr(torch_compat, "_TENSOR_IMPL_BYTES", 64)  # as if the keys were behind that
    assert torch_compat.find_negative_bit() is None
    assert reader_with(arrays._EXCHANGE).read(torch._neg_view(torch.ones(3))) is None


@needs_table
def test_a_tensor_found_again_by_a_weak_reference_is_read():
    """It is a tensor's .grad, which autograd alone has held meanwhile."""
    owner, gradient = torch.ones(4), torch.full((4,), 2.0)
    address, weak = gradient.data_ptr(), weakref.ref(gradient)
    owner.grad = gradient
    del gradient
    found = weak()
    assert Reader(CPU).array_reader.read(found) == (address, 4, TORCH_CODES[torch.float32])
    owner.grad = torch._neg_view(torch.ones(4))
    weak = weakref.ref(owner.grad)
    assert Reader(CPU).array_reader.read(weak()) is None


@needs_table
def test_tensors_that_a_version_keeps_elsewhere_are_asked(monkeypatch):
    """Where a tensor found again by a weak reference hasn't its address at the place of the others."""
    from collectives import torch_compat

    class Elsewhere:
        __slots__ = ("_cdata", *(f"unused{i}" for i in range(32)))  # as much memory as a tensor, at least

        def __init__(self, tensor):
            self._cdata = tensor._cdata  # this object's memory doesn't hold it

    kept = []

    def again(tensor):
        kept.append(Elsewhere(tensor))
        return lambda: kept[0]

    dispatch_keys = torch._C._dispatch_keys
    plain = torch.ones(2)
    monkeypatch.setattr(torch_compat.weakref, "ref", again)
    monkeypatch.setattr(
        torch._C, "_dispatch_keys", lambda each: dispatch_keys(plain if type(each) is Elsewhere else each)
    )
    assert torch_compat.find_negative_bit() is None
    assert kept[0]._cdata
