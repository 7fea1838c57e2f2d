#include "sparse_ffn.h"

#include <string.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "scratch.h"

namespace pjax {
namespace {

// The neurons are split into ranges whose number depends on the shape alone; each has its own sums and these are added
// in order. That makes the bits independent of who computes which range. With 16 a thread that finishes first waits for
// 6 % of the call at most; zeroing and adding them costs 4 to 9 % against one sum per thread.
constexpr int64_t kMaxRanges = 16;

// Rows of a range, in bytes, below which its sum (one row in float32) is not worth having.
constexpr int64_t kMinRangeBytes = 256 * 1024;

// Bytes read below which a call stays on its thread: they take about 10 us, of which a fork saves half at best and, if
// the workers sleep, nothing.
constexpr int64_t kInlineBytes = 256 * 1024;

// Tokens of one fork: one bit of a byte each, which says whether the token wants a neuron.
constexpr int64_t kTokensPerFork = 8;

// Columns of one piece of the final addition; whole groups of any weight type.
constexpr int64_t kColumnsPerPiece = 1024;

// Gate rows are requested this many bytes ahead; see kStreamAheadBytes.
constexpr int64_t kRowsAheadBytes = 4096;

constexpr int64_t kPageBytes = 4096;
constexpr int64_t kLineBytes = 64;

struct RangeCounts {
  int32_t predicted, computed, active;
};

// Neurons of one range that some token wants, ascending.
struct WantedIds {
  int64_t range, begin;  // its number and first neuron
  int64_t count;
  int32_t* ids;
  uint8_t* tokens;  // one bit for each token that wants neuron begin + i; unused for one token, or where all want all
};

// What one thread needs while it works on a range.
struct RangeLists {
  WantedIds wanted[2];  // of this range and of the next one
  int32_t* open_ids;
  uint8_t* open_tokens;
  float* open_values;  // [open, tokens]
};

// One fork: some tokens, all ranges. Shared by the threads that run it.
struct Fork {
  const FfnArgs& args;
  const RowKernels& kernels;
  int64_t first_token, num_tokens, num_ranges, padded, row_bytes, prepared_bytes;
  const char* x;        // [tokens, prepared_bytes]
  float* sums;          // [ranges, tokens, padded], in the kernels' order
  RangeCounts* counts;  // [ranges, tokens]
  RangeLists* lists;    // [threads]
  std::atomic<int64_t> next_range{0};
  std::atomic<int64_t> next_piece{0};
  std::atomic<int> next_lists{0};

