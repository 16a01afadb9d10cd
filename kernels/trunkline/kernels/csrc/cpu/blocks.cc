// Exported block ops: writing new tokens, copying token ranges, moving blocks in plain order to and from
// elsewhere.
//
// Invariant: `packed[block, layer]` says in which order the block's tiles of that layer are, before and after
// every op. A chunk is packed when its last slot is written (it is then full); a write into a part of a packed
// chunk unpacks it first. All indices are checked before anything is touched.

#include <algorithm>
#include <cstring>

#include "attention_checks.h"
#include "common/exports.h"
#include "ops.h"

namespace trunkline {
namespace {

// Elements of work below which waking other threads costs more than it brings.
constexpr int64_t kParallelElements = 1 << 15;

char* region_of(const PoolView& pool, int64_t block, int64_t layer) {
  return pool.data + (block * pool.layers + layer) * pool.bands * pool.kv_heads * pool.tile_bytes;
}

uint8_t& flag_of(const PoolView& pool, int64_t block, int64_t layer) {
  return pool.packed[block * pool.layers + layer];
}

// One op's access to the pool.
struct Blocks {
  CpuContext& context;
  const PoolView pool;
  const BlockTable& table;

  Blocks(CpuContext& shared, const PoolView& view) : context(shared), pool(view), table(block_table_of(context)) {
    // A tile, or the angles of a token.
    context.reserve_scratch(static_cast<size_t>(pool.tile_bytes + 8 * pool.head_dim + 64));
  }

  int64_t tiles() const { return pool.bands * pool.kv_heads; }
  char* scratch(int thread) const { return context.scratch(thread); }

  template <class Body>
  void run(int64_t units, int64_t elements_each, Body&& body) const {
    if (units * elements_each < kParallelElements) {
      for (int64_t unit = 0; unit < units; ++unit) body(unit, 0);
    } else {
      context.pool.run(units, body);
    }
  }

  void pack_tile_of(int64_t block, int64_t layer, int64_t tile, int thread) const {
    char* at = region_of(pool, block, layer) + tile * pool.tile_bytes;
    table.pack_tile[pool.form()](at, tile >= pool.kv_heads, pool.chunk, pool.head_dim, scratch(thread));
  }

  void unpack_tile_of(int64_t block, int64_t layer, int64_t tile, int thread) const {
    char* at = region_of(pool, block, layer) + tile * pool.tile_bytes;
    char* plain = scratch(thread);
    table.unpack_tile[pool.form()](at, plain, tile >= pool.kv_heads, pool.chunk, pool.head_dim);
    std::memcpy(at, plain, static_cast<size_t>(pool.tile_bytes));
  }

