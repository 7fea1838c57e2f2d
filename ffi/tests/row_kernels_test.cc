// Dot, row addition and word sum of every instruction set against double precision, over sizes with every remainder.
#include "row_kernels.h"

#include "lane_order.h"
#include "testing.h"

namespace pjax {
namespace {

void CheckDot(const RowKernels& kernels, WeightType type, const std::string& text, int64_t size, std::mt19937& rng) {
  const Weights row(rng, type, size);
  const std::vector<float> x = RandomFloats(rng, size);
  std::vector<float> lanes(PaddedSize(size));
  ToLaneOrder(kernels, x.data(), size, lanes.data());
  double expected = 0, magnitude = 0;
  for (int64_t i = 0; i < size; ++i) {
    expected += row.values[i] * x[i];
    magnitude += fabs(row.values[i] * x[i]);
  }
  const float got = kernels.dot(row.bytes.data(), lanes.data(), size, row.bytes.data());
  PJAX_CHECK(fabs(got - expected) <= SumTolerance(size, magnitude), text + ", dot of " + std::to_string(size));
}

void CheckAddRows(const RowKernels& kernels, WeightType type, const std::string& text, int64_t size,
                  std::mt19937& rng) {
  for (int num_rows = 1; num_rows <= kGroup; ++num_rows) {
    std::vector<Weights> weights;
    for (int r = 0; r < num_rows; ++r) weights.emplace_back(rng, type, size);
    const std::vector<float> coefficients = RandomFloats(rng, num_rows), start = RandomFloats(rng, size);
    const void* rows[kGroup];
    for (int r = 0; r < num_rows; ++r) rows[r] = weights[r].bytes.data();
    std::vector<float> lanes(PaddedSize(size)), sums(size);
    ToLaneOrder(kernels, start.data(), size, lanes.data());
    kernels.add_rows(rows, coefficients.data(), num_rows, lanes.data(), size, rows);
    FromLaneOrder(kernels, lanes.data(), size, sums.data());
    for (int64_t i = 0; i < size; ++i) {
      double expected = start[i], magnitude = fabs(start[i]);
      for (int r = 0; r < num_rows; ++r) {
        expected += coefficients[r] * weights[r].values[i];
        magnitude += fabs(coefficients[r] * weights[r].values[i]);
      }
      PJAX_CHECK(fabs(sums[i] - expected) <= SumTolerance(num_rows, magnitude),
                 text + ", add_rows of " + std::to_string(num_rows) + " x " + std::to_string(size));
    }
  }
}

void CheckSumWords(const RowKernels& kernels, const std::string& text, int64_t size, std::mt19937& rng) {
  std::vector<uint32_t> words(size);
  uint32_t expected = 0;
  for (uint32_t& word : words) expected += word = rng();
  PJAX_CHECK(kernels.sum_words(words.data(), size) == expected, text + ", words " + std::to_string(size));
}

}  // namespace
}  // namespace pjax

int main() {
  using namespace pjax;
  std::mt19937 rng(1);
  ForEachKernels([&](const RowKernels& kernels, WeightType type, const std::string& text) {
    for (int64_t size = 0; size <= 300; ++size) {
      CheckDot(kernels, type, text, size, rng);
      CheckSumWords(kernels, text, size, rng);
    }
    for (int64_t size : {0, 1, 7, 31, 32, 33, 63, 64, 65, 130, 257}) CheckAddRows(kernels, type, text, size, rng);
  });
  return 0;
}
