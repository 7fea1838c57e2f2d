#include "sparse_ffn.h"

#include <string.h>

#include <algorithm>
#include <atomic>

#include "lane_order.h"
#include "scratch.h"

namespace pjax {
namespace {

// A token's neurons are split into ranges whose number depends on the shape alone; each has its own sum and the sums
// are added in order. That makes the bits independent of who computes which range. With 16 a
// thread that finishes first waits for 6 % of the call at most; zeroing and adding them costs 4 to 9 % against one sum
// per thread.
constexpr int64_t kMaxRanges = 16;

// Rows of a range, in bytes, below which its sum (one row in float32) is not worth having.
constexpr int64_t kMinRangeBytes = 256 * 1024;

// Bytes read below which a call stays on its thread: they take about 10 us, of which a fork saves half at best and, if
// the workers sleep, nothing.
constexpr int64_t kInlineBytes = 256 * 1024;

// Tokens of one fork, so that their sums (16 ranges of 16 KB each) stay in the second-level cache.
constexpr int64_t kTokensPerFork = 4;

// Columns of one piece of the final addition: the 4 KB of totals stay in the first-level cache.
constexpr int64_t kColumnsPerPiece = 1024;

// Gate rows are requested this many bytes ahead; see kStreamAheadBytes.
constexpr int64_t kRowsAheadBytes = 4096;

constexpr int64_t kPageBytes = 4096;
constexpr int64_t kLineBytes = 64;

struct RangeCounts {
  int32_t predicted, computed, active;
};

// What one thread needs while it works on a range.
struct RangeLists {
  int32_t* ids;
  int32_t* open_ids;
  float* open_values;
};

// One fork: some tokens, all ranges. Shared by the threads that run it.
struct Fork {
  const FfnArgs& args;
  const RowKernels& kernels;
  int64_t first_token, num_tokens, num_ranges, padded;
  const float* x;       // [tokens, padded], lane order
  float* sums;          // [tokens, ranges, padded], lane order
  RangeCounts* counts;  // [tokens, ranges]
  RangeLists* lists;    // [threads]
  std::atomic<int64_t> next_range{0};
  std::atomic<int64_t> next_piece{0};
  std::atomic<int> next_lists{0};

