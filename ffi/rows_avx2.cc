// Row kernels for x86 with AVX2, FMA and F16C.
#include <immintrin.h>
#include <string.h>

#include "avx2_floats_inl.h"
#include "row_kernels.h"

namespace pjax {
namespace {

struct Vector : Avx2Floats {
  using Ints = __m256i;
  static constexpr int kAccumulators = 8;
  static constexpr int kFloatTokens = 1, kBlockTokens = 4, kPanelTokens = 3;
  static constexpr bool kJoinsRows = false;
  static constexpr int kByteOffset = 0;

  static float Sum(Floats value) {
    const __m128 quad = _mm_add_ps(_mm256_castps256_ps128(value), _mm256_extractf128_ps(value, 1));
    const __m128 pair = _mm_add_ps(quad, _mm_movehl_ps(quad, quad));
    return _mm_cvtss_f32(_mm_add_ss(pair, _mm_shuffle_ps(pair, pair, 1)));
  }

  static Floats LoadEven(const uint16_t* pairs) { return EvenOf(LoadInts(pairs)); }
  static Floats LoadOdd(const uint16_t* pairs) { return OddOf(LoadInts(pairs)); }
  static Floats LoadHalfs(const void* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(from)));
  }
  static Floats LoadSomeHalfs(const void* from, int count) {
    uint16_t halfs[kLanes] = {};
    memcpy(halfs, from, (count < kLanes ? count : kLanes) * sizeof(halfs[0]));
    return LoadHalfs(halfs);
  }
  static Floats LoadBytes(const void* from) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(from))));
  }

  static Ints LoadInts(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
  static Ints LoadSomeInts(const void* from, int count) {
    const __m256i mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    return _mm256_maskload_epi32(static_cast<const int*>(from), mask);
  }
  static void StoreInts(void* to, Ints value) { _mm256_storeu_si256(static_cast<__m256i*>(to), value); }
  static Floats ToFloats(Ints value) { return _mm256_cvtepi32_ps(value); }
  static Ints ZeroInts() { return _mm256_setzero_si256(); }

  static Floats RepeatFourTimes(const float* from) {
    return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_set1_ps(from[0])), _mm_set1_ps(from[1]), 1);
  }
  // Eight less than the nibble, as a number of four bits with sign, is the nibble with its top bit flipped.
  static Floats LoadNibbles(const char* words, int i) {
    const __m256i flipped = _mm256_xor_si256(LoadInts(words), _mm256_set1_epi32(static_cast<int>(0x88888888u)));
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(flipped, 28 - 4 * i), 28));
  }
  static int32_t MagnitudeBits(const float* block) {
    __m256i largest = _mm256_setzero_si256();
    for (int i = 0; i < 32; i += kLanes) {
      largest = _mm256_max_epi32(largest, _mm256_and_si256(LoadInts(block + i), _mm256_set1_epi32(0x7fffffff)));
    }
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
    four = _mm_max_epi32(four, _mm_unpackhi_epi64(four, four));
    return _mm_cvtsi128_si32(_mm_max_epi32(four, _mm_shuffle_epi32(four, 1)));
  }
  static void RoundBlock(const float* block, float factor, int8_t* codes) {
    const auto round = [&](int i) {
      return _mm256_cvtps_epi32(_mm256_mul_ps(Load(block + i * kLanes), Broadcast(factor)));
    };
    // Packing works on halves of registers, which leaves runs of four bytes in the order 0 2 4 6 1 3 5 7.
    const __m256i first = _mm256_packs_epi32(round(0), round(1)), second = _mm256_packs_epi32(round(2), round(3));
    const __m256i bytes = _mm256_packs_epi16(first, second);
    StoreInts(codes, _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
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

  // The multiplication of bytes takes one operand without sign and saturates its sums of pairs. Of |w| <= 128 and
  // |x| <= 127 these are at most 32512, and of nibbles 3810, so that even eight of them add up in 16 bits.
  template <int num_tokens, typename Load>
  static void DotBytes(const Load& load, const int8_t* x, int64_t stride, Ints* sums) {
#pragma GCC unroll 8
    for (int v = 0; v < 8; ++v) {
      const __m256i w = load(v), size = _mm256_abs_epi8(w);
#pragma GCC unroll 4
      for (int t = 0; t < num_tokens; ++t) {
        const __m256i signed_input = _mm256_sign_epi8(LoadInts(x + t * stride + 64 * v), w);
        sums[t] = _mm256_add_epi32(sums[t], AddPairs(_mm256_maddubs_epi16(size, signed_input)));
      }
    }
  }
  template <int num_tokens, typename Load>
  static void DotNibbles(const Load& load, const int8_t* x, int64_t stride, Ints* sums) {
    const __m256i low_bits = _mm256_set1_epi8(15);
    __m256i pairs[num_tokens];
    for (__m256i& pair : pairs) pair = _mm256_setzero_si256();
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const __m256i w = load(j), low = _mm256_and_si256(w, low_bits);
      const __m256i high = _mm256_and_si256(_mm256_srli_epi16(w, 4), low_bits);
#pragma GCC unroll 4
      for (int t = 0; t < num_tokens; ++t) {
        const int8_t* token = x + t * stride + 128 * j;
        pairs[t] = _mm256_add_epi16(pairs[t], _mm256_maddubs_epi16(low, LoadInts(token)));
        pairs[t] = _mm256_add_epi16(pairs[t], _mm256_maddubs_epi16(high, LoadInts(token + 64)));
      }
    }
    for (int t = 0; t < num_tokens; ++t) sums[t] = _mm256_add_epi32(sums[t], AddPairs(pairs[t]));
  }

 private:
  static __m256i AddPairs(__m256i sums) { return _mm256_madd_epi16(sums, _mm256_set1_epi16(1)); }
};

}  // namespace
}  // namespace pjax

#include "row_kernels_inl.h"

namespace pjax {

const RowKernels& Avx2Kernels(WeightType type) { return KernelsOf(type); }

}  // namespace pjax
