// The attention kernels, written once over a `Vector` type that each instruction set's file defines before including
// this:
//
//   struct Vector { using Floats = ...; kLanes; kSums: accumulators that fit in registers;
//                   Zero, Broadcast, Load, Store, Add, Subtract, Multiply, MultiplyAdd;
//                   Max: the second operand where one is NaN;
//                   SumEach: kLanes vectors -> one vector of their sums;
//                   PowerOfTwo: 2^n of 1.5 * 2^23 + n; ZeroBelow: a value, or 0 where x < limit;
//                   Deinterleave, Interleave: 2 * kLanes floats <-> the even and the odd ones;
//                   LoadPair: 2 * kLanes elements of a row, in lane order; LoadPart: the first ones, then zeros };
//
// It deliberately has no include guard and lives in an anonymous namespace: each including file gets its own copy.
#include <math.h>
#include <string.h>

#include <algorithm>
#include <type_traits>

namespace pjax {
namespace {

using Floats = Vector::Floats;

constexpr int64_t kLineBytes = 64;

// A request in the next page of 4 KB starts the hardware's stream there early: 52 -> 73 % of the stream for grouped
// heads, 69 -> 81 % for others.
constexpr int64_t kAheadBytes = 4096;

// Tokens that all heads and all parts of a row are done for before the next ones: 16 KB of rows of 128 bfloat16 stay in
// the first-level cache.
constexpr int64_t kTileTokens = 64;

// Elements of a row that two vectors hold.
constexpr int64_t kPair = 2 * Vector::kLanes;

// Query heads that share one conversion of a row.
constexpr int kMaxHeads = 4;

// A stream of rows, and where the next one starts.
template <typename Element>
struct Rows {
  const Element* first;  // row of token 0
  const char* end;
  const char* next;
  int64_t size;

  const Element* At(int64_t token) const { return first + token * size; }
  const char* Ahead(int64_t token) const {
    const char* ahead = reinterpret_cast<const char*>(At(token)) + kAheadBytes;
    return ahead < end ? ahead : next + (ahead - end);
  }
};

template <typename Element>
Rows<Element> RowsOf(const void* first, const AttentionRange& range, const void* next) {
  const auto* rows = static_cast<const Element*>(first);
  return {rows, reinterpret_cast<const char*>(rows + range.end * range.head_dim), static_cast<const char*>(next),
          range.head_dim};
}

// Requests the lines that start within pair number `pair` of a row.
template <typename Element>
inline void PrefetchPair(const char* row, int64_t pair) {
  constexpr int64_t kBytes = kPair * sizeof(Element);
  for (int64_t offset = 0; offset < kBytes; offset += kLineBytes) {
    if (kBytes >= kLineBytes || pair * kBytes % kLineBytes == 0) {
      __builtin_prefetch(row + pair * kBytes + offset, 0, 3);
    }
  }
}

// Scores of kHeads heads from number `head` on, for tokens [begin, end) of the range. As many results as a vector has
// lanes are summed up together: one shuffled addition each instead of a horizontal sum.
template <typename Element, int kHeads>
void AddScores(const AttentionRange& range, const Rows<Element>& keys, int64_t head, int64_t begin, int64_t end) {
  constexpr int kRows = Vector::kLanes / kHeads;
  const int64_t num_pairs = range.head_dim / kPair, rest = range.head_dim % kPair;
  const float* q = range.q + head * range.padded;
  for (int64_t token = begin; token < end; token += kRows) {
    const Element* rows[kRows];
    const char* ahead[kRows];
    Floats sums[kHeads][kRows];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const int64_t row_token = std::min(token + r, end - 1);
      rows[r] = keys.At(row_token);
      ahead[r] = keys.Ahead(row_token);
#pragma GCC unroll 4
      for (int h = 0; h < kHeads; ++h) sums[h][r] = Vector::Zero();
    }
    const auto add_pair = [&](int64_t number, auto load) {
      Floats factors[kHeads][2];
#pragma GCC unroll 4
      for (int h = 0; h < kHeads; ++h) {
        factors[h][0] = Vector::Load(q + h * range.padded + number * kPair);
        factors[h][1] = Vector::Load(q + h * range.padded + number * kPair + Vector::kLanes);
      }
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        if (head == 0) PrefetchPair<Element>(ahead[r], number);
        Floats pair[2];
        load(rows[r] + number * kPair, pair);
#pragma GCC unroll 4
        for (int h = 0; h < kHeads; ++h) {
          sums[h][r] = Vector::MultiplyAdd(pair[0], factors[h][0], sums[h][r]);
          sums[h][r] = Vector::MultiplyAdd(pair[1], factors[h][1], sums[h][r]);
        }
      }
    };
    for (int64_t i = 0; i < num_pairs; ++i) {
      add_pair(i, [](const Element* row, Floats* pair) { Vector::LoadPair(row, pair); });
    }
    if (rest > 0) {
      add_pair(num_pairs, [&](const Element* row, Floats* pair) { Vector::LoadPart(row, rest, pair); });
    }
    float results[Vector::kLanes];
    Vector::Store(results, Vector::SumEach(&sums[0][0]));
#pragma GCC unroll 4
    for (int h = 0; h < kHeads; ++h) {
      float* scores = range.scores + (head + h) * range.score_stride + (token - range.begin);
      memcpy(scores, results + h * kRows, kRows * sizeof(float));
    }
  }
}

