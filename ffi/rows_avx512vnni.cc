// Row kernels for x86 with AVX-512 (F, BW, VL, DQ) and its dot products of bytes (VNNI).
#include "avx512_vector_inl.h"
#include "row_kernels.h"

namespace pjax {
namespace {

struct Vector : Avx512Vector {
  // The dot product takes weights without sign, so that the codes of q8_0 are made w + 128 by flipping their sign bit.
  static constexpr int kByteOffset = 128;

  template <typename Load>
  static Ints DotBytes(const Load& load, const int8_t* x, Ints start) {
    const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
    __m512i odd = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int v = 0; v < 8; v += 2) {
      start = _mm512_dpbusd_epi32(start, _mm512_xor_si512(load(v), sign), _mm512_loadu_si512(x + 64 * v));
      odd = _mm512_dpbusd_epi32(odd, _mm512_xor_si512(load(v + 1), sign), _mm512_loadu_si512(x + 64 * v + 64));
    }
    return _mm512_add_epi32(start, odd);
  }
  // The high nibbles stay where they are, which makes their sum 16 times too large, exactly.
  template <typename Load>
  static Ints DotNibbles(const Load& load, const int8_t* x, Ints start) {
    const __m512i low_bits = _mm512_set1_epi8(15), high_bits = _mm512_set1_epi8(static_cast<char>(0xf0));
    __m512i high = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const __m512i w = load(j);
      start = _mm512_dpbusd_epi32(start, _mm512_and_si512(w, low_bits), _mm512_loadu_si512(x + 128 * j));
      high = _mm512_dpbusd_epi32(high, _mm512_and_si512(w, high_bits), _mm512_loadu_si512(x + 128 * j + 64));
    }
    return _mm512_add_epi32(start, _mm512_srai_epi32(high, 4));
  }
};

}  // namespace
}  // namespace pjax

#include "row_kernels_inl.h"

namespace pjax {

const RowKernels& Avx512VnniKernels(WeightType type) { return KernelsOf(type); }

}  // namespace pjax
