// Moves vectors of activations between memory order and the lane order of `RowKernels`.
#ifndef PJAX_FFI_LANE_ORDER_H_
#define PJAX_FFI_LANE_ORDER_H_

#include <stdint.h>

#include "row_kernels.h"

namespace pjax {

inline int64_t PaddedSize(int64_t size) { return (size + kBlock - 1) / kBlock * kBlock; }

// Writes PaddedSize(size) values: `from` in lane order, zeros behind its end.
void ToLaneOrder(const RowKernels& kernels, const float* from, int64_t size, float* to);

// Writes `size` values; `from` holds PaddedSize(size).
void FromLaneOrder(const RowKernels& kernels, const float* from, int64_t size, float* to);

}  // namespace pjax

#endif  // PJAX_FFI_LANE_ORDER_H_
