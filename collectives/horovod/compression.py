"""Compression: the elements that are sent in place of a gradient's own."""

from __future__ import annotations

import torch

__all__ = ["Compression", "Compressor"]


class Compressor:
    """Compresses tensors before an allreduce and decompresses the result.

    Base class of your own compressors, too. ``wire``: a wire format of ours to which the allreduce
    itself rounds elements, with sums in fp32; "" for none.
    """

    wire = ""

    @staticmethod
    def compress(tensor: torch.Tensor):
        """Return the tensor to reduce, and the context that `decompress` needs."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx):
        """Return the reduced tensor in its own dtype."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends elements as they are."""

    @staticmethod
    def compress(tensor):
        return tensor, None

    @staticmethod
    def decompress(tensor, ctx):
        return tensor


class _CastCompressor(Compressor):
    """Sends floating types as a 16-bit one; sums are taken in fp32 and rounded once."""

    dtype: torch.dtype

    @classmethod
    def compress(cls, tensor):
        return (tensor.to(cls.dtype) if tensor.dtype.is_floating_point else tensor), tensor.dtype

    @classmethod
    def decompress(cls, tensor, ctx):
        return tensor.to(ctx) if ctx is not None and ctx.is_floating_point else tensor


class FP16Compressor(_CastCompressor):
    """Sends fp16: Horovod's. Magnitudes from 65,520 on overflow, in the sum as well."""

    dtype = torch.float16


class BF16Compressor(_CastCompressor):
    """Sends bf16: 8 bits of precision, and the range of fp32."""

    dtype = torch.bfloat16


class Int8Compressor(NoneCompressor):
    """Sends fp32 and fp64 as int8 with a scale for each 256 elements: a quarter of the bytes, sums
    in fp32.
    """

    wire = "int8"


class Compression:
    """The kinds of compression, by name."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    int8 = Int8Compressor