// sums[h] += score[h, token] * v[token] for kHeads heads, kPairs pairs of the rows, tokens [begin, end) in order.
template <typename Element, int kHeads, int kPairs, bool kPart>
void AddValuesOf(const AttentionRange& range, const Rows<Element>& values, int64_t head, int64_t first_pair,
                 int64_t begin, int64_t end) {
  const float* scores = range.scores + head * range.score_stride - range.begin;
  float* out = range.sums + head * range.padded + first_pair * kPair;
  const int64_t rest = range.head_dim % kPair;
  Floats sums[kHeads][2 * kPairs];
#pragma GCC unroll 4
  for (int h = 0; h < kHeads; ++h) {
#pragma GCC unroll 16
    for (int i = 0; i < 2 * kPairs; ++i) sums[h][i] = Vector::Load(out + h * range.padded + i * Vector::kLanes);
  }
  for (int64_t token = begin; token < end; ++token) {
    const Element* row = values.At(token) + first_pair * kPair;
    const char* ahead = values.Ahead(token);
    Floats weights[kHeads];
#pragma GCC unroll 4
    for (int h = 0; h < kHeads; ++h) weights[h] = Vector::Broadcast(scores[h * range.score_stride + token]);
#pragma GCC unroll 8
    for (int p = 0; p < kPairs; ++p) {
      if (head == 0) PrefetchPair<Element>(ahead, first_pair + p);
      Floats pair[2];
      if (kPart) {
        Vector::LoadPart(row + p * kPair, rest, pair);
      } else {
        Vector::LoadPair(row + p * kPair, pair);
      }
#pragma GCC unroll 4
      for (int h = 0; h < kHeads; ++h) {
        sums[h][2 * p] = Vector::MultiplyAdd(pair[0], weights[h], sums[h][2 * p]);
        sums[h][2 * p + 1] = Vector::MultiplyAdd(pair[1], weights[h], sums[h][2 * p + 1]);
      }
    }
  }
#pragma GCC unroll 4
  for (int h = 0; h < kHeads; ++h) {
#pragma GCC unroll 16
    for (int i = 0; i < 2 * kPairs; ++i) Vector::Store(out + h * range.padded + i * Vector::kLanes, sums[h][i]);
  }
}

