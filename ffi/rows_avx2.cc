// Row kernels for x86 with AVX2 and FMA.
#include <immintrin.h>

#include "row_kernels.h"

namespace pjax {
namespace {

struct Vector {
  using Floats = __m256;
  static constexpr int kLanes = 8;
  static constexpr int kAccumulators = 8;

  static Floats Zero() { return _mm256_setzero_ps(); }
  static Floats Broadcast(float value) { return _mm256_set1_ps(value); }
  static Floats Load(const float* from) { return _mm256_loadu_ps(from); }
  static void Store(float* to, Floats value) { _mm256_storeu_ps(to, value); }
  static Floats Add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
  static Floats MultiplyAdd(Floats a, Floats b, Floats sum) { return _mm256_fmadd_ps(a, b, sum); }
  static float Sum(Floats value) {
    const __m128 quad = _mm_add_ps(_mm256_castps256_ps128(value), _mm256_extractf128_ps(value, 1));
    const __m128 pair = _mm_add_ps(quad, _mm_movehl_ps(quad, quad));
    return _mm_cvtss_f32(_mm_add_ss(pair, _mm_shuffle_ps(pair, pair, 1)));
  }
  // A bfloat16 is the upper half of a float32: the even one of each dword is shifted up, the odd one masked out.
  static Floats LoadEven(const uint16_t* pairs) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(LoadDwords(pairs), 16));
  }
  static Floats LoadOdd(const uint16_t* pairs) {
    return _mm256_castsi256_ps(_mm256_and_si256(LoadDwords(pairs), _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
  }

 private:
  static __m256i LoadDwords(const uint16_t* pairs) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(pairs));
  }
};

}  // namespace
}  // namespace pjax

#include "row_kernels_inl.h"

namespace pjax {

const RowKernels& Avx2Kernels(WeightType type) { return KernelsOf(type); }

}  // namespace pjax
