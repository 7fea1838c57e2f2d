// Every function of every instruction set and weight type against double precision, over sizes with every remainder.
#include "row_kernels.h"

#include <algorithm>

#include "testing.h"

namespace pjax {
namespace {

// Memory for a prepared x, aligned as the kernels want it.
struct Prepared {
  std::vector<char> bytes;
  void* data;

  Prepared(const RowKernels& kernels, const float* x, int64_t size) : bytes(kernels.prepared_bytes(size) + 64) {
    data = bytes.data() + (64 - reinterpret_cast<uintptr_t>(bytes.data()) % 64);
    kernels.prepare(x, size, data);
  }
};

int64_t Padded(const RowKernels& kernels, int64_t size) {
  return (size + kernels.columns_per_group - 1) / kernels.columns_per_group * kernels.columns_per_group;
}

float DotOf(const RowKernels& kernels, const Weights& row, const std::vector<float>& x) {
  const Prepared prepared(kernels, x.data(), x.size());
  float product;
  kernels.dots(row.bytes.data(), prepared.data, 0, 1, x.size(), row.bytes.data(), &product);
  return product;
}

void CheckDot(const RowKernels& kernels, WeightType type, const std::string& text, int64_t size, std::mt19937& rng) {
  const Weights row(rng, type, 1, size);
  PJAX_CHECK(kernels.row_bytes(size) == row.row_bytes, text);
  PJAX_CHECK(kernels.prepared_bytes(size) % 64 == 0, text);
  const std::vector<float> x = RandomFloats(rng, size);
  const std::vector<double> prepared = AsPrepared(type, x.data(), size);
  double expected = 0, magnitude = 0, rounding = 0;
  for (int64_t i = 0; i < size; ++i) {
    expected += row.values[i] * prepared[i];
    magnitude += fabs(row.values[i] * prepared[i]);
    rounding += fabs(row.values[i] * (prepared[i] - x[i]));
  }
  PJAX_CHECK(rounding <= 0.02 * (magnitude + 1), text);  // half of a 127th of the largest, and the largest is near 3
  PJAX_CHECK(fabs(DotOf(kernels, row, x) - expected) <= SumTolerance(size, magnitude),
             text + ", dot of " + std::to_string(size));
}

// Some x side by side have the products that each has alone, to the bit.
void CheckDots(const RowKernels& kernels, WeightType type, const std::string& text, int64_t size, std::mt19937& rng) {
  const Weights row(rng, type, 1, size);
  constexpr int64_t kMaxTokens = 11;
  const int64_t stride = kernels.prepared_bytes(size);
  std::vector<char> bytes(kMaxTokens * stride + 64);
  char* x = bytes.data() + (64 - reinterpret_cast<uintptr_t>(bytes.data()) % 64);
  std::vector<float> alone(kMaxTokens);
  for (int64_t t = 0; t < kMaxTokens; ++t) {
    const std::vector<float> values = RandomFloats(rng, size);
    kernels.prepare(values.data(), size, x + t * stride);
    alone[t] = DotOf(kernels, row, values);
  }
  for (int64_t num_tokens = 1; num_tokens <= kMaxTokens; ++num_tokens) {
    std::vector<float> products(num_tokens, NAN);
    kernels.dots(row.bytes.data(), x, stride, num_tokens, size, x, products.data());
    PJAX_CHECK(SameBits(products, {alone.begin(), alone.begin() + num_tokens}),
               text + ", " + std::to_string(num_tokens) + " dots of " + std::to_string(size));
  }
}

// Rows one behind the other, with a gap between them, have the products that each has alone, wherever the first lies.
void CheckDotRows(const RowKernels& kernels, WeightType type, const std::string& text, int64_t size,
                  std::mt19937& rng) {
  constexpr int64_t kRows = 37, kGap = 24;
  const Weights weights(rng, type, kRows, size);
  const int64_t stride = weights.row_bytes + kGap;
  std::vector<char> apart(kRows * stride);
  for (int64_t r = 0; r < kRows; ++r) {
    std::copy_n(weights.bytes.data() + r * weights.row_bytes, weights.row_bytes, apart.data() + r * stride);
  }
  const std::vector<float> x = RandomFloats(rng, size);
  const Prepared prepared(kernels, x.data(), size);
  std::vector<float> whole(kRows, NAN);
  kernels.dot_rows(apart.data(), stride, kRows, prepared.data, size, whole.data());
  for (int64_t r = 0; r < kRows; ++r) {
    float alone, magnitude = 0;
    const char* row = apart.data() + r * stride;
    kernels.dots(row, prepared.data, 0, 1, size, row, &alone);
    for (int64_t i = 0; i < size; ++i) magnitude += fabs(weights.values[r * size + i] * x[i]);
    PJAX_CHECK(fabs(whole[r] - alone) <= (kernels.joins_rows(size) ? 2 * SumTolerance(size, magnitude) : 0),
               text + ", dot_rows of " + std::to_string(size));
  }
  for (int64_t first : {1, 3, 7, 36}) {
    std::vector<float> some(kRows - first, NAN);
    kernels.dot_rows(apart.data() + first * stride, stride, kRows - first, prepared.data, size, some.data());
    PJAX_CHECK(SameBits(some, {whole.begin() + first, whole.end()}), text + ", dot_rows from " + std::to_string(first));
  }
}

// Adds the rows to sums that start at zero, and puts copies of these sums together again.
void CheckAddRows(const RowKernels& kernels, WeightType type, const std::string& text, int64_t size,
                  std::mt19937& rng) {
  for (int num_rows = 1; num_rows <= kGroup; ++num_rows) {
    const Weights weights(rng, type, num_rows, size);
    const std::vector<float> coefficients = RandomFloats(rng, num_rows);
    const void* rows[kGroup];
    for (int r = 0; r < num_rows; ++r) rows[r] = weights.bytes.data() + r * weights.row_bytes;
    const int64_t padded = Padded(kernels, size), num_sums = 3;
    std::vector<float> sums(num_sums * padded), y(size, NAN);
    for (int64_t s = 0; s < num_sums; ++s) {
      for (int64_t i = 0; i <= s; ++i) {
        kernels.add_rows(rows, coefficients.data(), num_rows, sums.data() + s * padded, size, rows);
      }
    }
    kernels.finish(sums.data(), padded, num_sums, size, y.data());
    for (int64_t i = 0; i < size; ++i) {
      double expected = 0, magnitude = 0;
      for (int r = 0; r < num_rows; ++r) {
        expected += 6 * coefficients[r] * weights.values[r * size + i];
        magnitude += 6 * fabs(coefficients[r] * weights.values[r * size + i]);
      }
      // The product of coefficient and scale is rounded, and six additions of a row.
      PJAX_CHECK(fabs(y[i] - expected) <= SumTolerance(6 * num_rows + 1, magnitude),
                 text + ", add_rows of " + std::to_string(num_rows) + " x " + std::to_string(size));
    }
  }
}

// What is not finite in x must not vanish, and nothing else may become so.
void CheckNotFinite(const RowKernels& kernels, WeightType type, const std::string& text, int64_t size,
                    std::mt19937& rng) {
  const Weights row(rng, type, 1, size);
  for (float value : {NAN, INFINITY, -INFINITY}) {
    for (int64_t i = 0; i < size; i += 13) {
      std::vector<float> x = RandomFloats(rng, size);
      x[i] = value;
      const float dot = DotOf(kernels, row, x);
      PJAX_CHECK(!isfinite(dot), text + ", x[" + std::to_string(i) + "] = " + std::to_string(value));
      PJAX_CHECK(!isnan(value) || isnan(dot), text);
    }
  }
  for (float value : {0.0f, 1e-40f, 1e-38f, 1e-33f, 1e30f}) {
    const float dot = DotOf(kernels, row, std::vector<float>(size, value));
    double expected = 0, magnitude = 0;
    for (int64_t i = 0; i < size; ++i) {
      expected += row.values[i] * value;
      magnitude += fabs(row.values[i]) * value;
    }
    PJAX_CHECK(fabs(dot - expected) <= SumTolerance(size, magnitude) + 1e-33, text + ", x of " + std::to_string(value));
  }
}

void CheckSumWords(const RowKernels& kernels, const std::string& text, int64_t size, std::mt19937& rng) {
  std::vector<uint32_t> words(size);
  uint32_t expected = 0;
  for (uint32_t& word : words) expected += word = rng();
  PJAX_CHECK(kernels.sum_words(words.data(), size) == expected, text + ", words " + std::to_string(size));
}

// The largest codes everywhere, where products of bytes would saturate or sums overflow if anything did.
void CheckExtremes(const RowKernels& kernels, const std::string& text) {
  if (!IsPacked(kernels.type)) return;
  const int64_t size = 512;
  std::mt19937 rng(2);
  Weights row(rng, kernels.type, 1, size);
  const bool eight_bits = kernels.type == WeightType::kQ8_0;
  for (int code : {eight_bits ? -128 : 0, eight_bits ? 127 : 15}) {
    const int byte = eight_bits ? code : code * 17;
    memset(row.bytes.data(), byte, size / (eight_bits ? 1 : 2));
    for (int64_t i = 0; i < size / 32; ++i) memcpy(&row.bytes[row.row_bytes - 2 - 2 * i], "\0\x3c", 2);  // scale 1
    for (float x : {1.0f, -1.0f}) {
      const double expected = size * (code - (eight_bits ? 0 : 8)) * static_cast<double>(x);
      const double error = fabs(DotOf(kernels, row, std::vector<float>(size, x)) - expected);
      PJAX_CHECK(error <= SumTolerance(size, fabs(expected)), text + ", code " + std::to_string(code));
    }
  }
}

}  // namespace
}  // namespace pjax

int main() {
  using namespace pjax;
  std::mt19937 rng(1);
  ForEachKernels([&](const RowKernels& kernels, WeightType type, const std::string& text) {
    for (int64_t size = 0; size <= 300; ++size) CheckSumWords(kernels, text, size, rng);
    for (int64_t size = 0; size <= (IsPacked(type) ? 3200 : 300); size += kernels.columns_per_scale) {
      CheckDot(kernels, type, text, size, rng);
    }
    for (int64_t size : {0, 1, 7, 31, 32, 33, 63, 64, 65, 96, 128, 130, 160, 192, 256, 257, 288, 480, 512, 544, 896, 2560}) {
      if (size % kernels.columns_per_scale != 0) continue;
      CheckDots(kernels, type, text, size, rng);
      CheckDotRows(kernels, type, text, size, rng);
      CheckAddRows(kernels, type, text, size, rng);
      CheckNotFinite(kernels, type, text, size, rng);
    }
    CheckExtremes(kernels, text);
  });
  return 0;
}
