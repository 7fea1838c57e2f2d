// Products with many tokens against double precision, and against each token alone; the same bits for every number of
// threads.
#include "panel_product.h"

#include "testing.h"

namespace pjax {
namespace {

// One token in so many is checked against double precision.
constexpr int64_t kCheckedTokens = 7;

void CheckMatvec(const RowKernels& kernels, WeightType type, const std::string& text, int64_t rows, int64_t columns,
                 int64_t batch) {
  std::mt19937 rng(rows * 1000 + columns + batch);
  const Weights weight(rng, type, rows, columns);
  const std::vector<float> x = RandomFloats(rng, batch * columns), bias = RandomFloats(rng, rows);
  std::vector<float> first;
  for (int num_threads : {1, 3}) {
    ThreadPool pool(num_threads);
    std::vector<float> y(batch * rows, NAN);
    Matvec({weight.bytes.data(), weight.row_bytes, bias.data(), x.data(), batch, rows, columns, y.data()}, kernels,
           pool);
    if (num_threads == 1) first = y;
    PJAX_CHECK(SameBits(first, y), text + ", threads " + std::to_string(num_threads));
  }
  ThreadPool pool(1);
  for (int64_t token = 0; token < batch; token += kCheckedTokens) {
    const std::vector<double> prepared = AsPrepared(type, x.data() + token * columns, columns);
    std::vector<float> alone(rows);
    Matvec({weight.bytes.data(), weight.row_bytes, bias.data(), x.data() + token * columns, 1, rows, columns,
            alone.data()},
           kernels, pool);
    for (int64_t r = 0; r < rows; ++r) {
      double expected = bias[r], magnitude = fabs(expected);
      for (int64_t i = 0; i < columns; ++i) {
        const double term = weight.values[r * columns + i] * prepared[i];
        expected += term;
        magnitude += fabs(term);
      }
      const float found = first[token * rows + r];
      const std::string where = text + ", " + std::to_string(rows) + " x " + std::to_string(columns) + ", token " +
                                std::to_string(token) + " of " + std::to_string(batch);
      PJAX_CHECK(fabs(found - expected) <= SumTolerance(columns + 1, magnitude), where);
      if (IsPacked(type)) PJAX_CHECK(SameBits({found}, {alone[r]}), where + " alone");
    }
  }
}

void CheckCombine(const RowKernels& kernels, WeightType type, const std::string& text, int64_t rows, int64_t columns,
                  int64_t batch) {
  std::mt19937 rng(rows * 1000 + columns + batch);
  const Weights weight(rng, type, rows, columns);
  const std::vector<float> x = RandomFloats(rng, batch * rows);
  std::vector<float> first;
  for (int num_threads : {1, 3}) {
    ThreadPool pool(num_threads);
    std::vector<float> y(batch * columns, NAN);
    CombineRows({weight.bytes.data(), weight.row_bytes, x.data(), batch, rows, columns, y.data()}, kernels, pool);
    if (num_threads == 1) first = y;
    PJAX_CHECK(SameBits(first, y), text + ", threads " + std::to_string(num_threads));
  }
  for (int64_t token = 0; token < batch; token += kCheckedTokens) {
    for (int64_t i = 0; i < columns; ++i) {
      double expected = 0, magnitude = 0;
      for (int64_t r = 0; r < rows; ++r) {
        const double term = weight.values[r * columns + i] * x[token * rows + r];
        expected += term;
        magnitude += fabs(term);
      }
      PJAX_CHECK(fabs(first[token * columns + i] - expected) <= SumTolerance(rows, magnitude),
                 text + ", combine " + std::to_string(rows) + " x " + std::to_string(columns) + ", token " +
                     std::to_string(token) + " of " + std::to_string(batch));
    }
  }
}

}  // namespace
}  // namespace pjax

int main() {
  using namespace pjax;
  ForEachKernels([](const RowKernels& kernels, WeightType type, const std::string& text) {
    for (int64_t columns : {1, 7, 33, 32, 480, 544}) {
      if (columns % kernels.columns_per_scale != 0) continue;
      for (int64_t rows : {0, 1, 7, 33}) {
        for (int64_t batch : {0, 1, 2, 3, 7, 15, 16, 17, 29}) {
          CheckMatvec(kernels, type, text, rows, columns, batch);
          CheckCombine(kernels, type, text, rows, columns, batch);
        }
      }
    }
    // More than one block of outputs, of tokens and of the depth, and enough for all threads.
    CheckMatvec(kernels, type, text, 300, 992, 40);
    CheckMatvec(kernels, type, text, 130, 32, 800);
    CheckCombine(kernels, type, text, 300, 992, 40);
    CheckCombine(kernels, type, text, 40, 544, 230);
  });
  return 0;
}
