// The low-rank predictor: which neurons are likely to be active.
#ifndef PJAX_FFI_LOW_RANK_H_
#define PJAX_FFI_LOW_RANK_H_

#include <stdint.h>

#include "row_kernels.h"
#include "thread_pool.h"

namespace pjax {

// Rows of a matrix, and how they are read.
struct MatrixRows {
  const RowKernels* kernels;
  const void* data;
  int64_t count, stride;  // rows, and bytes from one to the next
};

struct LowRankArgs {
  MatrixRows first;    // `rank` rows of `columns`
  MatrixRows second;   // `neurons` rows of `rank`
  const float* bias;   // [neurons]
  float threshold;
  const float* x;      // [batch, columns]
  int64_t batch, columns;
  bool* mask;          // [batch, neurons]
};

// mask[t, n] = second[n] . relu(first x[t]) + bias[n] > threshold.
void LowRankMask(const LowRankArgs& args, ThreadPool& pool);

}  // namespace pjax

#endif  // PJAX_FFI_LOW_RANK_H_
