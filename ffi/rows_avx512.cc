// Row kernels for x86 with AVX-512 (F, BW, VL, DQ).
#include "avx512_vector_inl.h"
#include "row_kernels.h"

namespace pjax {
namespace {

struct Vector : Avx512Vector {
  static constexpr int kByteOffset = 0;

  // The multiplication of bytes takes one operand without sign and saturates its sums of pairs. Of |w| <= 128 and
  // |x| <= 127 these are at most 32512, and of nibbles 3810, so that even eight of them add up in 16 bits.
  template <int num_tokens, typename Load>
  static void DotBytes(const Load& load, const int8_t* x, int64_t stride, Ints* sums) {
#pragma GCC unroll 8
    for (int v = 0; v < 8; ++v) {
      const __m512i w = load(v), size = _mm512_abs_epi8(w);
      const __mmask64 negative = _mm512_movepi8_mask(w);
#pragma GCC unroll 8
      for (int t = 0; t < num_tokens; ++t) {
        const __m512i input = _mm512_loadu_si512(x + t * stride + 64 * v);
        const __m512i signed_input = _mm512_mask_sub_epi8(input, negative, _mm512_setzero_si512(), input);
        sums[t] = _mm512_add_epi32(sums[t], AddPairs(_mm512_maddubs_epi16(size, signed_input)));
      }
    }
  }
  template <int num_tokens, typename Load>
  static void DotNibbles(const Load& load, const int8_t* x, int64_t stride, Ints* sums) {
    const __m512i low_bits = _mm512_set1_epi8(15);
    __m512i pairs[num_tokens];
#pragma GCC unroll 8
    for (__m512i& pair : pairs) pair = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const __m512i w = load(j), low = _mm512_and_si512(w, low_bits);
      const __m512i high = _mm512_and_si512(_mm512_srli_epi16(w, 4), low_bits);
#pragma GCC unroll 8
      for (int t = 0; t < num_tokens; ++t) {
        const int8_t* token = x + t * stride + 128 * j;
        pairs[t] = _mm512_add_epi16(pairs[t], _mm512_maddubs_epi16(low, _mm512_loadu_si512(token)));
        pairs[t] = _mm512_add_epi16(pairs[t], _mm512_maddubs_epi16(high, _mm512_loadu_si512(token + 64)));
      }
    }
#pragma GCC unroll 8
    for (int t = 0; t < num_tokens; ++t) sums[t] = _mm512_add_epi32(sums[t], AddPairs(pairs[t]));
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
