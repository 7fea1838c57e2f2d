// Products of a matrix with many vectors, where arithmetic is the limit: weights become panels of float32, once for
// hundreds of tokens.
#ifndef PJAX_FFI_PANEL_PRODUCT_H_
#define PJAX_FFI_PANEL_PRODUCT_H_

#include "matvec.h"
#include "row_kernels.h"
#include "thread_pool.h"

namespace pjax {

// y[t, r] = weight[r] . x[t] + bias[r], x being what kernels.prepare makes of it; for float types only.
void MultiplyByPanels(const MatvecArgs& args, const RowKernels& kernels, ThreadPool& pool);

struct CombineArgs {
  const void* weight;  // the first of `rows` rows of `columns` weights, as RowKernels has them
  int64_t row_stride;  // bytes from one row to the next
  const float* x;      // [batch, rows]
  int64_t batch, rows, columns;
  float* y;            // [batch, columns]
};

// y[t] = x[t, 0] * weight[0] + x[t, 1] * weight[1] + ..., in that order.
void CombineRows(const CombineArgs& args, const RowKernels& kernels, ThreadPool& pool);

}  // namespace pjax

#endif  // PJAX_FFI_PANEL_PRODUCT_H_
