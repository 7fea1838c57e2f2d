// Row kernels for x86 with AVX-512 (F, BW, VL, DQ).
//
// The bfloat16 dot instruction is deliberately not used: it rounds x to bfloat16 and flushes denormals, and gains
// nothing where memory is the limit.
#include <immintrin.h>

#include "row_kernels.h"

namespace pjax {
namespace {

struct Vector {
  using Floats = __m512;
  static constexpr int kLanes = 16;
  static constexpr int kAccumulators = 8;

  static Floats Zero() { return _mm512_setzero_ps(); }
  static Floats Broadcast(float value) { return _mm512_set1_ps(value); }
  static Floats Load(const float* from) { return _mm512_loadu_ps(from); }
  static void Store(float* to, Floats value) { _mm512_storeu_ps(to, value); }
  static Floats Add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
  static Floats MultiplyAdd(Floats a, Floats b, Floats sum) { return _mm512_fmadd_ps(a, b, sum); }
  static float Sum(Floats value) { return _mm512_reduce_add_ps(value); }
  // A bfloat16 is the upper half of a float32: the even one of each dword is shifted up, the odd one masked out.
  static Floats LoadEven(const uint16_t* pairs) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(pairs), 16));
  }
  static Floats LoadOdd(const uint16_t* pairs) {
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(pairs), upper));
  }
};

}  // namespace
}  // namespace pjax

#include "row_kernels_inl.h"

namespace pjax {

const RowKernels& Avx512Kernels(WeightType type) { return KernelsOf(type); }

}  // namespace pjax
