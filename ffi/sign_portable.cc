// Sign kernels for any CPU.
#include <stdint.h>
#include <string.h>

namespace pjax {
namespace {

// Sums of neighbouring bits, then of pairs, then of nibbles; the product adds the bytes.
inline int64_t Ones(uint64_t word) {
  word -= word >> 1 & 0x5555555555555555u;
  word = (word & 0x3333333333333333u) + (word >> 2 & 0x3333333333333333u);
  word = (word + (word >> 4)) & 0x0f0f0f0f0f0f0f0fu;
  return static_cast<int64_t>(word * 0x0101010101010101u >> 56);
}

inline uint32_t PackWord(const float* x) {
  uint32_t packed = 0;
  for (int i = 0; i < 32; ++i) {
    uint32_t bits;
    memcpy(&bits, x + i, sizeof(bits));
    packed |= bits >> 31 << i;
  }
  return packed;
}

}  // namespace
}  // namespace pjax

#include "sign_kernels_inl.h"

namespace pjax {
const SignKernels& PortableSignKernels() { return kSignKernels; }
}  // namespace pjax
