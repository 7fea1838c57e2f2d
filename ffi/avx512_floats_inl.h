// Sixteen floats, for the kernels of x86 with AVX-512. Included once by each of their files; see row_kernels_inl.h.
#include <immintrin.h>

namespace pjax {
namespace {

// The bfloat16 dot instruction is deliberately not used: it rounds x to bfloat16 and flushes denormals, and gains
// nothing where memory is the limit.
struct Avx512Floats {
  using Floats = __m512;
  static constexpr int kLanes = 16;

  static Floats Zero() { return _mm512_setzero_ps(); }
  static Floats Broadcast(float value) { return _mm512_set1_ps(value); }
  static Floats Load(const float* from) { return _mm512_loadu_ps(from); }
  static void Store(float* to, Floats value) { _mm512_storeu_ps(to, value); }
  static Floats Add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
  static Floats Multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
  static Floats MultiplyAdd(Floats a, Floats b, Floats sum) { return _mm512_fmadd_ps(a, b, sum); }

  // A bfloat16 is the upper half of a float32: the even one of each dword is shifted up, the odd one masked out.
  static Floats EvenOf(__m512i dwords) { return _mm512_castsi512_ps(_mm512_slli_epi32(dwords, 16)); }
  static Floats OddOf(__m512i dwords) {
    return _mm512_castsi512_ps(_mm512_and_si512(dwords, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
  }
};

}  // namespace
}  // namespace pjax
