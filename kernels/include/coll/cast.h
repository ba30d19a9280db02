// pack and unpack: the tensors of a table to or from the flat buffer, with scale, cast, addition
// and statistics.
#ifndef COLL_CAST_H_
#define COLL_CAST_H_

#include "tile.h"

COLL_FN int coll_width(int type) {
  switch (type) {
    case COLL_I8: case COLL_U8: case COLL_E4M3: case COLL_E5M2: return 1;
    case COLL_F16: case COLL_BF16: return 2;
    case COLL_I32: case COLL_U32: case COLL_F32: return 4;
    case COLL_I64: case COLL_U64: case COLL_F64: return 8;
    default: return type - COLL_OPAQUE;
  }
}

// Neighbouring tiles of one tensor: where they come from and go to.
struct coll_cast_span {
  const char* from;
  char* to;
  int64_t count;    // elements
  int64_t padding;  // elements of the flat buffer behind `to` + count that become 0
  int from_type, to_type;
  bool copies;      // nothing but bytes to move: their bits stay as they are, those of a NaN too
};

// Tiles [tile, tile + tiles) of `tensor`, which must hold them all.
COLL_FN coll_cast_span coll_cast_at(const coll_cast_args& a, const coll_tensor& tensor, int64_t tile, int64_t tiles) {
  int64_t first = (tile - tensor.first_tile) * COLL_TILE;
  int64_t left = tensor.count - first;
  char* own = (char*)tensor.data + first * coll_width(tensor.type);
  bool measures = (a.flags & COLL_MEASURE) != 0;
  char* flat = measures ? own : (char*)a.flat + (tensor.offset + first) * coll_width(a.flat_type);
  bool unpacks = (a.flags & COLL_FROM_FLAT) != 0;
  coll_cast_span s;
  s.from = unpacks ? flat : own;
  s.to = unpacks ? own : flat;
  s.from_type = unpacks ? a.flat_type : tensor.type;
  s.to_type = unpacks ? tensor.type : a.flat_type;
  s.count = left < tiles * COLL_TILE ? left : tiles * COLL_TILE;
  s.padding = !unpacks && !measures && s.count == left ? tensor.padding : 0;
  s.copies = tensor.type == a.flat_type && a.scale == 1.0 && !a.scale_at && !a.work.sums && !(a.flags & COLL_ADD);
  return s;
}

// Values pass through fp32, or fp64 where either side is fp64.
COLL_FN bool coll_cast_is_wide(const coll_cast_span& s) { return s.from_type == COLL_F64 || s.to_type == COLL_F64; }

// The scale as the kernel uses it, which may be known only on the device.
COLL_FN double coll_cast_scale(const coll_cast_args& a) { return a.scale_at ? a.scale * (double)*a.scale_at : a.scale; }

#endif