  const char* Row(const void* matrix, int64_t id) const {
    return static_cast<const char*>(matrix) + id * args.row_stride;
  }
  const void* Opener() const { return args.gate != nullptr ? args.gate : args.up; }
  const float* OpenerBias() const { return args.gate != nullptr ? args.gate_bias : args.up_bias; }
  // What is read of a neuron that has opened: its next row.
  const void* Follower() const { return args.gate != nullptr ? args.up : args.down; }
  const uint8_t* Mask(int64_t token) const { return args.mask + (first_token + token) * args.neurons; }
  int AllTokens() const { return (1 << num_tokens) - 1; }
  int TokensThatWant(const WantedIds& wanted, int32_t id) const {
    return args.mask == nullptr || num_tokens == 1 ? AllTokens() : wanted.tokens[id - wanted.begin];
  }
  float Dot(const void* row, int64_t token, const void* next) const {
    float product;
    kernels.dots(row, x + token * prepared_bytes, 0, 1, args.model, next, &product);
    return product;
  }
};

// Calls fn(token) for every bit, lowest first.
template <typename Fn>
void ForEachToken(int tokens, const Fn& fn) {
  for (; tokens != 0; tokens &= tokens - 1) fn(__builtin_ctz(tokens));
}

// Requests the first two lines of a row and of every page it crosses, which starts the hardware's streams.
void PrefetchStarts(const char* row, int64_t bytes) {
  for (const char* start = row; start < row + bytes;
       start = reinterpret_cast<const char*>((reinterpret_cast<uintptr_t>(start) / kPageBytes + 1) * kPageBytes)) {
    __builtin_prefetch(start, 0, 3);
    __builtin_prefetch(start + kLineBytes, 0, 3);
  }
}

// Writes first + i for every byte i that is not zero, and one id more; returns how many.
int64_t CompactIds(const uint8_t* bytes, int64_t count, int64_t first, int32_t* ids) {
  int32_t* out = ids;
  const auto append = [&](int64_t i) {
    *out = static_cast<int32_t>(first + i);
    out += bytes[i] != 0;
  };
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    uint64_t eight;
    memcpy(&eight, bytes + i, 8);
    if (eight == 0) continue;
    for (int64_t k = i; k < i + 8; ++k) append(k);
  }
  for (; i < count; ++i) append(i);
  return out - ids;
}

// Claims the next range and lists its neurons; number num_ranges and above: none was left.
void ClaimRange(Fork& fork, WantedIds* wanted) {
  const int64_t range = fork.next_range.fetch_add(1, std::memory_order_relaxed), neurons = fork.args.neurons;
  wanted->range = range;
  wanted->count = 0;
  if (range >= fork.num_ranges) return;
  const int64_t begin = range * neurons / fork.num_ranges, end = (range + 1) * neurons / fork.num_ranges;
  wanted->begin = begin;
  if (fork.args.mask == nullptr) {
    for (int64_t id = begin; id < end; ++id) wanted->ids[id - begin] = static_cast<int32_t>(id);
    wanted->count = end - begin;
    return;
  }
  if (fork.num_tokens == 1) {
    wanted->count = CompactIds(fork.Mask(0) + begin, end - begin, begin, wanted->ids);
    return;
  }
  memset(wanted->tokens, 0, end - begin);
  for (int64_t token = 0; token < fork.num_tokens; ++token) {
    const uint8_t* mask = fork.Mask(token) + begin;
    for (int64_t i = 0; i < end - begin; ++i) wanted->tokens[i] |= static_cast<uint8_t>(mask[i] << token);
  }
  wanted->count = CompactIds(wanted->tokens, end - begin, begin, wanted->ids);
}

// Phase 1: the opening product of every listed neuron; keeps those that are open for some token. Returns how many.
int64_t FindOpen(const Fork& fork, const WantedIds& wanted, const RangeLists& lists, RangeCounts* counts) {
  const FfnArgs& args = fork.args;
  const Activation& activation = args.activation;
  const void* opener = fork.Opener();
  const float* biases = fork.OpenerBias();
  const int64_t rows_ahead = std::max<int64_t>(1, kRowsAheadBytes / std::max<int64_t>(1, fork.row_bytes));
  int64_t num_open = 0;
  for (int64_t k = 0; k < wanted.count; ++k) {
    const int32_t id = wanted.ids[k];
    const char* row = fork.Row(opener, id);
    const char* next = row;
    if (k + rows_ahead < wanted.count) {
      next = fork.Row(opener, wanted.ids[k + rows_ahead]);
    } else if (const int64_t i = k + rows_ahead - wanted.count; i < num_open) {
      next = fork.Row(fork.Follower(), lists.open_ids[i]);
    }
    PrefetchStarts(next, fork.row_bytes);
    const float bias = biases != nullptr ? biases[id] : 0.0f;
    float* values = lists.open_values + num_open * fork.num_tokens;
    int open_tokens = 0;
    ForEachToken(fork.TokensThatWant(wanted, id), [&](int token) {
      const float product = fork.Dot(row, token, next) + bias;
      next = row;  // requested; later tokens find this row in the cache
      const bool closed = product <= activation.threshold;  // false for NaN, which must reach the output
      values[token] = closed ? 0.0f : activation.curve != nullptr ? activation.curve(product) : product;
      open_tokens |= (!closed || args.every_neuron) << token;
      ++counts[token].predicted;
    });
    lists.open_ids[num_open] = id;
    lists.open_tokens[num_open] = static_cast<uint8_t>(open_tokens);
    num_open += open_tokens != 0;
  }
  return num_open;
}

// The up products of one open neuron, multiplied into its values. Returns the tokens for which it stays open.
int MultiplyByUp(const Fork& fork, int32_t id, int tokens, float* values) {
  const FfnArgs& args = fork.args;
  if (args.gate == nullptr) return tokens;
  const char* row = fork.Row(args.up, id);
  const char* next = fork.Row(args.down, id);
  PrefetchStarts(next, fork.row_bytes);
  const float bias = args.up_bias != nullptr ? args.up_bias[id] : 0.0f;
  int still_open = tokens;
  ForEachToken(tokens, [&](int token) {
    float up = fork.Dot(row, token, next) + bias;
    next = row;
    if (args.activation.rectify_up && up <= 0.0f) {
      if (!args.every_neuron) still_open &= ~(1 << token);
      up = 0.0f;
    }
    values[token] *= up;
  });
  return still_open;
}

// Phase 2: the down rows of the open neurons, in groups. `later` is what this thread works on after them.
void AddOpen(const Fork& fork, int64_t range, int64_t num_open, const RangeLists& lists, const WantedIds& later,
             RangeCounts* counts) {
  const FfnArgs& args = fork.args;
  float* sums = fork.sums + range * fork.num_tokens * fork.padded;
  memset(sums, 0, fork.num_tokens * fork.padded * sizeof(float));
  for (int64_t first = 0; first < num_open; first += kGroup) {
    const int num_rows = static_cast<int>(std::min<int64_t>(kGroup, num_open - first));
    const char* rows[kGroup];
    const char* next[kGroup];
    int tokens[kGroup], any_token = 0;
    for (int r = 0; r < num_rows; ++r) {
      const int32_t id = lists.open_ids[first + r];
      float* values = lists.open_values + (first + r) * fork.num_tokens;
      tokens[r] = MultiplyByUp(fork, id, lists.open_tokens[first + r], values);
      any_token |= tokens[r];
      rows[r] = next[r] = fork.Row(args.down, id);
      const int64_t ahead = first + kGroup + r;
      if (ahead < num_open) {
        next[r] = fork.Row(fork.Follower(), lists.open_ids[ahead]);
      } else if (ahead - num_open < later.count) {
        next[r] = fork.Row(fork.Opener(), later.ids[ahead - num_open]);
      }
      PrefetchStarts(next[r], fork.row_bytes);
    }
    ForEachToken(any_token, [&](int token) {
      const void* token_rows[kGroup];
      const void* token_next[kGroup];
      float coefficients[kGroup];
      int count = 0;
      for (int r = 0; r < num_rows; ++r) {
        if ((tokens[r] >> token & 1) == 0) continue;
        token_rows[count] = rows[r];
        token_next[count] = next[r];
        next[r] = rows[r];  // requested once
        coefficients[count] = lists.open_values[(first + r) * fork.num_tokens + token];
        counts[token].active += coefficients[count] != 0.0f;
        ++count;
      }
      counts[token].computed += count;
      fork.kernels.add_rows(token_rows, coefficients, count, sums + token * fork.padded, args.model, token_next);
    });
  }
}

void ComputeRanges(void* work) {
  Fork& fork = *static_cast<Fork*>(work);
  RangeLists& lists = fork.lists[fork.next_lists.fetch_add(1, std::memory_order_relaxed)];
  WantedIds* wanted = &lists.wanted[0];
  WantedIds* later = &lists.wanted[1];
  for (ClaimRange(fork, wanted); wanted->range < fork.num_ranges; std::swap(wanted, later)) {
    RangeCounts* counts = fork.counts + wanted->range * fork.num_tokens;
    memset(counts, 0, fork.num_tokens * sizeof(counts[0]));
    const int64_t num_open = FindOpen(fork, *wanted, lists, counts);
    // The next range is claimed before this one ends, so that its first rows can be on their way.
    ClaimRange(fork, later);
    AddOpen(fork, wanted->range, num_open, lists, *later, counts);
  }
}

// Adds the ranges' sums, in their order, one piece of a token's columns at a time.
void AddRanges(void* work) {
  Fork& fork = *static_cast<Fork*>(work);
  const int64_t model = fork.args.model, pieces_per_token = (model + kColumnsPerPiece - 1) / kColumnsPerPiece;
  const int64_t num_pieces = fork.num_tokens * pieces_per_token;
  for (int64_t piece; (piece = fork.next_piece.fetch_add(1, std::memory_order_relaxed)) < num_pieces;) {
    const int64_t token = piece / pieces_per_token, start = piece % pieces_per_token * kColumnsPerPiece;
    const float* sums = fork.sums + token * fork.padded + start;
    fork.kernels.finish(sums, fork.num_tokens * fork.padded, fork.num_ranges, std::min(kColumnsPerPiece, model - start),
                        fork.args.y + (fork.first_token + token) * model + start);
  }
}

void AddCounts(const Fork& fork) {
  for (int64_t token = 0; token < fork.num_tokens; ++token) {
    RangeCounts total = {};
    for (int64_t range = 0; range < fork.num_ranges; ++range) {
      const RangeCounts& counts = fork.counts[range * fork.num_tokens + token];
      total.predicted += counts.predicted;
      total.computed += counts.computed;
      total.active += counts.active;
    }
    fork.args.predicted[fork.first_token + token] = total.predicted;
    fork.args.computed[fork.first_token + token] = total.computed;
    fork.args.active[fork.first_token + token] = total.active;
  }
}

// Whether the tokens' masks hold so many neurons in all; reads no more of them than it takes to know.
bool HasMany(const Fork& fork, int64_t num_neurons) {
  const int64_t size = fork.num_tokens * fork.args.neurons;
  if (fork.args.mask == nullptr) return fork.args.neurons >= num_neurons;
  const uint8_t* mask = fork.Mask(0);
  int64_t listed = 0;
  for (int64_t i = 0; i < size && listed < num_neurons; ++i) listed += mask[i];
  return listed >= num_neurons;
}

int64_t NumRanges(int64_t neuron_bytes, int64_t neurons) {
  return std::clamp<int64_t>(neuron_bytes * neurons / kMinRangeBytes, 1, kMaxRanges);
}

int64_t RoundUp(int64_t size, int64_t unit) { return (size + unit - 1) / unit * unit; }

}  // namespace

