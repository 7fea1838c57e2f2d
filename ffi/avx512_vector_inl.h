// What the two levels of AVX-512 share. Included once by each of their files; see row_kernels_inl.h.
#include <immintrin.h>
#include <stdint.h>

#include "avx512_floats_inl.h"

namespace pjax {
namespace {

struct Avx512Vector : Avx512Floats {
  using Ints = __m512i;
  static constexpr int kAccumulators = 8;
  static constexpr int kFloatTokens = 2, kBlockTokens = 8, kPanelTokens = 12;

  static float Sum(Floats value) { return _mm512_reduce_add_ps(value); }

  static Floats LoadEven(const uint16_t* pairs) { return EvenOf(LoadInts(pairs)); }
  static Floats LoadOdd(const uint16_t* pairs) { return OddOf(LoadInts(pairs)); }
  static Floats LoadHalfs(const void* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(from)));
  }
  static Floats LoadSomeHalfs(const void* from, int count) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(FirstLanes(count), from));
  }
  static Floats LoadBytes(const void* from) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(from))));
  }

  static Ints LoadInts(const void* from) { return _mm512_loadu_si512(from); }
  static Ints LoadSomeInts(const void* from, int count) { return _mm512_maskz_loadu_epi32(FirstLanes(count), from); }
  // A load whose lanes outside the mask are neither read nor changed: it may begin before the first number.
  static constexpr bool kJoinsRows = true;
  using Halfs = __m256i;
  static Halfs ZeroHalfs() { return _mm256_setzero_si256(); }
  static Halfs JoinHalfs(Halfs into, const char* from, int first, int count) {
    return _mm256_mask_loadu_epi16(into, static_cast<__mmask16>(FirstLanes(count) << first), from - 2 * first);
  }
  static Ints JoinInts(Ints into, const char* from, int first, int count) {
    return _mm512_mask_loadu_epi32(into, static_cast<__mmask16>(FirstLanes(count) << first), from - 4 * first);
  }
  // Each sum of `lanes` adjacent ones, of which the first `count` are stored.
  template <int lanes>
  static void StoreSums(Floats value, int count, float* to) {
    if constexpr (lanes >= 8) value = _mm512_add_ps(value, _mm512_shuffle_f32x4(value, value, 0xb1));
    if constexpr (lanes >= 4) value = _mm512_add_ps(value, _mm512_permute_ps(value, 0x4e));
    if constexpr (lanes >= 2) value = _mm512_add_ps(value, _mm512_permute_ps(value, 0xb1));
    constexpr __mmask16 kFirstLanes = lanes == 8 ? 0x0101 : lanes == 4 ? 0x1111 : lanes == 2 ? 0x5555 : 0xffff;
    _mm512_mask_storeu_ps(to, FirstLanes(count), _mm512_maskz_compress_ps(kFirstLanes, value));
  }
  static Floats ToFloats(Halfs value) { return _mm512_cvtph_ps(value); }

  static void StoreInts(void* to, Ints value) { _mm512_storeu_si512(to, value); }
  static Floats ToFloats(Ints value) { return _mm512_cvtepi32_ps(value); }
  static Ints ZeroInts() { return _mm512_setzero_si512(); }

  static Floats RepeatFourTimes(const float* from) {
    const __m512i source = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    return _mm512_permutexvar_ps(source, _mm512_castps128_ps512(_mm_loadu_ps(from)));
  }
  // A table look-up uses the low four bits of each lane only: what is above them need not be cleared, and a load that
  // starts at the byte of the nibble replaces a shift, which is dearer.
  static Floats LoadNibbles(const char* words, int i) {
    const __m512 values = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    const __m512i bytes = LoadInts(words + i / 2);
    return _mm512_permutexvar_ps(i % 2 == 0 ? bytes : _mm512_srli_epi32(bytes, 4), values);
  }
  static int32_t MagnitudeBits(const float* block) {
    const __m512i both = _mm512_max_epi32(_mm512_and_si512(LoadInts(block), _mm512_set1_epi32(0x7fffffff)),
                                          _mm512_and_si512(LoadInts(block + 16), _mm512_set1_epi32(0x7fffffff)));
    return _mm512_reduce_max_epi32(both);
  }
  static void RoundBlock(const float* block, float factor, int8_t* codes) {
    for (int i = 0; i < 32; i += kLanes) {
      const __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(Load(block + i), Broadcast(factor)));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + i), _mm512_cvtepi32_epi8(rounded));
    }
  }
  static void Transpose4(const float* from, int64_t stride, float* to, int64_t to_stride) {
    __m128 a = _mm_loadu_ps(from), b = _mm_loadu_ps(from + stride), c = _mm_loadu_ps(from + 2 * stride),
           d = _mm_loadu_ps(from + 3 * stride);
    _MM_TRANSPOSE4_PS(a, b, c, d);
    _mm_storeu_ps(to, a);
    _mm_storeu_ps(to + to_stride, b);
    _mm_storeu_ps(to + 2 * to_stride, c);
    _mm_storeu_ps(to + 3 * to_stride, d);
  }

 private:
  static __mmask16 FirstLanes(int count) {
    return static_cast<__mmask16>(count >= kLanes ? 0xffff : (1 << count) - 1);
  }
};

}  // namespace
}  // namespace pjax
