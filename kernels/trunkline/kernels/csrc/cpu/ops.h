// The ops behind their checks: what the exported functions and the step program's interpreter call.
//
// Arguments are trusted. One op at a time on a context (`ContextUse`).
#pragma once

#include <tvm/ffi/container/tensor.h>

#include <cstdint>

#include "adapters.h"
#include "attention.h"
#include "context.h"
#include "elementwise.h"
#include "experts.h"
#include "latent.h"
#include "linear.h"

namespace trunkline {

void run_linear(CpuContext& context, const LinearCall& call);
// Layers of which none needs another's result, their units in one list.
void run_linears(CpuContext& context, const LinearCall* calls, size_t count);
void run_norm(CpuContext& context, const NormCall& call, DenseType type, int64_t rows);
void run_elements(CpuContext& context, ElementOp op, DenseType type, const ElementCall& call, int64_t count);
void run_layer_norm(CpuContext& context, const LayerNormCall& call, DenseType type, int64_t rows);

void run_heads(CpuContext& context, const HeadsCall& call);
void run_absorb(CpuContext& context, const AbsorbCall& call);

// Sites of `adapted`: the router, then two for each of the layer's experts.
void run_experts(CpuContext& context, const ExpertsLayer& layer, const void* router_x, const void* x, void* out,
                 int64_t tokens, const OpAdapters& adapted);
void run_mix(CpuContext& context, const MixCall& call, DenseType type, int64_t tokens);
void run_square_sums(CpuContext& context, const SquareSumsCall& call, DenseType type, int64_t rows);
void run_wide_norm(CpuContext& context, const WideNormCall& call, DenseType type, int64_t rows);

// A ValueError for a slot that the pool does not have.
void check_slots(const PoolView& pool, const int32_t* slots, int64_t tokens);
void run_write(CpuContext& context, const WriteCall& call, int64_t tokens);

// Set `states` and `turns` of the call. `buffered`: partials go to a buffer and are merged behind.
void run_decode(CpuContext& context, DecodeCall& call, bool buffered);
void run_turns(CpuContext& context, const TurnCall& call, KvType type, int64_t slots);

// The arrays of a prefill plan one after another, after three words of lengths.
void read_prefill_words(const tvm::ffi::TensorView& words, PrefillCall& call, int64_t* queries);
// Sets `block_tokens` of the call.
void run_prefill(CpuContext& context, PrefillCall& call);

}  // namespace trunkline
