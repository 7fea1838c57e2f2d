// Sign kernels for x86 with AVX2 and POPCNT, which counts 8 bytes a cycle: as fast as one core reads memory.
#include <immintrin.h>
#include <stdint.h>

namespace pjax {
namespace {

inline int64_t Ones(uint64_t word) { return static_cast<int64_t>(_mm_popcnt_u64(word)); }

inline uint32_t PackWord(const float* x) {
  uint32_t packed = 0;
  for (int i = 0; i < 4; ++i) {
    packed |= static_cast<uint32_t>(_mm256_movemask_ps(_mm256_loadu_ps(x + 8 * i))) << (8 * i);
  }
  return packed;
}

}  // namespace
}  // namespace pjax

#include "sign_kernels_inl.h"

namespace pjax {
const SignKernels& Avx2SignKernels() { return kSignKernels; }
}  // namespace pjax
