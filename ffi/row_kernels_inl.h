// The row kernels, written once over a type Vector that each instruction set's file defines before including this:
//
//   Floats, Ints: registers of kLanes (8 or 16) float32 or int32.   kAccumulators: independent sums of a dot.
//   kFloatTokens, kBlockTokens: powers of two, x of which the sums of a dot fit in registers side by side.
//   kPanelTokens: x whose kPanelWidth sums do.
//   Zero, Broadcast, Load, Store, Add, Multiply, MultiplyAdd, Sum.
//   LoadEven, LoadOdd: 2 * kLanes bfloat16 -> the even / odd ones.
//   LoadHalfs: kLanes float16.   LoadBytes: kLanes int8.
//   ZeroInts.   LoadInts, StoreInts: from and to any address.   ToFloats.
//   LoadSomeInts, LoadSomeHalfs: the first `count` (any number from 0) and zeros, touching nothing behind them.
//   kJoinsRows: whether these are there.   JoinInts, JoinHalfs(into, from, first, count): lanes first..first + count
//     from memory, the others as they were; Halfs: kLanes float16.   ZeroHalfs.   ToFloats, of Halfs too.
//   LoadNibbles(words, i): bits 4i..4i+3 of each of kLanes words, minus 8; may read kReadBehind bytes behind them.
//   RepeatFourTimes: kLanes / 4 floats, each four times.   Transpose4: 4 x 4 floats.
//   MagnitudeBits: the bits of the largest of 32 floats without their signs; no less than those of infinity for a NaN.
//   RoundBlock(block, factor, codes): 32 floats times the factor, to the nearest int8; half-way to the even one.
//   DotBytes<n>(load, x, stride, sums): adds to each of n sums the sum over v < 8 of the products of the four int8 of
//     each lane of load(v), and those at x + 64 v, the next x being `stride` bytes on; exact if the sums start at
//     -kByteOffset * (sum of x).
//   DotNibbles<n>(load, x, stride, sums): the same for the low four bits of the bytes of load(j), j < 4, and the x at
//     128 j, and the high four and the x at 128 j + 64, as numbers 0 to 15.
//
// It deliberately has no include guard and lives in an anonymous namespace: each including file gets its own copy.
#include <string.h>

namespace pjax {
namespace {

constexpr int64_t kLineBytes = 64;

// Distance of the prefetch within one long stream. The hardware streamer stops at a 4 KB page; a request in the next
// page starts it there early. 2 to 8 KB are equal within 2 %, 1 and 16 KB lose 3 to 8 %.
constexpr int64_t kStreamAheadBytes = 4096;

inline void PrefetchLines(const void* start, int64_t offset, int64_t bytes) {
  const char* line = static_cast<const char*>(start) + offset;
#pragma GCC unroll 8
  for (int64_t i = 0; i < bytes; i += kLineBytes) __builtin_prefetch(line + i, 0, 3);
}

template <int count>
void AddSums(const float* sums, int64_t stride, int64_t num_sums, float* total) {
  memcpy(total, sums, count * sizeof(float));
  for (int64_t s = 1; s < num_sums; ++s) {
    for (int i = 0; i < count; ++i) total[i] += sums[s * stride + i];
  }
}

// Tokens are taken `count` at a time, the rest half as many at a time.
template <typename Kernels, int count>
void DotTokens(const void* row, const void* prepared, int64_t stride, int64_t num_tokens, int64_t size,
               const void* next, float* products) {
  const char* x = static_cast<const char*>(prepared);
  for (; num_tokens >= count; num_tokens -= count, x += count * stride, products += count) {
    Kernels::template Dots<count>(row, x, stride, size, next, products);
    next = row;  // requested; later tokens find this row in the cache
  }
  if constexpr (count > 1) {
    if (num_tokens > 0) DotTokens<Kernels, count / 2>(row, x, stride, num_tokens, size, next, products);
  }
}

template <typename Kernels>
void DotRowByRow(const void* rows, int64_t row_stride, int64_t num_rows, const void* prepared, int64_t size,
                 float* products) {
  const auto* x = static_cast<const char*>(prepared);
  const auto* row = static_cast<const char*>(rows);
  for (int64_t r = 0; r < num_rows; ++r, row += row_stride) {
    Kernels::template Dots<1>(row, x, 0, size, row + kStreamAheadBytes, products + r);
  }
}

template <typename Kernels>
void AddAnyRows(const void* const* rows, const float* coefficients, int num_rows, float* sums, int64_t size,
                const void* const* next) {
  static_assert(kGroup == 4, "one case for each group size");
  switch (num_rows) {
    case 1:
      return Kernels::template AddRows<1>(rows, coefficients, sums, size, next);
    case 2:
      return Kernels::template AddRows<2>(rows, coefficients, sums, size, next);
    case 3:
      return Kernels::template AddRows<3>(rows, coefficients, sums, size, next);
    default:
      return Kernels::template AddRows<4>(rows, coefficients, sums, size, next);
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

#include "panel_inl.h"

#include "block_rows_inl.h"
#include "float_rows_inl.h"

const RowKernels& KernelsOf(WeightType type) {
  switch (type) {
    case WeightType::kBfloat16:
      return FloatKernels<Bfloat16Row>::kTable;
    case WeightType::kFloat16:
      return FloatKernels<Float16Row>::kTable;
    case WeightType::kQ8_0:
      return BlockKernels<ByteRow>::kTable;
    case WeightType::kQ4_0:
      return BlockKernels<NibbleRow>::kTable;
    case WeightType::kFloat32:
      break;
  }
  return FloatKernels<Float32Row>::kTable;
}

}  // namespace
}  // namespace pjax
