// Row kernels for x86 with AVX-512 (F, BW, VL, DQ) and its dot products of bytes (VNNI).
#include "avx512_vector_inl.h"
#include "row_kernels.h"

namespace pjax {
namespace {

struct Vector : Avx512Vector {
  // The dot product takes weights without sign, so that the codes of q8_0 are made w + 128 by flipping their sign bit.
  static constexpr int kByteOffset = 128;

  // Two chains of sums for each x: of one x alone, a single chain would wait for itself.
  template <int num_tokens, typename Load>
  static void DotBytes(const Load& load, const int8_t* x, int64_t stride, Ints* sums) {
    const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
    __m512i odd[num_tokens];
#pragma GCC unroll 8
    for (__m512i& sum : odd) sum = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int v = 0; v < 8; v += 2) {
      const __m512i first = _mm512_xor_si512(load(v), sign), second = _mm512_xor_si512(load(v + 1), sign);
#pragma GCC unroll 8
      for (int t = 0; t < num_tokens; ++t) {
        const int8_t* token = x + t * stride + 64 * v;
        sums[t] = _mm512_dpbusd_epi32(sums[t], first, _mm512_loadu_si512(token));
        odd[t] = _mm512_dpbusd_epi32(odd[t], second, _mm512_loadu_si512(token + 64));
      }
    }
#pragma GCC unroll 8
    for (int t = 0; t < num_tokens; ++t) sums[t] = _mm512_add_epi32(sums[t], odd[t]);
  }
  // The high nibbles stay where they are, which makes their sum 16 times too large, exactly.
  template <int num_tokens, typename Load>
  static void DotNibbles(const Load& load, const int8_t* x, int64_t stride, Ints* sums) {
    const __m512i low_bits = _mm512_set1_epi8(15), high_bits = _mm512_set1_epi8(static_cast<char>(0xf0));
    __m512i high[num_tokens];
#pragma GCC unroll 8
    for (__m512i& sum : high) sum = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const __m512i w = load(j), low_codes = _mm512_and_si512(w, low_bits), high_codes = _mm512_and_si512(w, high_bits);
#pragma GCC unroll 8
      for (int t = 0; t < num_tokens; ++t) {
        const int8_t* token = x + t * stride + 128 * j;
        sums[t] = _mm512_dpbusd_epi32(sums[t], low_codes, _mm512_loadu_si512(token));
        high[t] = _mm512_dpbusd_epi32(high[t], high_codes, _mm512_loadu_si512(token + 64));
      }
    }
#pragma GCC unroll 8
    for (int t = 0; t < num_tokens; ++t) sums[t] = _mm512_add_epi32(sums[t], _mm512_srai_epi32(high[t], 4));
  }
};

}  // namespace
}  // namespace pjax

#include "row_kernels_inl.h"

namespace pjax {

const RowKernels& Avx512VnniKernels(WeightType type) { return KernelsOf(type); }

}  // namespace pjax
