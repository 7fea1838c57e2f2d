// The mask of a low-rank predictor against double precision, for every instruction set and weight type.
#include "low_rank.h"

#include <memory>

#include "testing.h"

namespace pjax {
namespace {

void CheckMask(const RowKernels& kernels, WeightType type, const std::string& text, int64_t batch, int64_t columns,
               int64_t rank, int64_t neurons, ThreadPool& pool) {
  std::mt19937 rng(columns + rank);
  const Weights first(rng, type, rank, columns), second(rng, type, neurons, rank);
  const std::vector<float> x = RandomFloats(rng, batch * columns), bias = RandomFloats(rng, neurons);
  const auto mask = std::make_unique<bool[]>(batch * neurons);
  const float threshold = 0.25f;
  LowRankMask({{&kernels, first.bytes.data(), rank, first.row_bytes},
               {&kernels, second.bytes.data(), neurons, second.row_bytes},
               bias.data(), threshold, x.data(), batch, columns, mask.get()},
              pool);
  int64_t marked = 0;
  for (int64_t t = 0; t < batch; ++t) {
    const std::vector<double> input = AsPrepared(type, x.data() + t * columns, columns);
    std::vector<float> hidden(rank);
    for (int64_t k = 0; k < rank; ++k) {
      double sum = 0;
      for (int64_t i = 0; i < columns; ++i) sum += first.values[k * columns + i] * input[i];
      hidden[k] = sum > 0 ? static_cast<float>(sum) : 0.0f;
    }
    const std::vector<double> rounded = AsPrepared(type, hidden.data(), rank);
    for (int64_t n = 0; n < neurons; ++n) {
      double score = bias[n], magnitude = fabs(bias[n]);
      for (int64_t k = 0; k < rank; ++k) {
        score += second.values[n * rank + k] * rounded[k];
        magnitude += fabs(second.values[n * rank + k] * rounded[k]);
      }
      // A hidden unit that is a rounding error away may have another code: a 127th of its block's largest, a few times.
      const double doubt = (IsPacked(type) ? 0.02 : 1e-4) * (magnitude + 1);
      const bool got = mask[t * neurons + n];
      marked += got;
      if (fabs(score - threshold) > doubt) PJAX_CHECK(got == (score > threshold), text + ", neuron " + std::to_string(n));
    }
  }
  PJAX_CHECK(marked > 0 && marked < batch * neurons, text);
}

}  // namespace
}  // namespace pjax

int main() {
  using namespace pjax;
  for (int num_threads : {1, 3}) {
    ThreadPool pool(num_threads);
    ForEachKernels([&](const RowKernels& kernels, WeightType type, const std::string& text) {
      CheckMask(kernels, type, text, 1, 64, 32, 50, pool);
      CheckMask(kernels, type, text, 3, 96, 160, 333, pool);
      CheckMask(kernels, type, text, 2, 512, 256, 2000, pool);
    });
  }
  return 0;
}
