// The inner loops: everything that touches the weights of one row, for one instruction set and weight type.
//
// Included by files that are compiled for a particular instruction set, so it holds declarations and plain structs
// only: an inline function here could be emitted with AVX-512 and then be linked into the portable path.
#ifndef PJAX_FFI_ROW_KERNELS_H_
#define PJAX_FFI_ROW_KERNELS_H_

#include <stddef.h>
#include <stdint.h>

namespace pjax {

enum class CpuLevel { kPortable, kAvx2, kAvx512, kAvx512Vnni };
enum class WeightType { kFloat32, kBfloat16, kFloat16, kQ8_0, kQ4_0 };

// Weights of a block of q8_0 and q4_0, which share one float16 scale. 32 elements of 2 bytes are one cache line, so
// the float types step by as many.
constexpr int64_t kBlock = 32;

// Down rows that one pass over the accumulator adds: 4 is the measured optimum (1: -3 %, 8: -2 %).
constexpr int kGroup = 4;

// Columns of a panel of float32 weights: with a dozen tokens their sums fill the registers of AVX-512.
constexpr int kPanelWidth = 32;

// How one row of `size` weights lies in memory. float32, bfloat16, float16: its elements.
//
// q8_0 and q4_0: the codes of nb = size / 32 blocks, in groups of 16 blocks (the last may have n < 16), then nb
// float16 scales. In a group, "lane" l belongs to block l, so that the sums of 16 blocks fill one register:
//   q8_0: 8 vectors of 4 n bytes; bytes 4l..4l+3 of vector v are weights 4v..4v+3 of block l; code * scale.
//   q4_0: 4 vectors of 4 n bytes; byte 4l+k of vector j holds weight 8j+k of block l in its low four bits and weight
//         8j+4+k in its high ones; (code - 8) * scale.
//
// The kernels read a vector of activations in a prepared form, and add to sums in an order of their own, that in which
// the weights come out of memory. Both are made of whole groups of `columns_per_group`.
struct RowKernels {
  WeightType type;
  int64_t columns_per_group;  // a power of two
  int64_t columns_per_scale;  // a row has a multiple of these

  int64_t (*row_bytes)(int64_t size);
  // Bytes of a prepared x, a multiple of 64; it must be aligned to 64.
  int64_t (*prepared_bytes)(int64_t size);
  // For q8_0 and q4_0 x is rounded to int8 in blocks of 32: scale = max|x| / 127, code = round(x * (1 / scale)), half-way
  // to even. A block with a NaN or an infinity has scale NaN, so that all products with it are NaN; one below 2^-110
  // counts as zero.
  void (*prepare)(const float* x, int64_t size, void* prepared);
  // products[t] = sum of row[i] * x[t][i], for num_tokens prepared x that lie `stride` bytes apart; the same bits for x
  // alone and beside others. While line i of the row is used, line i of `next` is prefetched (it may be any address).
  void (*dots)(const void* row, const void* prepared, int64_t stride, int64_t num_tokens, int64_t size,
               const void* next, float* products);
  // products[r] = the product of row r with one prepared x, of rows that lie `row_stride` bytes apart.
  void (*dot_rows)(const void* rows, int64_t row_stride, int64_t num_rows, const void* prepared, int64_t size,
                   float* products);
  // Whether dot_rows takes several rows at a time, as fast as one, and so adds their products in an order of its own.
  bool (*joins_rows)(int64_t size);
  // sums[i] += coefficients[0] * rows[0][i] + ..., in that order, for the first num_rows <= kGroup rows.
  void (*add_rows)(const void* const* rows, const float* coefficients, int num_rows, float* sums, int64_t size,
                   const void* const* next);
  // y = sums + (sums + stride) + ..., in that order, num_sums >= 1 of them, of `size` columns each, in memory order.
  void (*finish)(const float* sums, int64_t stride, int64_t num_sums, int64_t size, float* y);
  // Columns first..first + count of a row, in the order of the sums, with zeros up to whole groups; `first` begins one.
  void (*unpack)(const void* row, int64_t size, int64_t first, int64_t count, float* columns);
  // panel[k][r] = rows[r][k] for kPanelWidth rows that lie `stride` apart, and k < depth, a multiple of 4.
  void (*transpose)(const float* rows, int64_t stride, int64_t depth, float* panel);
  // sums[t][j] += panel[0][j] * x[t][0] + panel[1][j] * x[t][1] + ..., in that order, for j < kPanelWidth; x and sums
  // of a token lie `x_stride` and `sums_stride` from those of the one before.
  void (*multiply_panel)(const float* panel, int64_t depth, const float* x, int64_t x_stride, int64_t num_tokens,
                         float* sums, int64_t sums_stride);
  // Sum modulo 2^32 of `count` words, prefetching 4 KB ahead.
  uint32_t (*sum_words)(const uint32_t* words, int64_t count);
};

const RowKernels& PortableKernels(WeightType type);
const RowKernels& Avx2Kernels(WeightType type);
const RowKernels& Avx512Kernels(WeightType type);
const RowKernels& Avx512VnniKernels(WeightType type);

}  // namespace pjax

#endif  // PJAX_FFI_ROW_KERNELS_H_
