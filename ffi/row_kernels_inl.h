// The row kernels, written once over a `Vector` type that each instruction set's file defines before including this:
//
//   struct Vector { using Floats = ...; kLanes; kAccumulators; Zero, Broadcast, Load, Store, MultiplyAdd, Sum,
//                   LoadEven, LoadOdd: 2 * kLanes bfloat16 -> the even / odd ones as Floats };
//
// It deliberately has no include guard and lives in an anonymous namespace: each including file gets its own copy.
#include <string.h>

namespace pjax {
namespace {

constexpr int64_t kLineBytes = 64;

// Distance of the prefetch within one long stream. The hardware streamer stops at a 4 KB page; a request in the next
// page starts it there early. 2 to 8 KB are equal within 2 %, 1 and 16 KB lose 3 to 8 %.
constexpr int64_t kStreamAheadBytes = 4096;

struct Float32Row {
  using Element = float;
  static constexpr bool kEvenOdd = false;
  static Vector::Floats Load(const float* block, int vector) { return Vector::Load(block + vector * Vector::kLanes); }
};

struct Bfloat16Row {
  using Element = uint16_t;
  static constexpr bool kEvenOdd = true;
  // Vector number `vector` of a block in lane order: the first half of them holds even elements, the second odd ones.
  static Vector::Floats Load(const uint16_t* block, int vector) {
    const int lane = vector * Vector::kLanes;
    const uint16_t* pairs = block + 2 * (lane % (kBlock / 2));
    return lane < kBlock / 2 ? Vector::LoadEven(pairs) : Vector::LoadOdd(pairs);
  }
};

constexpr int kVectorsPerBlock = kBlock / Vector::kLanes;

template <typename Row>
void PrefetchBlock(const void* start, int64_t block) {
  constexpr int64_t kBlockBytes = kBlock * sizeof(typename Row::Element);
  const char* line = static_cast<const char*>(start) + block * kBlockBytes;
  for (int64_t offset = 0; offset < kBlockBytes; offset += kLineBytes) __builtin_prefetch(line + offset, 0, 3);
}

template <typename Row>
float Dot(const void* row, const float* x, int64_t size, const void* next) {
  constexpr int kBlocksPerStep = Vector::kAccumulators / kVectorsPerBlock;
  const auto* weights = static_cast<const typename Row::Element*>(row);
  const int64_t num_blocks = size / kBlock;
  typename Vector::Floats sums[Vector::kAccumulators];
#pragma GCC unroll 8
  for (auto& sum : sums) sum = Vector::Zero();

  const auto add_block = [&](const typename Row::Element* block_weights, int64_t block, int first_sum) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectorsPerBlock; ++v) {
      sums[first_sum + v] = Vector::MultiplyAdd(Row::Load(block_weights, v),
                                                Vector::Load(x + block * kBlock + v * Vector::kLanes),
                                                sums[first_sum + v]);
    }
  };

  int64_t block = 0;
  for (; block + kBlocksPerStep <= num_blocks; block += kBlocksPerStep) {
#pragma GCC unroll 8
    for (int k = 0; k < kBlocksPerStep; ++k) {
      PrefetchBlock<Row>(next, block + k);
      add_block(weights + (block + k) * kBlock, block + k, k * kVectorsPerBlock);
    }
  }
  for (; block < num_blocks; ++block) add_block(weights + block * kBlock, block, 0);
  if (const int64_t rest = size - num_blocks * kBlock; rest > 0) {
    // Reading past the end of the last row is not allowed, so the remainder goes through a zero-padded copy.
    typename Row::Element padded[kBlock] = {};
    memcpy(padded, weights + num_blocks * kBlock, rest * sizeof(padded[0]));
    add_block(padded, num_blocks, 0);
  }

#pragma GCC unroll 8
  for (int width = Vector::kAccumulators / 2; width > 0; width /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < width; ++i) sums[i] = Vector::Add(sums[i], sums[i + width]);
  }
  return Vector::Sum(sums[0]);
}

template <typename Row, int num_rows>
void AddRowsOf(const void* const* rows, const float* coefficients, float* sums, int64_t size,
               const void* const* next) {
  const int64_t num_blocks = size / kBlock;
  const typename Row::Element* weights[num_rows];
  typename Vector::Floats factors[num_rows];
#pragma GCC unroll 8
  for (int r = 0; r < num_rows; ++r) {
    weights[r] = static_cast<const typename Row::Element*>(rows[r]);
    factors[r] = Vector::Broadcast(coefficients[r]);
  }

  const auto add_block = [&](const typename Row::Element* const* blocks, int64_t block) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectorsPerBlock; ++v) {
      float* out = sums + block * kBlock + v * Vector::kLanes;
      typename Vector::Floats sum = Vector::Load(out);
#pragma GCC unroll 8
      for (int r = 0; r < num_rows; ++r) sum = Vector::MultiplyAdd(Row::Load(blocks[r], v), factors[r], sum);
      Vector::Store(out, sum);
    }
  };

  const typename Row::Element* blocks[num_rows];
  for (int64_t block = 0; block < num_blocks; ++block) {
#pragma GCC unroll 8
    for (int r = 0; r < num_rows; ++r) {
      PrefetchBlock<Row>(next[r], block);
      blocks[r] = weights[r] + block * kBlock;
    }
    add_block(blocks, block);
  }
  if (const int64_t rest = size - num_blocks * kBlock; rest > 0) {
    typename Row::Element padded[num_rows][kBlock] = {};
    for (int r = 0; r < num_rows; ++r) {
      memcpy(padded[r], weights[r] + num_blocks * kBlock, rest * sizeof(padded[r][0]));
      blocks[r] = padded[r];
    }
    add_block(blocks, num_blocks);
  }
}

template <typename Row>
void AddRows(const void* const* rows, const float* coefficients, int num_rows, float* sums, int64_t size,
             const void* const* next) {
  static_assert(kGroup == 4, "one case for each group size");
  switch (num_rows) {
    case 1:
      return AddRowsOf<Row, 1>(rows, coefficients, sums, size, next);
    case 2:
      return AddRowsOf<Row, 2>(rows, coefficients, sums, size, next);
    case 3:
      return AddRowsOf<Row, 3>(rows, coefficients, sums, size, next);
    default:
      return AddRowsOf<Row, 4>(rows, coefficients, sums, size, next);
  }
}

uint32_t SumWords(const uint32_t* words, int64_t count) {
  // Four lines a step: enough independent sums that the adds never wait for each other.
  constexpr int64_t kStep = 4 * kLineBytes / sizeof(uint32_t);
  uint32_t sums[kStep] = {};
  int64_t i = 0;
  for (; i + kStep <= count; i += kStep) {
    const char* ahead = reinterpret_cast<const char*>(words + i) + kStreamAheadBytes;
    for (int line = 0; line < 4; ++line) __builtin_prefetch(ahead + line * kLineBytes, 0, 3);
    for (int64_t lane = 0; lane < kStep; ++lane) sums[lane] += words[i + lane];
  }
  uint32_t total = 0;
  for (; i < count; ++i) total += words[i];
  for (uint32_t sum : sums) total += sum;
  return total;
}

template <typename Row>
constexpr RowKernels kKernels = {Dot<Row>, AddRows<Row>, SumWords, sizeof(typename Row::Element), Row::kEvenOdd};

const RowKernels& KernelsOf(WeightType type) {
  return type == WeightType::kFloat32 ? kKernels<Float32Row> : kKernels<Bfloat16Row>;
}

}  // namespace
}  // namespace pjax