template <typename Element, int kHeads>
void AddValues(const AttentionRange& range, const Rows<Element>& values, int64_t head, int64_t begin, int64_t end) {
  constexpr int kMost = std::max(1, Vector::kSums / kHeads / 2);
  const int64_t num_pairs = range.head_dim / kPair;
  int64_t pair = 0;
  for (; pair + kMost <= num_pairs; pair += kMost) {
    AddValuesOf<Element, kHeads, kMost, false>(range, values, head, pair, begin, end);
  }
  if constexpr (kMost > 4) {
    if (pair + 4 <= num_pairs) {
      AddValuesOf<Element, kHeads, 4, false>(range, values, head, pair, begin, end);
      pair += 4;
    }
  }
  if constexpr (kMost > 2) {
    if (pair + 2 <= num_pairs) {
      AddValuesOf<Element, kHeads, 2, false>(range, values, head, pair, begin, end);
      pair += 2;
    }
  }
  if (pair < num_pairs) {
    AddValuesOf<Element, kHeads, 1, false>(range, values, head, pair, begin, end);
    ++pair;
  }
  if (range.head_dim % kPair > 0) {
    AddValuesOf<Element, kHeads, 1, true>(range, values, head, pair, begin, end);
  }
}

// e^x for x <= 0, 0 below -87: within 2 units in the last place; no denormals, which cost 11 ns each. NaN stays NaN.
Floats Exp(Floats x) {
  constexpr float kLowest = -87.0f;
  const Floats limit = Vector::Broadcast(kLowest);
  const Floats clamped = Vector::Max(limit, x);
  // Adding 1.5 * 2^23 rounds to an integer n; then e^x = 2^n * e^r with |r| <= ln(2) / 2 and ln(2) in two parts.
  const Floats magic = Vector::Broadcast(12582912.0f);
  const Floats shifted = Vector::MultiplyAdd(clamped, Vector::Broadcast(1.44269504f), magic);
  const Floats n = Vector::Subtract(shifted, magic);
  Floats r = Vector::MultiplyAdd(n, Vector::Broadcast(-0.693359375f), clamped);
  r = Vector::MultiplyAdd(n, Vector::Broadcast(2.12194440e-4f), r);
  // Taylor's series: the first term left out is r^8 / 8! < 6e-9.
  Floats power = Vector::Broadcast(1.0f / 5040);
  for (float coefficient : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) {
    power = Vector::MultiplyAdd(power, r, Vector::Broadcast(coefficient));
  }
  return Vector::ZeroBelow(Vector::Multiply(power, Vector::PowerOfTwo(shifted)), x, limit);
}

