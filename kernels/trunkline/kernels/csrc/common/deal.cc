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

// Deals units of equal cost, each to the worker with least, so to a whole group at once; `take(unit, worker, count)`.
class Groups {
 public:
  explicit Groups(int32_t workers) { groups_.push({0, 0, workers}); }

  template <class Take>
  void deal(int64_t cost, int64_t units, const Take& take) {
    for (int64_t unit = 0; unit < units;) {
      const Group least = groups_.top();
      groups_.pop();
      const auto count = static_cast<int32_t>(std::min<int64_t>(least.count, units - unit));
      if (count < least.count) groups_.push({least.load, least.worker + count, least.count - count});
      groups_.push({least.load + cost, least.worker, count});
      most_ = std::max(most_, least.load + cost);
      take(unit, least.worker, count);
      unit += count;
    }
  }

  int64_t most() const { return most_; }

 private:
  std::priority_queue<Group, std::vector<Group>, std::greater<>> groups_;
  int64_t most_ = 0;
};

std::vector<Share> longest_first(const std::vector<DealtPiece>& pieces, int32_t kv_heads, int32_t workers,
                                 int64_t& most) {
  std::vector<int32_t> order(pieces.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return pieces[static_cast<size_t>(a)].cost > pieces[static_cast<size_t>(b)].cost;
  });
  Groups groups(workers);
  std::vector<Share> shares;
  for (const int32_t piece : order) {
    groups.deal(pieces[static_cast<size_t>(piece)].cost, kv_heads,
                [&](int64_t head, int32_t worker, int32_t count) {
                  shares.push_back({piece, static_cast<int32_t>(head), worker, count});
                });
  }
  most = groups.most();
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

int64_t busiest(std::vector<EqualUnits> units, int32_t workers) {
  std::sort(units.begin(), units.end(), [](const EqualUnits& a, const EqualUnits& b) { return a.cost > b.cost; });
  Groups groups(workers);
  for (const EqualUnits& each : units) groups.deal(each.cost, each.count, [](int64_t, int32_t, int32_t) {});
  return groups.most();
}

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