  void unpack(int64_t block, int64_t layer, int thread) const {
    for (int64_t tile = 0; tile < tiles(); ++tile) unpack_tile_of(block, layer, tile, thread);
    flag_of(pool, block, layer) = 0;
  }
};

// Brings packed blocks that are about to be written in part into plain order.
void unpack_written(const Blocks& blocks, const int32_t* slots, int64_t tokens, int64_t layer) {
  const PoolView& pool = blocks.pool;
  for (int64_t i = 0; i < tokens; ++i) {
    if (slots[i] < 0) continue;
    const int64_t block = slots[i] / pool.chunk;
    if (flag_of(pool, block, layer) == 0) continue;
    bool whole = slots[i] % pool.chunk == 0 && i + pool.chunk <= tokens;
    for (int64_t j = 1; whole && j < pool.chunk; ++j) whole = slots[i + j] == slots[i] + j;
    if (whole) {
      flag_of(pool, block, layer) = 0;
    } else {
      blocks.run(blocks.tiles(), pool.tile_bytes,
                 [&](int64_t tile, int thread) { blocks.unpack_tile_of(block, layer, tile, thread); });
      flag_of(pool, block, layer) = 0;
    }
  }
}

// Packs the chunks whose last slot was written.
void seal_written(const Blocks& blocks, const int32_t* slots, int64_t tokens, int64_t layer) {
  const PoolView& pool = blocks.pool;
  if (!pool.packable) return;
  auto* sealed = reinterpret_cast<int32_t*>(blocks.context.lists.reserve(static_cast<size_t>(tokens) * 4));
  int64_t count = 0;
  for (int64_t i = 0; i < tokens; ++i) {
    if (slots[i] >= 0 && slots[i] % pool.chunk == pool.chunk - 1) {
      sealed[count++] = static_cast<int32_t>(slots[i] / pool.chunk);
    }
  }
  // A slot may be named twice; packing what is packed would scramble it.
  std::sort(sealed, sealed + count);
  count = std::unique(sealed, sealed + count) - sealed;
  blocks.run(count * blocks.tiles(), pool.tile_bytes, [&](int64_t unit, int thread) {
    blocks.pack_tile_of(sealed[unit / blocks.tiles()], layer, unit % blocks.tiles(), thread);
  });
  for (int64_t i = 0; i < count; ++i) flag_of(pool, sealed[i], layer) = 1;
}

}  // namespace

void check_slots(const PoolView& pool, const int32_t* slots, int64_t tokens) {
  for (int64_t i = 0; i < tokens; ++i) {
    if (slots[i] < -1 || slots[i] >= pool.blocks * pool.chunk) {
      TVM_FFI_THROW(ValueError) << "slot " << slots[i] << ": the pool has " << pool.blocks << " blocks of "
                                << pool.chunk << " tokens";
    }
  }
}

void run_write(CpuContext& context, const WriteCall& call, int64_t tokens) {
  const Blocks blocks(context, call.pool);
  const int64_t width = (call.heads + blocks.tiles()) * call.pool.head_dim;
  const bool stores = blocks.tiles() > 0;  // else queries are prepared, and no block is touched
  if (stores) unpack_written(blocks, call.slots, tokens, call.layer);
  const auto write = blocks.table.write_token[call.pool.form()];
  blocks.run(tokens, width, [&](int64_t token, int thread) { write(call, token, blocks.scratch(thread)); });
  if (stores) seal_written(blocks, call.slots, tokens, call.layer);
}

namespace {

void set_angles(WriteCall& call, const TensorView& qkv, const TensorView& cos, const TensorView& sin) {
  if (cos.numel() == 0) return;
  call.rotary_dim = static_cast<int32_t>(cos.size(cos.ndim() - 1));
  call.wide_angles = is_float32(cos);
  const auto fits = [&](const TensorView& x) {
    return x.IsContiguous() && x.numel() == qkv.size(0) * call.rotary_dim &&
           (call.wide_angles ? is_float32(x) : kv_type_of(x, "angles") == call.pool.type);
  };
  require(fits(cos) && fits(sin) && call.rotary_dim % 2 == 0 && call.rotary_dim <= call.pool.head_dim,
          "angles must be contiguous [tokens, 1, rotary_dim], in the type of qkv or float32");
  call.cos = bytes_of(cos), call.sin = bytes_of(sin);
}

void set_norm(WriteCall& call, const TensorView& q_weight, const TensorView& k_weight, double eps) {
  if (q_weight.numel() == 0) return;
  const auto fits = [&](const TensorView& x) {
    return kv_type_of(x, "norm weight") == call.pool.type && x.IsContiguous() && x.numel() == call.pool.head_dim;
  };
  require(fits(q_weight) && fits(k_weight), "norm weights must be contiguous [head_dim], in the type of qkv");
  call.q_weight = bytes_of(q_weight), call.k_weight = bytes_of(k_weight);
  call.eps = static_cast<float>(eps);
}

void write_kv(int64_t handle, TensorView slots, TensorView qkv, TensorView cos, TensorView sin, TensorView data,
              TensorView packed, int64_t layer, int64_t latent, TensorView q_weight, TensorView k_weight,
              double eps) {
  const ContextUse use(handle);
  PoolView pool = pool_of(data, packed, layer, kv_type_of(qkv, "qkv"));
  if (latent != 0) set_value_dim(pool, latent);
  require(latent != 0 || !pool.is_quantised() || pool.bands == 2,
          "rows of latents in int8 need the latent's size");
  WriteCall call{};
  call.pool = pool;
  call.layer = static_cast<int32_t>(layer);
  call.slots = int32_data(slots, "slots");
  const int64_t stored = pool.bands * pool.kv_heads;
  require(kv_type_of(qkv, "qkv") == pool.type && qkv.ndim() == 2 && qkv.IsContiguous() &&
              qkv.size(1) % pool.head_dim == 0 && qkv.size(1) / pool.head_dim > stored,
          "qkv must be contiguous [tokens, (heads + bands * kv_heads) * head_dim], in the pool's type");
  const int64_t tokens = qkv.size(0);
  require(slots.numel() == tokens, "slots must be one per token");
  call.heads = static_cast<int32_t>(qkv.size(1) / pool.head_dim - stored);
  call.qkv = bytes_of(qkv);
  set_angles(call, qkv, cos, sin);
  set_norm(call, q_weight, k_weight, eps);
  check_slots(pool, call.slots, tokens);
  run_write(use.context(), call, tokens);
}

// Tokens [first, first + count) of all tiles, from one block to another in plain order.
void copy_part(const Blocks& blocks, const int32_t* copy, int64_t layer, int thread) {
  const PoolView& pool = blocks.pool;
  const int64_t source = copy[0], destination = copy[1], token_bytes = pool.row_bytes;
  const bool packed = flag_of(pool, source, layer) != 0;
  if (flag_of(pool, destination, layer) != 0) blocks.unpack(destination, layer, thread);
  for (int64_t tile = 0; tile < blocks.tiles(); ++tile) {
    const char* from = region_of(pool, source, layer) + tile * pool.tile_bytes;
    if (packed && source != destination) {
      char* plain = blocks.scratch(thread);
      blocks.table.unpack_tile[pool.form()](from, plain, tile >= pool.kv_heads, pool.chunk, pool.head_dim);
      from = plain;
    }
    char* to = region_of(pool, destination, layer) + tile * pool.tile_bytes;
    const int64_t start = copy[2] * token_bytes;
    std::memmove(to + start, from + start, static_cast<size_t>(copy[3] * token_bytes));
  }
}

void copy_blocks(int64_t handle, TensorView data, TensorView packed, TensorView copies) {
  const ContextUse use(handle);
  const Blocks blocks(use.context(), pool_of(data, packed, 0));
  const PoolView& pool = blocks.pool;
  const int32_t* copy = int32_data(copies, "copies");
  require(copies.ndim() == 2 && copies.size(1) == 4, "copies must be int32 [n, 4]");
  const int64_t count = copies.size(0);
  for (int64_t i = 0; i < count; ++i) {
    const int32_t* c = copy + 4 * i;
    const int64_t first = c[2], last = first + c[3];
    if (c[0] < 0 || c[0] >= pool.blocks || c[1] < 0 || c[1] >= pool.blocks) {
      TVM_FFI_THROW(ValueError) << "copy of block " << c[0] << " to " << c[1] << ": the pool has " << pool.blocks
                                << " blocks";
    }
    if (first < 0 || c[3] <= 0 || last > pool.chunk) {
      TVM_FFI_THROW(ValueError) << "copy of tokens [" << first << ", " << last << "): a block has " << pool.chunk;
    }
  }
  const int64_t region_bytes = blocks.tiles() * pool.tile_bytes;
  // Layers are independent; copies of one layer may meet in a block.
  blocks.run(pool.layers, count * region_bytes, [&](int64_t layer, int thread) {
    for (int64_t i = 0; i < count; ++i) {
      const int32_t* c = copy + 4 * i;
      if (c[3] != pool.chunk) {
        copy_part(blocks, c, layer, thread);
      } else if (c[0] != c[1]) {
        std::memcpy(region_of(pool, c[1], layer), region_of(pool, c[0], layer), static_cast<size_t>(region_bytes));
        flag_of(pool, c[1], layer) = flag_of(pool, c[0], layer);
      }
    }
  });
}

// Layers of blocks, and where they come from or go to: packed one behind the other, or each in its slot of a tensor
// of whole blocks.
struct Move {
  const int32_t* block;
  const int32_t* slot;  // null: packed
  int64_t blocks, layers, first_layer, pool_layers, region_bytes;
  char* other;

