// The inner loops: everything that touches the weights of one row, for one instruction set and weight type.
//
// Included by files that are compiled for a particular instruction set, so it holds declarations and plain structs
// only: an inline function here could be emitted with AVX-512 and then be linked into the portable path.
#ifndef PJAX_FFI_ROW_KERNELS_H_
#define PJAX_FFI_ROW_KERNELS_H_

#include <stddef.h>
#include <stdint.h>

namespace pjax {

enum class CpuLevel { kPortable, kAvx2, kAvx512 };
enum class WeightType { kFloat32, kBfloat16 };

// Vectors of activations are padded with zeros to whole blocks of this many elements. 32 bfloat16 are one cache line.
constexpr int64_t kBlock = 32;

// Down rows that one pass over the accumulator adds: 4 is the measured optimum (1: -3 %, 8: -2 %).
constexpr int kGroup = 4;

// Within a block, activations and accumulators are kept in "lane order", the order in which a register of weights comes
// out of memory: as stored for float32; for bfloat16 the 16 even elements, then the 16 odd ones.
struct RowKernels {
  // Sum of row[i] * x[i]. While line i of the row is used, line i of `next` is prefetched (`next` may be any address).
  float (*dot)(const void* row, const float* x, int64_t size, const void* next);
  // sums[i] += coefficients[0] * rows[0][i] + ..., in that order, for the first num_rows <= kGroup rows.
  void (*add_rows)(const void* const* rows, const float* coefficients, int num_rows, float* sums, int64_t size,
                   const void* const* next);
  // Sum modulo 2^32 of `count` words, prefetching 4 KB ahead.
  uint32_t (*sum_words)(const uint32_t* words, int64_t count);
  int64_t element_bytes;
  bool even_odd;  // whether lane order differs from memory order
};

const RowKernels& PortableKernels(WeightType type);
const RowKernels& Avx2Kernels(WeightType type);
const RowKernels& Avx512Kernels(WeightType type);

}  // namespace pjax

#endif  // PJAX_FFI_ROW_KERNELS_H_
