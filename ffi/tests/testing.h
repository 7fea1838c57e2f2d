// The little that the tests share: checks that say what failed, random data, weights of every type.
#ifndef PJAX_FFI_TESTS_TESTING_H_
#define PJAX_FFI_TESTS_TESTING_H_

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <random>
#include <string>
#include <vector>

#include "cpu_features.h"

namespace pjax {

// Ends the test with the place and the text unless the condition holds.
#define PJAX_CHECK(condition, text)                                                        \
  do {                                                                                     \
    if (!(condition)) {                                                                    \
      fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #condition, (text).c_str()); \
      exit(1);                                                                             \
    }                                                                                      \
  } while (false)

inline const char* TypeName(WeightType type) {
  constexpr const char* kNames[] = {"float32", "bfloat16", "float16", "q8_0", "q4_0"};
  return kNames[static_cast<int>(type)];
}

inline bool IsPacked(WeightType type) { return type == WeightType::kQ8_0 || type == WeightType::kQ4_0; }

inline std::vector<float> RandomFloats(std::mt19937& rng, int64_t size) {
  std::normal_distribution<float> normal;
  std::vector<float> values(size);
  for (float& value : values) value = normal(rng);
  return values;
}

// Unlike ==, tells 0 from -0 and accepts equal NaNs.
inline bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && (a.empty() || memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

// The float16 nearest to a number of ordinary size is one of these: 11 bits of mantissa, all exponents. Bits and value.
struct Half {
  uint16_t bits;
  double value;
};

inline Half RandomHalf(std::mt19937& rng) {
  const uint16_t bits = rng() & 0xffff;
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  if (exponent > 16) return RandomHalf(rng);  // below 4 in size
  const double magnitude = exponent == 0 ? ldexp(mantissa, -24) : ldexp(1024 + mantissa, exponent - 25);
  return {bits, bits >> 15 != 0 ? -magnitude : magnitude};
}

// Rows of weights as the kernels see them, in memory of exactly their size so that a sanitizer sees reads past its end,
// and the same numbers in double.
struct Weights {
  int64_t row_bytes;
  std::vector<char> bytes;
  std::vector<double> values;

  Weights(std::mt19937& rng, WeightType type, int64_t rows, int64_t columns) : values(rows * columns) {
    row_bytes = type == WeightType::kFloat32 ? 4 * columns : 2 * columns;
    if (IsPacked(type)) row_bytes = columns / 32 * (type == WeightType::kQ8_0 ? 34 : 18);
    bytes.resize(rows * row_bytes);
    for (int64_t row = 0; row < rows; ++row) {
      char* to = bytes.data() + row * row_bytes;
      double* row_values = values.data() + row * columns;
      if (IsPacked(type)) {
        PackRandomRow(rng, type == WeightType::kQ8_0, columns / 32, to, row_values);
      } else {
        for (int64_t i = 0; i < columns; ++i) row_values[i] = WriteRandomElement(rng, type, i, to);
      }
    }
  }

 private:
  static double WriteRandomElement(std::mt19937& rng, WeightType type, int64_t i, char* row) {
    if (type == WeightType::kFloat16) {
      const Half half = RandomHalf(rng);
      memcpy(row + 2 * i, &half.bits, 2);
      return half.value;
    }
    float value = RandomFloats(rng, 1)[0];
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    if (type == WeightType::kBfloat16) bits &= 0xffff0000u;
    const uint16_t upper = static_cast<uint16_t>(bits >> 16);
    if (type == WeightType::kFloat32) memcpy(row + 4 * i, &bits, 4);
    if (type == WeightType::kBfloat16) memcpy(row + 2 * i, &upper, 2);
    memcpy(&value, &bits, sizeof(value));
    return value;
  }

  // Written from the description of the layout, byte by byte.
  static void PackRandomRow(std::mt19937& rng, bool eight_bits, int64_t num_blocks, char* row, double* row_values) {
    for (int64_t block = 0; block < num_blocks; ++block) {
      const Half scale = RandomHalf(rng);
      const int64_t block_bytes = eight_bits ? 32 : 16;
      memcpy(row + num_blocks * block_bytes + 2 * block, &scale.bits, 2);
      const int64_t group = block / 16, lane = block % 16;
      const int64_t lanes = num_blocks - group * 16 < 16 ? num_blocks - group * 16 : 16;
      char* codes = row + group * 16 * block_bytes;
      for (int64_t i = 0; i < 32; ++i) {
        const int random = rng() % (eight_bits ? 256 : 16);
        row_values[block * 32 + i] = scale.value * (random - (eight_bits ? 128 : 8));
        if (eight_bits) {
          codes[i / 4 * 4 * lanes + 4 * lane + i % 4] = static_cast<char>(random - 128);
        } else {
          char& byte = codes[i / 8 * 4 * lanes + 4 * lane + i % 4];
          byte = static_cast<char>(i % 8 < 4 ? (byte & 0xf0) | random : (byte & 0x0f) | random << 4);
        }
      }
    }
  }
};

// What a dot product makes of x: for q8_0 and q4_0, x rounded to int8 in blocks of 32.
inline std::vector<double> AsPrepared(WeightType type, const float* x, int64_t size) {
  std::vector<double> out(x, x + size);
  if (!IsPacked(type)) return out;
  for (int64_t start = 0; start < size; start += 32) {
    float largest = 0;
    for (int64_t i = start; i < start + 32; ++i) largest = fmaxf(largest, fabsf(x[i]));
    const float scale = largest / 127, inverse = 1 / scale;
    for (int64_t i = start; i < start + 32; ++i) {
      const float scaled = x[i] * inverse;
      out[i] = largest < 0x1p-110f ? 0 : nearbyint(scaled) * static_cast<double>(scale);
    }
  }
  return out;
}

// Calls fn(kernels, type, text) for every instruction set of this machine and every weight type.
template <typename Fn>
void ForEachKernels(const Fn& fn) {
  for (CpuLevel level : SupportedCpuLevels()) {
    for (WeightType type : {WeightType::kFloat32, WeightType::kBfloat16, WeightType::kFloat16, WeightType::kQ8_0,
                            WeightType::kQ4_0}) {
      fn(KernelsFor(level, type), type, std::string(CpuLevelName(level)) + " " + TypeName(type));
    }
  }
}

// Bound of the rounding error of a float32 sum of `count` terms whose absolute values sum to `magnitude`: each of at
// most count additions and one product errs by half an epsilon; twice that, for the partial sums.
inline double SumTolerance(int64_t count, double magnitude) {
  constexpr double kEpsilon = 1.2e-7;
  return kEpsilon * static_cast<double>(count + 2) * magnitude + 1e-37;
}

}  // namespace pjax

#endif  // PJAX_FFI_TESTS_TESTING_H_
