#include "deal.h"

#include <algorithm>
#include <numeric>
#include <queue>

namespace trunkline {
namespace {

// Neighbouring KV heads of a piece, and the neighbouring workers that do one of them each.
struct Share {
  int32_t piece, head, worker, count;
};

// Neighbouring workers that have equally much.
struct Group {
  int64_t load;
  int32_t worker, count;

  bool operator>(const Group& other) const {
    return load != other.load ? load > other.load : worker > other.worker;
  }
};

// The KV heads of a piece cost the same, so they are dealt together: to a whole group at once.
std::vector<Share> longest_first(const std::vector<DealtPiece>& pieces, int32_t kv_heads, int32_t workers,
                                 int64_t& most) {
  std::vector<int32_t> order(pieces.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return pieces[static_cast<size_t>(a)].cost > pieces[static_cast<size_t>(b)].cost;
  });
  std::priority_queue<Group, std::vector<Group>, std::greater<>> groups;
  groups.push({0, 0, workers});
  std::vector<Share> shares;
  most = 0;
  for (const int32_t piece : order) {
    for (int32_t head = 0; head < kv_heads;) {
      const Group least = groups.top();
      groups.pop();
      const int32_t count = std::min(least.count, kv_heads - head);
      if (count < least.count) groups.push({least.load, least.worker + count, least.count - count});
      const int64_t load = least.load + pieces[static_cast<size_t>(piece)].cost;
      groups.push({load, least.worker, count});
      shares.push_back({piece, head, least.worker, count});
      most = std::max(most, load);
      head += count;
    }
  }
  return shares;
}

std::vector<Share> in_turns(const std::vector<DealtPiece>& pieces, int32_t kv_heads, int32_t workers,
                            int64_t& most) {
  std::vector<int64_t> loads(static_cast<size_t>(workers), 0);
  std::vector<Share> shares;
  int32_t worker = 0;
  most = 0;
  for (size_t piece = 0; piece < pieces.size(); ++piece) {
    for (int32_t head = 0; head < kv_heads;) {
      const int32_t count = std::min(workers - worker, kv_heads - head);
      shares.push_back({static_cast<int32_t>(piece), head, worker, count});
      for (int32_t i = 0; i < count; ++i) {
        int64_t& load = loads[static_cast<size_t>(worker + i)];
        load += pieces[piece].cost;
        most = std::max(most, load);
      }
      head += count;
      worker = worker + count == workers ? 0 : worker + count;
    }
  }
  return shares;
}

}  // namespace

Deal deal_units(const std::vector<DealtPiece>& pieces, int32_t kv_heads, int32_t workers) {
  int64_t most = 0, most_in_turns = 0;
  std::vector<Share> shares = longest_first(pieces, kv_heads, workers, most);
  std::vector<Share> turns = in_turns(pieces, kv_heads, workers, most_in_turns);
  if (most_in_turns < most) shares.swap(turns);
  Deal deal;
  deal.bounds.assign(2 * static_cast<size_t>(workers) + 1, 0);
  const auto list_of = [&](const Share& share, int32_t i) {
    return 2 * static_cast<size_t>(share.worker + i) + pieces[static_cast<size_t>(share.piece)].is_narrow;
  };
  for (const Share& share : shares) {
    for (int32_t i = 0; i < share.count; ++i) ++deal.bounds[list_of(share, i) + 1];
  }
  std::partial_sum(deal.bounds.begin(), deal.bounds.end(), deal.bounds.begin());
  deal.units.resize(pieces.size() * static_cast<size_t>(kv_heads));
  std::vector<int32_t> next = deal.bounds;
  for (const Share& share : shares) {
    for (int32_t i = 0; i < share.count; ++i) {
      deal.units[static_cast<size_t>(next[list_of(share, i)]++)] = share.piece * kv_heads + share.head + i;
    }
  }
  return deal;
}

}  // namespace trunkline
