// Mat-vec and stream sum against double precision; the same bits for every number of threads.
#include "matvec.h"

#include "testing.h"

namespace pjax {
namespace {

void CheckMatvec(const RowKernels& kernels, WeightType type, const std::string& text, int64_t rows, int64_t columns,
                 int64_t batch, bool with_bias) {
  std::mt19937 rng(rows * 1000 + columns);
  const Weights weight(rng, type, rows, columns);
  const std::vector<float> x = RandomFloats(rng, batch * columns), bias = RandomFloats(rng, rows);
  std::vector<float> first;
  const bool small = kernels.row_bytes(columns) * rows < (1 << 18);  // stays on one thread
  for (int num_threads = 1; num_threads <= (small ? 1 : 4); ++num_threads) {
    ThreadPool pool(num_threads);
    std::vector<float> y(batch * rows, NAN);
    const float* bias_data = with_bias ? bias.data() : nullptr;
    Matvec({weight.bytes.data(), weight.row_bytes, bias_data, x.data(), batch, rows, columns, y.data()}, kernels, pool);
    if (num_threads == 1) first = y;
    PJAX_CHECK(SameBits(first, y), text + ", threads " + std::to_string(num_threads));
  }
  for (int64_t token = 0; token < batch; ++token) {
    const std::vector<double> prepared = AsPrepared(type, x.data() + token * columns, columns);
    for (int64_t r = 0; r < rows; ++r) {
      double expected = with_bias ? bias[r] : 0, magnitude = fabs(expected);
      for (int64_t i = 0; i < columns; ++i) {
        const double term = weight.values[r * columns + i] * prepared[i];
        expected += term;
        magnitude += fabs(term);
      }
      PJAX_CHECK(fabs(first[token * rows + r] - expected) <= SumTolerance(columns + 1, magnitude),
                 text + ", row " + std::to_string(r));
    }
  }
}

// Several products in one call have the bits of one call each, wherever the threads' pieces begin.
void CheckTogether(const RowKernels& kernels, WeightType type, const std::string& text, std::vector<int64_t> rows,
                   int64_t columns, int64_t batch) {
  std::mt19937 rng(columns + batch);
  const std::vector<float> x = RandomFloats(rng, batch * columns);
  for (int num_threads : {1, 3}) {
    ThreadPool pool(num_threads);
    std::vector<Weights> weights;
    std::vector<std::vector<float>> biases, alone, together;
    std::vector<MatvecArgs> products;
    for (int64_t count : rows) {
      weights.emplace_back(rng, type, count, columns);
      biases.push_back(RandomFloats(rng, count));
      alone.emplace_back(batch * count, NAN);
      together.emplace_back(batch * count, NAN);
    }
    for (size_t i = 0; i < rows.size(); ++i) {
      const float* bias = i % 2 == 0 ? biases[i].data() : nullptr;
      products.push_back({weights[i].bytes.data(), weights[i].row_bytes, bias, x.data(), batch, rows[i], columns,
                          alone[i].data()});
      Matvec(products[i], kernels, pool);
      products[i].y = together[i].data();
    }
    Matvecs(products.data(), products.size(), kernels, pool);
    for (size_t i = 0; i < rows.size(); ++i) PJAX_CHECK(SameBits(alone[i], together[i]), text);
  }
}

void CheckStreamSum(const RowKernels& kernels, const std::string& text, int64_t bytes) {
  std::mt19937 rng(bytes);
  std::vector<uint8_t> data(bytes + 4, 0);  // the padding that the last word is defined with
  for (int64_t i = 0; i < bytes; ++i) data[i] = static_cast<uint8_t>(rng());
  uint32_t expected = 0;
  for (int64_t i = 0; i < bytes; i += 4) {
    uint32_t word;
    memcpy(&word, &data[i], 4);
    expected += word;
  }
  for (int num_threads = 1; num_threads <= 4; ++num_threads) {
    ThreadPool pool(num_threads);
    PJAX_CHECK(StreamSum(data.data(), bytes, kernels, pool) == expected, text + ", bytes " + std::to_string(bytes));
  }
}

}  // namespace
}  // namespace pjax

int main() {
  using namespace pjax;
  ForEachKernels([](const RowKernels& kernels, WeightType type, const std::string& text) {
    for (int64_t rows : {0, 1, 9}) {
      for (int64_t columns : {0, 1, 7, 33, 257, 32, 64, 96, 480, 512, 544, 896, 2560}) {
        if (columns % kernels.columns_per_scale != 0) continue;
        CheckMatvec(kernels, type, text, rows, columns, 3, true);
        CheckMatvec(kernels, type, text, rows, columns, 1, false);
      }
    }
    CheckMatvec(kernels, type, text, 700, 992, 8, true);  // enough bytes for all threads
    CheckTogether(kernels, type, text, {700, 1, 0, 300}, 992, 1);
    CheckTogether(kernels, type, text, {5, 7, 3}, 64, 3);
    CheckTogether(kernels, type, text, {400, 500}, 512, 20);
    for (int64_t bytes : {0, 1, 2, 3, 4, 7, 1000, 1 << 20, (1 << 20) + 3}) CheckStreamSum(kernels, text, bytes);
  });
  return 0;
}
