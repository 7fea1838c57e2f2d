// RMSNorm and LayerNorm of a few tokens: one call instead of the five programs that XLA makes of each.
#ifndef PJAX_FFI_NORM_H_
#define PJAX_FFI_NORM_H_

#include <stdint.h>

namespace pjax {

struct NormArgs {
  const float* x;      // [batch, model]
  const float* scale;  // [model] or nullptr
  const float* bias;   // [model] or nullptr
  int64_t batch, model;
  bool centered;       // subtract the mean first: LayerNorm
  float eps;
  float* y;            // [batch, model]
};

// y = c / sqrt(mean(c^2) + eps) * scale + bias, with c = x - mean(x) if `centered`, else x. The bits do not depend on
// the instruction set.
void Norm(const NormArgs& args);

}  // namespace pjax

#endif  // PJAX_FFI_NORM_H_
