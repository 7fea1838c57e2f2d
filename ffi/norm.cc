#include "norm.h"

#include <math.h>

namespace pjax {
namespace {

// Independent sums, so that the adds of a long row do not wait for each other.
constexpr int64_t kLanes = 16;

// Sum of term(i) over i < size.
template <typename Term>
float Sum(int64_t size, const Term& term) {
  float sums[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) sums[lane] += term(i + lane);
  }
  for (int64_t lane = 0; i < size; ++i, ++lane) sums[lane] += term(i);
  float total = 0;
  for (float sum : sums) total += sum;
  return total;
}

}  // namespace

void Norm(const NormArgs& args) {
  const int64_t size = args.model;
  for (int64_t token = 0; token < args.batch; ++token) {
    const float* x = args.x + token * size;
    float* y = args.y + token * size;
    const float mean = args.centered ? Sum(size, [&](int64_t i) { return x[i]; }) / size : 0.0f;
    const float square = Sum(size, [&](int64_t i) { return (x[i] - mean) * (x[i] - mean); }) / size;
    const float factor = 1.0f / sqrtf(square + args.eps);
    for (int64_t i = 0; i < size; ++i) {
      const float scaled = (x[i] - mean) * factor * (args.scale != nullptr ? args.scale[i] : 1.0f);
      y[i] = args.bias != nullptr ? scaled + args.bias[i] : scaled;
    }
  }
}

}  // namespace pjax
