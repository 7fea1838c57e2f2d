// The little that the tests share: checks that say what failed, random data, weights of both types.
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

inline const char* TypeName(WeightType type) { return type == WeightType::kFloat32 ? "float32" : "bfloat16"; }

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

// A weight matrix as the kernels see it, in memory of exactly its size so that a sanitizer sees reads past its end, and
// the same numbers in double.
struct Weights {
  std::vector<char> bytes;
  std::vector<double> values;

  Weights(std::mt19937& rng, WeightType type, int64_t size) : values(size) {
    const std::vector<float> floats = RandomFloats(rng, size);
    const int64_t element_bytes = type == WeightType::kFloat32 ? 4 : 2;
    bytes.resize(size * element_bytes);
    for (int64_t i = 0; i < size; ++i) {
      uint32_t bits;
      memcpy(&bits, &floats[i], sizeof(bits));
      if (type == WeightType::kBfloat16) bits &= 0xffff0000u;
      const uint16_t upper = static_cast<uint16_t>(bits >> 16);
      const void* element = type == WeightType::kFloat32 ? static_cast<const void*>(&bits) : &upper;
      memcpy(&bytes[i * element_bytes], element, element_bytes);
      float rounded;
      memcpy(&rounded, &bits, sizeof(rounded));
      values[i] = rounded;
    }
  }
};

// Calls fn(kernels, type, text) for every instruction set of this machine and every weight type.
template <typename Fn>
void ForEachKernels(const Fn& fn) {
  for (CpuLevel level : SupportedCpuLevels()) {
    for (WeightType type : {WeightType::kFloat32, WeightType::kBfloat16}) {
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