// Turns one head's scores into exp(score - maximum).
void Exponentiate(const AttentionRange& range, int64_t head) {
  static constexpr float kCount[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const int64_t size = range.end - range.begin;
  const int64_t padded = (size + Vector::kLanes - 1) / Vector::kLanes * Vector::kLanes;
  float* scores = range.scores + head * range.score_stride;
  if (range.slopes != nullptr) {
    const Floats fall = Vector::Broadcast(-range.slopes[head] * range.scale);
    for (int64_t i = 0; i < padded; i += Vector::kLanes) {
      const Floats first = Vector::Broadcast(static_cast<float>(range.position - range.begin - i));
      const Floats distance = Vector::Subtract(first, Vector::Load(kCount));
      Vector::Store(scores + i, Vector::MultiplyAdd(fall, distance, Vector::Load(scores + i)));
    }
  }
  std::fill(scores + size, scores + padded, -INFINITY);
  float lanes[Vector::kLanes];
  Floats maxima = Vector::Broadcast(-INFINITY);
  for (int64_t i = 0; i < padded; i += Vector::kLanes) maxima = Vector::Max(Vector::Load(scores + i), maxima);
  Vector::Store(lanes, maxima);
  const float maximum = *std::max_element(lanes, lanes + Vector::kLanes);
  Floats totals = Vector::Zero();
  for (int64_t i = 0; i < padded; i += Vector::kLanes) {
    const Floats weights = Exp(Vector::Subtract(Vector::Load(scores + i), Vector::Broadcast(maximum)));
    Vector::Store(scores + i, weights);
    totals = Vector::Add(totals, weights);
  }
  Vector::Store(lanes, totals);
  float total = 0;
  for (float lane : lanes) total += lane;
  range.maxima[head] = maximum;
  range.totals[head] = total;
}

// Calls fn(number of heads as a constant, first head) until all heads of the group are covered.
template <typename Fn>
void ForHeads(int64_t group, const Fn& fn) {
  static_assert(kMaxHeads == 4, "one case for each number");
  int64_t head = 0;
  for (; head + 4 <= group; head += 4) fn(std::integral_constant<int, 4>(), head);
  if (head + 2 <= group) {
    fn(std::integral_constant<int, 2>(), head);
    head += 2;
  }
  if (head < group) fn(std::integral_constant<int, 1>(), head);
}

template <typename Element>
void Attend(const AttentionRange& range) {
  const Element* first_value = static_cast<const Element*>(range.v) + range.begin * range.head_dim;
  const Rows<Element> keys = RowsOf<Element>(range.k, range, first_value);
  const Rows<Element> values = RowsOf<Element>(range.v, range, range.next);
  for (int64_t tile = range.begin; tile < range.end; tile += kTileTokens) {
    const int64_t tile_end = std::min(tile + kTileTokens, range.end);
    ForHeads(range.group, [&](auto heads, int64_t head) {
      AddScores<Element, decltype(heads)::value>(range, keys, head, tile, tile_end);
    });
  }
  for (int64_t head = 0; head < range.group; ++head) Exponentiate(range, head);
  memset(range.sums, 0, range.group * range.padded * sizeof(float));
  for (int64_t tile = range.begin; tile < range.end; tile += kTileTokens) {
    const int64_t tile_end = std::min(tile + kTileTokens, range.end);
    ForHeads(range.group, [&](auto heads, int64_t head) {
      AddValues<Element, decltype(heads)::value>(range, values, head, tile, tile_end);
    });
  }
}

template <bool kEvenOdd>
void ToLanes(const float* in, float scale, int64_t size, int64_t padded, float* out) {
  const Floats factor = Vector::Broadcast(scale);
  float last[kPair] = {};
  for (int64_t i = 0; i < padded; i += kPair) {
    const float* from = in + i;
    if (i + kPair > size) {
      memset(last, 0, sizeof(last));
      if (i < size) memcpy(last, from, (size - i) * sizeof(float));
      from = last;
    }
    Floats pair[2] = {Vector::Load(from), Vector::Load(from + Vector::kLanes)};
    if (kEvenOdd) Vector::Deinterleave(pair);
    Vector::Store(out + i, Vector::Multiply(pair[0], factor));
    Vector::Store(out + i + Vector::kLanes, Vector::Multiply(pair[1], factor));
  }
}

template <bool kEvenOdd>
void FromLanes(const float* in, float scale, int64_t size, float* out) {
  const Floats factor = Vector::Broadcast(scale);
  for (int64_t i = 0; i < size; i += kPair) {
    Floats pair[2] = {Vector::Multiply(Vector::Load(in + i), factor),
                      Vector::Multiply(Vector::Load(in + i + Vector::kLanes), factor)};
    if (kEvenOdd) Vector::Interleave(pair);
    float last[kPair];
    float* to = i + kPair <= size ? out + i : last;
    Vector::Store(to, pair[0]);
    Vector::Store(to + Vector::kLanes, pair[1]);
    if (to == last) memcpy(out + i, last, (size - i) * sizeof(float));
  }
}

const AttentionKernels& AttentionKernelsOf(WeightType type) {
  static constexpr AttentionKernels kFloat32{Attend<float>, ToLanes<false>, FromLanes<false>};
  static constexpr AttentionKernels kBfloat16{Attend<uint16_t>, ToLanes<true>, FromLanes<true>};
  return type == WeightType::kFloat32 ? kFloat32 : kBfloat16;
}

}  // namespace
}  // namespace pjax
