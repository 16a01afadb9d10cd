// Adapters (LoRA): layers of low rank whose results are added to those of a program's linear ops, for the rows of
// the sequences that use them (docs/decisions/0020-adapters.md).
//
//      rows of a step, by adapter -> x * A^T (one list of units) -> h * B^T, float32 -> `Addend` of the op's own layer
//
// A site is a layer of an op that adapters can change: ops have one each (which most do not use), a mixture of experts
// has its router and two for each expert that is here. Sites are numbered in the order of the ops.
//
// B is scaled when it is packed. A row's result does not depend on the rows beside it, as for all linear layers.
#pragma once

#include <cstdint>
#include <vector>

#include "context.h"
#include "linear.h"

namespace trunkline {

// What an adapter has for one site; null: nothing.
struct AdapterLayer {
  const LinearLayer* down = nullptr;  // A: [rank, in]
  const LinearLayer* up = nullptr;    // B: [outputs, rank], of a gated layer [2 * outputs, rank]
};

// By site of a program; empty: there is no such adapter.
using AdapterLayers = std::vector<AdapterLayer>;

// The rows of one kind that have adapters, sorted by adapter.
struct AdaptedRows {
  struct Group {
    int32_t adapter;
    int64_t start, stop;  // in `rows`
  };
  std::vector<int32_t> place;  // for each row of the step its index in `rows`; -1: it has no adapter
  std::vector<int64_t> rows;
  std::vector<Group> groups;

  void clear() { place.clear(), rows.clear(), groups.clear(); }
  // Takes the adapter of each of `count` rows, -1 for none; `adapter_of(row)` is below `adapters`.
  template <class AdapterOf>
  void sort(int64_t count, size_t adapters, AdapterOf&& adapter_of) {
    clear();
    std::vector<int64_t> starts(adapters + 1, 0);
    for (int64_t row = 0; row < count; ++row) ++starts[static_cast<size_t>(adapter_of(row) + 1)];
    starts[0] = 0;  // rows without one
    for (size_t i = 1; i <= adapters; ++i) {
      const int64_t start = starts[i - 1];
      if (starts[i] > 0) groups.push_back({static_cast<int32_t>(i - 1), start, start + starts[i]});
      starts[i] += start;
    }
    rows.resize(static_cast<size_t>(starts[adapters]));
    place.assign(static_cast<size_t>(count), -1);
    for (int64_t row = 0; row < count; ++row) {
      const int32_t adapter = adapter_of(row);
      if (adapter < 0) continue;
      const int64_t at = starts[static_cast<size_t>(adapter)]++;
      place[static_cast<size_t>(row)] = static_cast<int32_t>(at), rows[static_cast<size_t>(at)] = row;
    }
  }
};

// The rows of an op that have adapters, and what these have for its sites.
struct OpAdapters {
  const AdaptedRows* rows = nullptr;  // null: no row has one
  const std::vector<AdapterLayers>* adapters = nullptr;
  size_t first_site = 0;

  AdapterLayer layer(int32_t adapter, size_t site) const {
    return (*adapters)[static_cast<size_t>(adapter)][first_site + site];
  }
};

// Rows that stand together and have one adapter, and the site that they go to.
struct AdaptedRun {
  int32_t adapter;
  size_t site;
  int64_t start, stop;
};

// What the adapters add to the results of a site's `layer` for x; no values: none of them has anything for it. It lies
// in memory of the context until the next call, of this or the next function.
Addend adapter_addend(CpuContext& context, const LinearLayer& layer, const OpAdapters& adapted, size_t site,
                      const void* x);

// What they add to results of `width` outputs for runs of the rows of x, `[rows, in]` of type `type`, each run to a
// site of its own. Fills `place`, which the result points to.
Addend adapter_addend(CpuContext& context, const OpAdapters& adapted, const std::vector<AdaptedRun>& runs,
                      int64_t width, DenseType type, const void* x, int64_t rows, std::vector<int32_t>& place);

}  // namespace trunkline
