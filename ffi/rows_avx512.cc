// Row kernels for x86 with AVX-512 (F, BW, VL, DQ).
#include "avx512_vector_inl.h"
#include "row_kernels.h"

namespace pjax {
namespace {

struct Vector : Avx512Vector {
  static constexpr int kByteOffset = 0;

  // The multiplication of bytes takes one operand without sign and saturates its sums of pairs. Of |w| <= 128 and
  // |x| <= 127 these are at most 32512, and of nibbles 3810, so that even eight of them add up in 16 bits.
  template <typename Load>
  static Ints DotBytes(const Load& load, const int8_t* x, Ints start) {
#pragma GCC unroll 8
    for (int v = 0; v < 8; ++v) {
      const __m512i w = load(v), input = _mm512_loadu_si512(x + 64 * v);
      const __m512i signed_input =
          _mm512_mask_sub_epi8(input, _mm512_movepi8_mask(w), _mm512_setzero_si512(), input);
      start = _mm512_add_epi32(start, AddPairs(_mm512_maddubs_epi16(_mm512_abs_epi8(w), signed_input)));
    }
    return start;
  }
  template <typename Load>
  static Ints DotNibbles(const Load& load, const int8_t* x, Ints start) {
    const __m512i low_bits = _mm512_set1_epi8(15);
    __m512i low = _mm512_setzero_si512(), high = low;
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const __m512i w = load(j), shifted = _mm512_srli_epi16(w, 4);
      low = _mm512_add_epi16(
          low, _mm512_maddubs_epi16(_mm512_and_si512(w, low_bits), _mm512_loadu_si512(x + 128 * j)));
      high = _mm512_add_epi16(
          high, _mm512_maddubs_epi16(_mm512_and_si512(shifted, low_bits), _mm512_loadu_si512(x + 128 * j + 64)));
    }
    return _mm512_add_epi32(start, _mm512_add_epi32(AddPairs(low), AddPairs(high)));
  }

 private:
  static __m512i AddPairs(__m512i sums) { return _mm512_madd_epi16(sums, _mm512_set1_epi16(1)); }
};

}  // namespace
}  // namespace pjax

#include "row_kernels_inl.h"

namespace pjax {

const RowKernels& Avx512Kernels(WeightType type) { return KernelsOf(type); }

}  // namespace pjax