  int64_t RowBytes() const { return args.model * kernels.element_bytes; }
  const char* Row(const void* matrix, int64_t id) const { return static_cast<const char*>(matrix) + id * RowBytes(); }
  const void* Opener() const { return args.gate != nullptr ? args.gate : args.up; }
  const float* OpenerBias() const { return args.gate != nullptr ? args.gate_bias : args.up_bias; }
};

struct Range {
  int64_t token, number, begin, end;
};

Range RangeAt(const Fork& fork, int64_t index) {
  const int64_t number = index % fork.num_ranges, neurons = fork.args.neurons;
  return {index / fork.num_ranges, number, number * neurons / fork.num_ranges,
          (number + 1) * neurons / fork.num_ranges};
}

// Requests the first two lines of a row and of every page it crosses, which starts the hardware's streams.
void PrefetchStarts(const char* row, int64_t bytes) {
  for (const char* start = row; start < row + bytes;
       start = reinterpret_cast<const char*>((reinterpret_cast<uintptr_t>(start) / kPageBytes + 1) * kPageBytes)) {
    __builtin_prefetch(start, 0, 3);
    __builtin_prefetch(start + kLineBytes, 0, 3);
  }
}

int64_t CompactIds(const uint8_t* mask, int64_t begin, int64_t end, int32_t* ids) {
  int32_t* out = ids;
  int64_t id = begin;
  for (; id + 8 <= end; id += 8) {
    uint64_t eight;
    memcpy(&eight, mask + id, 8);
    if (eight == 0) continue;
    for (int64_t i = id; i < id + 8; ++i) {
      *out = static_cast<int32_t>(i);
      out += mask[i] != 0;
    }
  }
  for (; id < end; ++id) {
    *out = static_cast<int32_t>(id);
    out += mask[id] != 0;
  }
  return out - ids;
}

int64_t ListIds(const Fork& fork, const Range& range, int32_t* ids) {
  if (fork.args.mask != nullptr) {
    const uint8_t* mask = fork.args.mask + (fork.first_token + range.token) * fork.args.neurons;
    return CompactIds(mask, range.begin, range.end, ids);
  }
  for (int64_t id = range.begin; id < range.end; ++id) ids[id - range.begin] = static_cast<int32_t>(id);
  return range.end - range.begin;
}

// Phase 1: the opening product of every listed neuron; keeps those that are open. Returns how many.
int64_t FindOpen(const Fork& fork, const Range& range, int64_t num_ids, const RangeLists& lists) {
  const FfnArgs& args = fork.args;
  const void* opener = fork.Opener();
  const float* bias = fork.OpenerBias();
  const float* x = fork.x + range.token * fork.padded;
  const int64_t rows_ahead = std::max<int64_t>(1, kRowsAheadBytes / std::max<int64_t>(1, fork.RowBytes()));
  int64_t num_open = 0;
  for (int64_t k = 0; k < num_ids; ++k) {
    const int32_t id = lists.ids[k];
    const char* row = fork.Row(opener, id);
    const char* next = row;
    if (k + rows_ahead < num_ids) {
      next = fork.Row(opener, lists.ids[k + rows_ahead]);
    } else if (const int64_t i = k + rows_ahead - num_ids; i < num_open) {
      next = fork.Row(args.gate != nullptr ? args.up : args.down, lists.open_ids[i]);
    }
    PrefetchStarts(next, fork.RowBytes());
    const float product = fork.kernels.dot(row, x, args.model, next) + (bias != nullptr ? bias[id] : 0.0f);
    const bool closed = product <= args.threshold;  // false for NaN, which must reach the output
    lists.open_ids[num_open] = id;
    lists.open_values[num_open] = closed ? 0.0f : args.square ? product * product : product;
    num_open += !closed || args.every_neuron;
  }
  return num_open;
}

// Phase 2: the down rows of the open neurons, in groups. `next_row` is what this thread reads after them.
void AddOpen(const Fork& fork, const Range& range, int64_t num_open, const RangeLists& lists, const char* next_row,
             RangeCounts* counts) {
  const FfnArgs& args = fork.args;
  const float* x = fork.x + range.token * fork.padded;
  float* sums = fork.sums + (range.token * fork.num_ranges + range.number) * fork.padded;
  memset(sums, 0, fork.padded * sizeof(float));
  const void* following = args.gate != nullptr ? args.up : args.down;
  for (int64_t first = 0; first < num_open; first += kGroup) {
    const int num_listed = static_cast<int>(std::min<int64_t>(kGroup, num_open - first));
    int num_rows = 0;
    const void* rows[kGroup];
    const void* next[kGroup];
    float* values = lists.open_values + first;
    for (int r = 0; r < num_listed; ++r) {
      const int32_t id = lists.open_ids[first + r];
      const char* row = fork.Row(args.down, id);
      float value = values[r];
      if (args.gate != nullptr) {
        PrefetchStarts(row, fork.RowBytes());
        float up = fork.kernels.dot(fork.Row(args.up, id), x, args.model, row);
        up += args.up_bias != nullptr ? args.up_bias[id] : 0.0f;
        if (args.rectify_up && up <= 0.0f) {
          if (!args.every_neuron) continue;
          up = 0.0f;
        }
        value *= up;
      }
      counts->active += value != 0.0f;
      const int64_t later = first + kGroup + r;
      next[num_rows] =
          later < num_open ? fork.Row(following, lists.open_ids[later]) : later == num_open ? next_row : row;
      PrefetchStarts(static_cast<const char*>(next[num_rows]), fork.RowBytes());
      rows[num_rows] = row;
      values[num_rows++] = value;
    }
    if (num_rows == 0) continue;
    counts->computed += num_rows;
    fork.kernels.add_rows(rows, values, num_rows, sums, args.model, next);
  }
}

void ComputeRanges(void* work) {
  Fork& fork = *static_cast<Fork*>(work);
  const RangeLists& lists = fork.lists[fork.next_lists.fetch_add(1, std::memory_order_relaxed)];
  const int64_t num_ranges = fork.num_tokens * fork.num_ranges;
  int64_t index = fork.next_range.fetch_add(1, std::memory_order_relaxed);
  while (index < num_ranges) {
    const Range range = RangeAt(fork, index);
    RangeCounts counts = {};
    const int64_t num_ids = ListIds(fork, range, lists.ids);
    counts.predicted = static_cast<int32_t>(num_ids);
    const int64_t num_open = FindOpen(fork, range, num_ids, lists);
    // The next range is claimed before this one ends, so that its first row can be on its way.
    const int64_t next = fork.next_range.fetch_add(1, std::memory_order_relaxed);
    const int64_t next_id = next < num_ranges ? RangeAt(fork, next).begin : range.begin;
    AddOpen(fork, range, num_open, lists, fork.Row(fork.Opener(), next_id), &counts);
    fork.counts[index] = counts;
    index = next;
  }
}

// Adds the ranges' sums, in their order, one piece of a token's columns at a time.
void AddRanges(void* work) {
  Fork& fork = *static_cast<Fork*>(work);
  const int64_t pieces_per_token = (fork.padded + kColumnsPerPiece - 1) / kColumnsPerPiece;
  const int64_t num_pieces = fork.num_tokens * pieces_per_token;
  alignas(64) float total[kColumnsPerPiece];
  for (int64_t piece; (piece = fork.next_piece.fetch_add(1, std::memory_order_relaxed)) < num_pieces;) {
    const int64_t token = piece / pieces_per_token, start = piece % pieces_per_token * kColumnsPerPiece;
    const int64_t size = std::min(kColumnsPerPiece, fork.padded - start);
    const float* sums = fork.sums + token * fork.num_ranges * fork.padded + start;
    memcpy(total, sums, size * sizeof(float));
    for (int64_t range = 1; range < fork.num_ranges; ++range) {
      for (int64_t i = 0; i < size; ++i) total[i] += sums[range * fork.padded + i];
    }
    float* y = fork.args.y + (fork.first_token + token) * fork.args.model + start;
    FromLaneOrder(fork.kernels, total, std::min(size, fork.args.model - start), y);
  }
}

void AddCounts(const Fork& fork) {
  for (int64_t token = 0; token < fork.num_tokens; ++token) {
    RangeCounts total = {};
    for (int64_t range = 0; range < fork.num_ranges; ++range) {
      const RangeCounts& counts = fork.counts[token * fork.num_ranges + range];
      total.predicted += counts.predicted;
      total.computed += counts.computed;
      total.active += counts.active;
    }
    fork.args.predicted[fork.first_token + token] = total.predicted;
    fork.args.computed[fork.first_token + token] = total.computed;
    fork.args.active[fork.first_token + token] = total.active;
  }
}

// Neurons in the masks of a fork's tokens: an upper bound of what will be read.
int64_t CountListed(const Fork& fork) {
  const int64_t num = fork.num_tokens * fork.args.neurons;
  if (fork.args.mask == nullptr) return num;
  const uint8_t* mask = fork.args.mask + fork.first_token * fork.args.neurons;
  int64_t listed = 0;
  for (int64_t i = 0; i < num; ++i) listed += mask[i];
  return listed;
}

int64_t NumRanges(int64_t neuron_bytes, int64_t neurons) {
  return std::clamp<int64_t>(neuron_bytes * neurons / kMinRangeBytes, 1, kMaxRanges);
}

}  // namespace

void SparseFfn(const FfnArgs& args, const RowKernels& kernels, ThreadPool& pool) {
  const int64_t neuron_bytes = (args.gate != nullptr ? 3 : 2) * args.model * kernels.element_bytes;
  const int64_t num_ranges = NumRanges(neuron_bytes, args.neurons), padded = PaddedSize(args.model);
  const int64_t range_size = args.neurons / num_ranges + 2;  // rounding, and a slot to write a rejected id to
  const int64_t tokens = std::min(args.batch, kTokensPerFork);
  const int num_lists = pool.num_threads();
  Scratch scratch(Scratch::BytesFor<float>(tokens * padded) + Scratch::BytesFor<float>(tokens * num_ranges * padded) +
                  Scratch::BytesFor<RangeCounts>(tokens * num_ranges) + Scratch::BytesFor<RangeLists>(num_lists) +
                  num_lists * (2 * Scratch::BytesFor<int32_t>(range_size) + Scratch::BytesFor<float>(range_size)));
  float* x = scratch.Take<float>(tokens * padded);
  float* sums = scratch.Take<float>(tokens * num_ranges * padded);
  RangeCounts* counts = scratch.Take<RangeCounts>(tokens * num_ranges);
  RangeLists* lists = scratch.Take<RangeLists>(num_lists);
  for (int i = 0; i < num_lists; ++i) {
    lists[i] = {scratch.Take<int32_t>(range_size), scratch.Take<int32_t>(range_size), scratch.Take<float>(range_size)};
  }
  for (int64_t first = 0; first < args.batch; first += kTokensPerFork) {
    const int64_t num_tokens = std::min(kTokensPerFork, args.batch - first);
    Fork fork{args, kernels, first, num_tokens, num_ranges, padded, x, sums, counts, lists};
    for (int64_t token = 0; token < num_tokens; ++token) {
      ToLaneOrder(kernels, args.x + (first + token) * args.model, args.model, x + token * padded);
    }
    const bool parallel = CountListed(fork) * neuron_bytes > kInlineBytes;
    pool.Run(parallel, ComputeRanges, &fork);
    pool.Run(parallel, AddRanges, &fork);
    AddCounts(fork);
  }
}

}  // namespace pjax
