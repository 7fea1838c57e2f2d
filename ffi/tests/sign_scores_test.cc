// Sign scores against counting column by column; the same for every instruction set and number of threads.
#include "sign_scores.h"

#include "testing.h"

namespace pjax {
namespace {

void CheckScores(const SignKernels& kernels, const std::string& text, int64_t rows, int64_t columns, int64_t batch) {
  std::mt19937 rng(rows * 1000 + columns);
  const std::vector<float> weight = RandomFloats(rng, rows * columns), bias = RandomFloats(rng, rows);
  std::vector<float> x = RandomFloats(rng, batch * columns);
  for (size_t i = 0; i < x.size(); i += 5) x[i] = i % 2 ? -0.0f : 0.0f;
  const int64_t words = SignWords(columns);
  std::vector<uint32_t> bits(rows * words, 0);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) {
      bits[r * words + c / 32] |= static_cast<uint32_t>(std::signbit(weight[r * columns + c])) << (c % 32);
    }
  }
  for (int num_threads = 1; num_threads <= 3; ++num_threads) {
    ThreadPool pool(num_threads);
    std::vector<float> y(batch * rows, NAN);
    SignScores({bits.data(), 0.25f, bias.data(), x.data(), batch, rows, columns, y.data()}, kernels, pool);
    for (int64_t t = 0; t < batch; ++t) {
      for (int64_t r = 0; r < rows; ++r) {
        int agreement = 0;
        for (int64_t c = 0; c < columns; ++c) {
          agreement += std::signbit(weight[r * columns + c]) == std::signbit(x[t * columns + c]) ? 1 : -1;
        }
        const double expected = 0.25 * agreement + static_cast<double>(bias[r]);
        PJAX_CHECK(fabs(y[t * rows + r] - expected) <= SumTolerance(2, fabs(0.25 * agreement) + fabs(bias[r])),
                   text + ", columns " + std::to_string(columns) + ", row " + std::to_string(r));
      }
    }
  }
}

}  // namespace
}  // namespace pjax

int main() {
  using namespace pjax;
  for (CpuLevel level : SupportedCpuLevels()) {
    for (int64_t columns : {1, 7, 31, 32, 33, 64, 100, 480, 512, 545, 2048}) {
      for (int64_t rows : {0, 1, 9}) CheckScores(SignKernelsFor(level), CpuLevelName(level), rows, columns, 3);
    }
    CheckScores(SignKernelsFor(level), CpuLevelName(level), 1500, 1024, 2);  // enough bytes for all threads
  }
  return 0;
}
