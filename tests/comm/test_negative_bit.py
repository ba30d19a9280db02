"""Tensors whose memory holds the negatives of their values, as `x.conj().imag`: none is sent as it lies."""

from __future__ import annotations

import weakref

import pytest
import torch

import collectives
from collectives.arrays import TORCH_CODES, Reader
from collectives.errors import InvalidArgument
from tests.comm.test_array_calls import CPU, complex_ones, needs_table


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
def test_the_reader_takes_what_is_neg_is_false_for():
    reader = Reader(CPU).array_reader
    for negative, plain in negatives():
        assert negative.is_neg() and not plain.is_neg()
        assert reader.read(negative) is None
        assert reader.read(plain) == (plain.data_ptr(), plain.numel(), TORCH_CODES[plain.dtype])
        changed = plain.detach().clone()
        changed.data = negative.detach()  # the same object, now of other memory
        assert reader.read(changed) is None
        changed.data = plain.detach()
        assert reader.read(changed) is not None


def test_a_call_says_how_to_send_it():
    x = torch.tensor([1 + 2j])
    with collectives.init() as comm:
        with pytest.raises(InvalidArgument, match=r"lazy view whose memory holds other values: use \.resolve_neg\(\)"):
            comm.all_reduce(x.conj().imag)
        with pytest.raises(InvalidArgument, match=r"use \.resolve_conj\(\)"):
            comm.broadcast(x.conj())
        sent = x.conj().imag.resolve_neg()
        comm.all_reduce(sent)
        assert sent.tolist() == [-2.0]


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
