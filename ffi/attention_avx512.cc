// Attention kernels for x86 with AVX-512 (F, BW, VL, DQ).
#include <immintrin.h>

#include "attention_kernels.h"
#include "avx512_floats_inl.h"

namespace pjax {
namespace {

struct Vector : Avx512Floats {
  static constexpr int kSums = 16;

  static Floats Subtract(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
  static Floats Max(Floats a, Floats b) { return _mm512_max_ps(a, b); }

  // Sums within quads of lanes first, then across the four quads: 15 additions for 16 sums.
  static Floats SumEach(const Floats* of) {
    Floats quads[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m512d ab = _mm512_castps_pd(AddHalves(of[4 * i], of[4 * i + 1]));
      const __m512d cd = _mm512_castps_pd(AddHalves(of[4 * i + 2], of[4 * i + 3]));
      quads[i] = Add(_mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
    }
    const Floats low = Add(_mm512_shuffle_f32x4(quads[0], quads[1], 0x44), _mm512_shuffle_f32x4(quads[0], quads[1], 0xee));
    const Floats high = Add(_mm512_shuffle_f32x4(quads[2], quads[3], 0x44), _mm512_shuffle_f32x4(quads[2], quads[3], 0xee));
    return Add(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
  }

  static Floats PowerOfTwo(Floats shifted) {
    const __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(shifted), 23);
    return _mm512_castsi512_ps(_mm512_add_epi32(exponent, _mm512_set1_epi32(0x3f800000)));
  }
  static Floats ZeroBelow(Floats value, Floats x, Floats limit) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, _CMP_NLT_UQ), value);
  }

  static void Deinterleave(Floats* pair) {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const Floats evens = _mm512_permutex2var_ps(pair[0], even, pair[1]);
    pair[1] = _mm512_permutex2var_ps(pair[0], _mm512_add_epi32(even, _mm512_set1_epi32(1)), pair[1]);
    pair[0] = evens;
  }
  static void Interleave(Floats* pair) {
    const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const Floats low = _mm512_permutex2var_ps(pair[0], first, pair[1]);
    pair[1] = _mm512_permutex2var_ps(pair[0], _mm512_add_epi32(first, _mm512_set1_epi32(8)), pair[1]);
    pair[0] = low;
  }

  static void LoadPair(const float* from, Floats* pair) {
    pair[0] = Load(from);
    pair[1] = Load(from + kLanes);
  }
  static void LoadPart(const float* from, int64_t count, Floats* pair) {
    const uint32_t mask = (uint32_t{1} << count) - 1;
    pair[0] = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), from);
    pair[1] = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> kLanes), from + kLanes);
  }
  static void LoadPair(const uint16_t* from, Floats* pair) { Widen(_mm512_loadu_si512(from), pair); }
  static void LoadPart(const uint16_t* from, int64_t count, Floats* pair) {
    Widen(_mm512_maskz_loadu_epi16((uint32_t{1} << count) - 1, from), pair);
  }

 private:
  static Floats AddHalves(Floats a, Floats b) { return Add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)); }
  static void Widen(__m512i dwords, Floats* pair) {
    pair[0] = EvenOf(dwords);
    pair[1] = OddOf(dwords);
  }
};

}  // namespace
}  // namespace pjax

#include "attention_kernels_inl.h"

namespace pjax {

const AttentionKernels& Avx512AttentionKernels(WeightType type) { return AttentionKernelsOf(type); }

}  // namespace pjax
