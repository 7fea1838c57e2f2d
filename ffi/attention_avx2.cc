// Attention kernels for x86 with AVX2 and FMA.
#include <immintrin.h>
#include <string.h>

#include "attention_kernels.h"
#include "avx2_floats_inl.h"

namespace pjax {
namespace {

struct Vector : Avx2Floats {
  static constexpr int kSums = 8;

  static Floats Subtract(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
  static Floats Max(Floats a, Floats b) { return _mm256_max_ps(a, b); }

  // Sums within quads of lanes first, then across the two quads: 7 additions for 8 sums.
  static Floats SumEach(const Floats* of) {
    Floats quads[2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const __m256d ab = _mm256_castps_pd(AddHalves(of[4 * i], of[4 * i + 1]));
      const __m256d cd = _mm256_castps_pd(AddHalves(of[4 * i + 2], of[4 * i + 3]));
      quads[i] = Add(_mm256_castpd_ps(_mm256_unpacklo_pd(ab, cd)), _mm256_castpd_ps(_mm256_unpackhi_pd(ab, cd)));
    }
    return Add(_mm256_permute2f128_ps(quads[0], quads[1], 0x20), _mm256_permute2f128_ps(quads[0], quads[1], 0x31));
  }

  static Floats PowerOfTwo(Floats shifted) {
    const __m256i exponent = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(exponent, _mm256_set1_epi32(0x3f800000)));
  }
  static Floats ZeroBelow(Floats value, Floats x, Floats limit) {
    return _mm256_and_ps(_mm256_cmp_ps(x, limit, _CMP_NLT_UQ), value);
  }

  static void Deinterleave(Floats* pair) {
    const __m256d even = _mm256_castps_pd(_mm256_shuffle_ps(pair[0], pair[1], 0x88));
    const __m256d odd = _mm256_castps_pd(_mm256_shuffle_ps(pair[0], pair[1], 0xdd));
    pair[0] = _mm256_castpd_ps(_mm256_permute4x64_pd(even, 0xd8));
    pair[1] = _mm256_castpd_ps(_mm256_permute4x64_pd(odd, 0xd8));
  }
  static void Interleave(Floats* pair) {
    const Floats low = _mm256_unpacklo_ps(pair[0], pair[1]), high = _mm256_unpackhi_ps(pair[0], pair[1]);
    pair[0] = _mm256_permute2f128_ps(low, high, 0x20);
    pair[1] = _mm256_permute2f128_ps(low, high, 0x31);
  }

  static void LoadPair(const float* from, Floats* pair) {
    pair[0] = Load(from);
    pair[1] = Load(from + kLanes);
  }
  static void LoadPair(const uint16_t* from, Floats* pair) {
    const __m256i dwords = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    pair[0] = EvenOf(dwords);
    pair[1] = OddOf(dwords);
  }
  template <typename Element>
  static void LoadPart(const Element* from, int64_t count, Floats* pair) {
    Element padded[2 * kLanes] = {};
    memcpy(padded, from, count * sizeof(Element));
    LoadPair(padded, pair);
  }

 private:
  static Floats AddHalves(Floats a, Floats b) { return Add(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b)); }
};

}  // namespace
}  // namespace pjax

#include "attention_kernels_inl.h"

namespace pjax {

const AttentionKernels& Avx2AttentionKernels(WeightType type) { return AttentionKernelsOf(type); }

}  // namespace pjax