  int64_t units() const { return blocks * layers; }
  int64_t block_of(int64_t unit) const { return block[unit / layers]; }
  int64_t layer_of(int64_t unit) const { return first_layer + unit % layers; }
  char* other_of(int64_t unit) const {
    const int64_t region = slot == nullptr ? unit : slot[unit / layers] * pool_layers + layer_of(unit);
    return other + region * region_bytes;
  }
};

Move check_move(const PoolView& pool, const TensorView& blocks, const TensorView* slots, int64_t start,
                int64_t stop, const TensorView& other) {
  const int64_t region_bytes = pool.bands * pool.kv_heads * pool.tile_bytes;
  Move move{int32_data(blocks, "blocks"),
            slots != nullptr ? int32_data(*slots, "slots") : nullptr,
            blocks.numel(),
            stop - start,
            start,
            pool.layers,
            region_bytes,
            nullptr};
  if (start < 0 || stop < start || stop > pool.layers) {
    TVM_FFI_THROW(ValueError) << "layers [" << start << ", " << stop << "): the pool has " << pool.layers;
  }
  for (int64_t i = 0; i < move.blocks; ++i) {
    if (move.block[i] < 0 || move.block[i] >= pool.blocks) {
      TVM_FFI_THROW(ValueError) << "block " << move.block[i] << ": the pool has " << pool.blocks << " blocks";
    }
  }
  require(other.device().device_type == kDLCPU && holds_rows_of(pool, other) && other.IsContiguous(),
          "the moved tensor must be contiguous, in the pool's type");
  const int64_t other_bytes = other.numel() * (other.dtype().bits / 8);
  if (slots == nullptr) {
    require(other_bytes == move.units() * region_bytes,
            "the moved tensor must be [n, layers, bands, kv_heads, chunk, row]");
  } else {
    const int64_t whole = pool.layers * region_bytes, count = other_bytes / whole;
    require(slots->numel() == move.blocks && other_bytes == count * whole,
            "slots must be one per block, of a tensor [slots, all layers, bands, kv_heads, chunk, row]");
    for (int64_t i = 0; i < move.blocks; ++i) {
      if (move.slot[i] < 0 || move.slot[i] >= count) {
        TVM_FFI_THROW(ValueError) << "slot " << move.slot[i] << ": there are " << count;
      }
    }
  }
  move.other = bytes_of(other);
  return move;
}

void gather(int64_t handle, const TensorView& data, const TensorView& packed, const TensorView& chosen,
            const TensorView* slots, int64_t start, int64_t stop, const TensorView& out) {
  const ContextUse use(handle);
  const Blocks blocks(use.context(), pool_of(data, packed, 0));
  const PoolView& pool = blocks.pool;
  const Move move = check_move(pool, chosen, slots, start, stop, out);
  const int64_t tiles = blocks.tiles();
  blocks.run(move.units(), move.region_bytes, [&](int64_t unit, int) {
    const int64_t block = move.block_of(unit), layer = move.layer_of(unit);
    const char* from = region_of(pool, block, layer);
    char* to = move.other_of(unit);
    if (flag_of(pool, block, layer) == 0) {
      std::memcpy(to, from, static_cast<size_t>(move.region_bytes));
      return;
    }
    for (int64_t tile = 0; tile < tiles; ++tile, from += pool.tile_bytes, to += pool.tile_bytes) {
      blocks.table.unpack_tile[pool.form()](from, to, tile >= pool.kv_heads, pool.chunk, pool.head_dim);
    }
  });
}

void scatter(int64_t handle, const TensorView& data, const TensorView& packed, const TensorView& chosen,
             const TensorView* slots, int64_t start, int64_t stop, const TensorView& source) {
  const ContextUse use(handle);
  const Blocks blocks(use.context(), pool_of(data, packed, 0));
  const PoolView& pool = blocks.pool;
  const Move move = check_move(pool, chosen, slots, start, stop, source);
  blocks.run(move.units(), move.region_bytes, [&](int64_t unit, int thread) {
    const int64_t block = move.block_of(unit), layer = move.layer_of(unit);
    char* to = region_of(pool, block, layer);
    const char* from = move.other_of(unit);
    // Tile by tile, so that what is packed is still in the cache.
    for (int64_t tile = 0; tile < blocks.tiles(); ++tile, to += pool.tile_bytes, from += pool.tile_bytes) {
      std::memcpy(to, from, static_cast<size_t>(pool.tile_bytes));
      if (pool.packable) blocks.pack_tile_of(block, layer, tile, thread);
    }
    flag_of(pool, block, layer) = pool.packable ? 1 : 0;
  });
}

void gather_blocks(int64_t handle, TensorView data, TensorView packed, TensorView chosen, int64_t start,
                   int64_t stop, TensorView out) {
  gather(handle, data, packed, chosen, nullptr, start, stop, out);
}

void gather_slots(int64_t handle, TensorView data, TensorView packed, TensorView chosen, TensorView slots,
                  int64_t start, int64_t stop, TensorView out) {
  gather(handle, data, packed, chosen, &slots, start, stop, out);
}

void scatter_blocks(int64_t handle, TensorView data, TensorView packed, TensorView chosen, int64_t start,
                    int64_t stop, TensorView source) {
  scatter(handle, data, packed, chosen, nullptr, start, stop, source);
}

void scatter_slots(int64_t handle, TensorView data, TensorView packed, TensorView chosen, TensorView slots,
                   int64_t start, int64_t stop, TensorView source) {
  scatter(handle, data, packed, chosen, &slots, start, stop, source);
}

}  // namespace
}  // namespace trunkline

TRUNKLINE_EXPORT(write_kv, trunkline::write_kv)
TRUNKLINE_EXPORT(copy_blocks, trunkline::copy_blocks)
TRUNKLINE_EXPORT(gather_blocks, trunkline::gather_blocks)
TRUNKLINE_EXPORT(gather_slots, trunkline::gather_slots)
TRUNKLINE_EXPORT(scatter_blocks, trunkline::scatter_blocks)
TRUNKLINE_EXPORT(scatter_slots, trunkline::scatter_slots)
