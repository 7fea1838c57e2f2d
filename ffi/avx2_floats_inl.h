// Eight floats, for the kernels of x86 with AVX2 and FMA. Included once by each of their files; see row_kernels_inl.h.
#include <immintrin.h>

namespace pjax {
namespace {

struct Avx2Floats {
  using Floats = __m256;
  static constexpr int kLanes = 8;

  static Floats Zero() { return _mm256_setzero_ps(); }
  static Floats Broadcast(float value) { return _mm256_set1_ps(value); }
  static Floats Load(const float* from) { return _mm256_loadu_ps(from); }
  static void Store(float* to, Floats value) { _mm256_storeu_ps(to, value); }
  static Floats Add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
  static Floats Multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
  static Floats MultiplyAdd(Floats a, Floats b, Floats sum) { return _mm256_fmadd_ps(a, b, sum); }

  // A bfloat16 is the upper half of a float32: the even one of each dword is shifted up, the odd one masked out.
  static Floats EvenOf(__m256i dwords) { return _mm256_castsi256_ps(_mm256_slli_epi32(dwords, 16)); }
  static Floats OddOf(__m256i dwords) {
    return _mm256_castsi256_ps(_mm256_and_si256(dwords, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
  }
};

}  // namespace
}  // namespace pjax
