// Sign kernels for x86 with AVX-512 and VPOPCNTDQ: 512 signs an instruction.
#include <immintrin.h>
#include <stdint.h>

#include "sign_scores.h"

namespace pjax {
namespace {

constexpr int64_t kVectorWords = 16;

// The streamer stops at a page of 4 KB; a request in the next one starts it there early.
constexpr int64_t kAheadBytes = 4096;

void PackSigns(const float* x, int64_t columns, uint32_t* words) {
  for (int64_t c = 0; c < columns; c += kSignsPerWord) {
    uint32_t halves[2];
    for (int half = 0; half < 2; ++half) {
      const int64_t left = columns - c - 16 * half;
      const __mmask16 mask = left >= 16 ? 0xffff : left > 0 ? static_cast<__mmask16>((1u << left) - 1) : 0;
      halves[half] = _mm512_movepi32_mask(_mm512_castps_si512(_mm512_maskz_loadu_ps(mask, x + c + 16 * half)));
    }
    *words++ = halves[0] | halves[1] << 16;
  }
}

void CountDiffering(const uint32_t* rows, int64_t num_rows, int64_t words, const uint32_t* x, int32_t* differing) {
  const int64_t whole = words / kVectorWords * kVectorWords;
  const __mmask16 rest = static_cast<__mmask16>((1u << (words - whole)) - 1);
  for (int64_t r = 0; r < num_rows; ++r, rows += words) {
    __m512i counts = _mm512_setzero_si512();
    for (int64_t w = 0; w < whole; w += kVectorWords) {
      _mm_prefetch(reinterpret_cast<const char*>(rows + w) + kAheadBytes, _MM_HINT_T0);
      const __m512i changed = _mm512_xor_si512(_mm512_loadu_si512(rows + w), _mm512_loadu_si512(x + w));
      counts = _mm512_add_epi64(counts, _mm512_popcnt_epi64(changed));
    }
    if (rest != 0) {
      const __m512i row = _mm512_maskz_loadu_epi32(rest, rows + whole);
      const __m512i changed = _mm512_xor_si512(row, _mm512_maskz_loadu_epi32(rest, x + whole));
      counts = _mm512_add_epi64(counts, _mm512_popcnt_epi64(changed));
    }
    differing[r] = static_cast<int32_t>(_mm512_reduce_add_epi64(counts));
  }
}

constexpr SignKernels kSignKernels = {PackSigns, CountDiffering};

}  // namespace

const SignKernels& Avx512SignKernels() { return kSignKernels; }

}  // namespace pjax
