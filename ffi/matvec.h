// A matrix times vectors: a few of them at the speed at which the matrix comes out of memory.
#ifndef PJAX_FFI_MATVEC_H_
#define PJAX_FFI_MATVEC_H_

#include <stdint.h>

#include "row_kernels.h"
#include "thread_pool.h"

namespace pjax {

// Bytes read below which a product stays on its thread: about 10 us of work, less than waking a worker takes.
constexpr int64_t kMatvecInlineBytes = 128 * 1024;

struct MatvecArgs {
  const void* weight;  // the first of `rows` rows of `columns` weights, as RowKernels has them
  int64_t row_stride;  // bytes from one row to the next
  const float* bias;   // [rows] or nullptr
  const float* x;      // [batch, columns]
  int64_t batch, rows, columns;
  float* y;            // [batch, rows]
};

// y[t, r] = weight[r] . x[t] + bias[r]. Every row is read from memory once; the tokens find it in the cache. A token's
// result has the same bits whatever else is in the batch, and for any number of threads.
void Matvec(const MatvecArgs& args, const RowKernels& kernels, ThreadPool& pool);

// As one call for each of `count` >= 1 products, which all have the same x: with fewer starts of the threads and of the
// memory's streams.
void Matvecs(const MatvecArgs* products, int64_t count, const RowKernels& kernels, ThreadPool& pool);

// Sum modulo 2^32 of the buffer as native uint32 words, the last one padded with zero bytes.
uint32_t StreamSum(const void* data, int64_t bytes, const RowKernels& kernels, ThreadPool& pool);

}  // namespace pjax

#endif  // PJAX_FFI_MATVEC_H_
