// Norms against double precision.
#include "norm.h"

#include "testing.h"

namespace pjax {
namespace {

void CheckNorm(int64_t batch, int64_t model, bool centered, bool with_scale, bool with_bias) {
  std::mt19937 rng(batch * 1000 + model);
  const std::vector<float> x = RandomFloats(rng, batch * model);
  const std::vector<float> scale = RandomFloats(rng, model), bias = RandomFloats(rng, model);
  std::vector<float> y(batch * model, NAN);
  Norm({x.data(), with_scale ? scale.data() : nullptr, with_bias ? bias.data() : nullptr, batch, model, centered, 1e-5f,
        y.data()});
  for (int64_t token = 0; token < batch; ++token) {
    const float* row = x.data() + token * model;
    double mean = 0, square = 0;
    for (int64_t i = 0; centered && i < model; ++i) mean += row[i] / static_cast<double>(model);
    for (int64_t i = 0; i < model; ++i) square += (row[i] - mean) * (row[i] - mean) / model;
    for (int64_t i = 0; i < model; ++i) {
      double expected = (row[i] - mean) / sqrt(square + 1e-5) * (with_scale ? scale[i] : 1);
      const double tolerance = SumTolerance(model, fabs(expected) + 4);
      expected += with_bias ? bias[i] : 0;
      PJAX_CHECK(fabs(y[token * model + i] - expected) <= tolerance, "model " + std::to_string(model));
    }
  }
}

}  // namespace
}  // namespace pjax

int main() {
  for (int64_t model : {1, 7, 16, 33, 2048}) {
    for (int options = 0; options < 8; ++options) {
      pjax::CheckNorm(3, model, options & 1, options & 2, options & 4);
    }
  }
  return 0;
}
