// pack and unpack: one tile of one tensor to or from the flat buffer, with scale, cast, addition and statistics.
#ifndef COLL_CAST_H_
#define COLL_CAST_H_

#include "tile.h"

COLL_FN bool coll_is_floating(int type) { return type >= COLL_F16 && type <= COLL_E5M2; }

COLL_FN int coll_width(int type) {
  switch (type) {
    case COLL_I8: case COLL_U8: case COLL_E4M3: case COLL_E5M2: return 1;
    case COLL_F16: case COLL_BF16: return 2;
    case COLL_I32: case COLL_U32: case COLL_F32: return 4;
    case COLL_I64: case COLL_U64: case COLL_F64: return 8;
    default: return type - COLL_OPAQUE;
  }
}

// Where a tile comes from and goes to.
struct coll_cast_tile {
  const void* from;
  void* to;
  int from_type, to_type;
  int count;  // elements, at most COLL_TILE
  bool copies;  // nothing but bytes to move
};

// `tensor` must hold `tile`.
COLL_FN coll_cast_tile coll_cast_at(const coll_cast_args& a, const coll_tensor& tensor, int64_t tile) {
  int64_t first = (tile - tensor.first_tile) * COLL_TILE;
  int64_t left = tensor.count - first;
  char* own = (char*)tensor.data + first * coll_width(tensor.type);
  char* flat = (char*)a.flat + (tensor.offset + first) * coll_width(a.flat_type);
  bool unpacks = (a.flags & COLL_FROM_FLAT) != 0;
  coll_cast_tile t;
  t.from = unpacks ? flat : own;
  t.to = unpacks ? own : flat;
  t.from_type = unpacks ? a.flat_type : tensor.type;
  t.to_type = unpacks ? tensor.type : a.flat_type;
  t.count = (int)(left < COLL_TILE ? left : COLL_TILE);
  t.copies = tensor.type == a.flat_type && a.scale == 1.0 && !a.scale_at && !a.work.sums && !(a.flags & COLL_ADD);
  return t;
}

// Values pass through fp32, or fp64 where either side is fp64.
COLL_FN bool coll_cast_wide(const coll_cast_tile& t) { return t.from_type == COLL_F64 || t.to_type == COLL_F64; }

#endif
