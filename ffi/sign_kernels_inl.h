// The sign kernels over 64-bit words, written once over functions that each instruction set's file defines before
// including this:
//
//   Ones(word): how many bits of 64 are set.
//   PackWord(x): the signs of 32 floats.
//
// It deliberately has no include guard and lives in an anonymous namespace: each including file gets its own copy.
#include <string.h>

#include "sign_scores.h"

namespace pjax {
namespace {

void PackSigns(const float* x, int64_t columns, uint32_t* words) {
  int64_t c = 0;
  for (; c + kSignsPerWord <= columns; c += kSignsPerWord) *words++ = PackWord(x + c);
  if (c < columns) {
    float rest[kSignsPerWord] = {};
    memcpy(rest, x + c, (columns - c) * sizeof(float));
    *words = PackWord(rest);
  }
}

void CountDiffering(const uint32_t* rows, int64_t num_rows, int64_t words, const uint32_t* x, int32_t* differing) {
  for (int64_t r = 0; r < num_rows; ++r, rows += words) {
    int64_t count = 0, w = 0;
    for (; w + 2 <= words; w += 2) {
      uint64_t row_word, x_word;
      memcpy(&row_word, rows + w, sizeof(row_word));
      memcpy(&x_word, x + w, sizeof(x_word));
      count += Ones(row_word ^ x_word);
    }
    if (w < words) count += Ones(rows[w] ^ x[w]);
    differing[r] = static_cast<int32_t>(count);
  }
}

constexpr SignKernels kSignKernels = {PackSigns, CountDiffering};

}  // namespace
}  // namespace pjax
