// Guesses which rows have a large product with x from signs alone: a row's signs against those of x.
#ifndef PJAX_FFI_SIGN_SCORES_H_
#define PJAX_FFI_SIGN_SCORES_H_

#include <stdint.h>

#include "cpu_features.h"
#include "thread_pool.h"

namespace pjax {

// Bits in a word of signs; column c is bit c % 32 of word c / 32, set where the number is negative.
constexpr int64_t kSignsPerWord = 32;

constexpr int64_t SignWords(int64_t columns) { return (columns + kSignsPerWord - 1) / kSignsPerWord; }

// The inner loops, for one instruction set.
struct SignKernels {
  // words[w] = the signs of x[32 w] to x[32 w + 31]; bits behind `columns` are zero.
  void (*pack)(const float* x, int64_t columns, uint32_t* words);
  // differing[r] = number of bits in which row r, of `words` words, and x differ.
  void (*count)(const uint32_t* rows, int64_t num_rows, int64_t words, const uint32_t* x, int32_t* differing);
};

const SignKernels& PortableSignKernels();
const SignKernels& Avx2SignKernels();    // and POPCNT
const SignKernels& Avx512SignKernels();  // and VPOPCNTDQ

// The fastest ones up to that level which this machine has.
const SignKernels& SignKernelsFor(CpuLevel level);

struct SignScoresArgs {
  const uint32_t* bits;  // [rows, SignWords(columns)]
  float slope;
  const float* bias;     // [rows]
  const float* x;        // [batch, columns]
  int64_t batch, rows, columns;
  float* y;              // [batch, rows]
};

// y[t, r] = slope * (agreeing - disagreeing signs of row r and x[t]) + bias[r].
void SignScores(const SignScoresArgs& args, const SignKernels& kernels, ThreadPool& pool);

}  // namespace pjax

#endif  // PJAX_FFI_SIGN_SCORES_H_