void SparseFfn(const FfnArgs& args, const RowKernels& kernels, ThreadPool& pool) {
  const int64_t row_bytes = kernels.row_bytes(args.model), prepared_bytes = kernels.prepared_bytes(args.model);
  const int64_t neuron_bytes = (args.gate != nullptr ? 3 : 2) * row_bytes;
  const int64_t num_ranges = NumRanges(neuron_bytes, args.neurons);
  const int64_t padded = RoundUp(args.model, kernels.columns_per_group);
  const int64_t range_size = args.neurons / num_ranges + 2;  // rounding, and a slot to write a rejected id to
  const int64_t tokens = std::min(args.batch, kTokensPerFork);
  const int num_lists = pool.num_threads();
  const size_t list_bytes = 3 * Scratch::BytesFor<int32_t>(range_size) + 3 * Scratch::BytesFor<uint8_t>(range_size) +
                            Scratch::BytesFor<float>(range_size * tokens);
  Scratch scratch(Scratch::BytesFor<char>(tokens * prepared_bytes) +
                  Scratch::BytesFor<float>(num_ranges * tokens * padded) +
                  Scratch::BytesFor<RangeCounts>(num_ranges * tokens) + Scratch::BytesFor<RangeLists>(num_lists) +
                  num_lists * list_bytes);
  char* x = scratch.Take<char>(tokens * prepared_bytes);
  float* sums = scratch.Take<float>(num_ranges * tokens * padded);
  RangeCounts* counts = scratch.Take<RangeCounts>(num_ranges * tokens);
  RangeLists* lists = scratch.Take<RangeLists>(num_lists);
  for (int i = 0; i < num_lists; ++i) {
    for (WantedIds& wanted : lists[i].wanted) {
      wanted.ids = scratch.Take<int32_t>(range_size);
      wanted.tokens = scratch.Take<uint8_t>(range_size);
    }
    lists[i].open_ids = scratch.Take<int32_t>(range_size);
    lists[i].open_tokens = scratch.Take<uint8_t>(range_size);
    lists[i].open_values = scratch.Take<float>(range_size * tokens);
  }
  for (int64_t first = 0; first < args.batch; first += kTokensPerFork) {
    const int64_t num_tokens = std::min(kTokensPerFork, args.batch - first);
    Fork fork{args, kernels, first, num_tokens, num_ranges, padded, row_bytes, prepared_bytes, x, sums, counts, lists};
    for (int64_t token = 0; token < num_tokens; ++token) {
      kernels.prepare(args.x + (first + token) * args.model, args.model, x + token * prepared_bytes);
    }
    const bool parallel = HasMany(fork, kInlineBytes / std::max<int64_t>(1, neuron_bytes) + 1);
    pool.Run(parallel, ComputeRanges, &fork);
    pool.Run(parallel, AddRanges, &fork);
    AddCounts(fork);
  }
}

}  // namespace pjax
