// The FFN of a few tokens, reading only the rows of neurons that are open.
#ifndef PJAX_FFI_SPARSE_FFN_H_
#define PJAX_FFI_SPARSE_FFN_H_

#include <stdint.h>

#include "activation.h"
#include "row_kernels.h"
#include "thread_pool.h"

namespace pjax {

struct FfnArgs {
  const void* gate;         // the first of `neurons` rows of `model` weights; nullptr: ungated
  const void* up;
  const void* down;
  int64_t row_stride;       // bytes from one row to the next, in all three: the three rows of a neuron may lie together
  const float* gate_bias;   // [neurons] or nullptr
  const float* up_bias;     // [neurons] or nullptr
  const float* x;           // [batch, model]
  const uint8_t* mask;      // [batch, neurons], 0 or 1; nullptr: all neurons
  int64_t batch, neurons, model;
  Activation activation;
  bool every_neuron;        // read all rows even where the gate is closed: a dense layer
  float* y;                 // [batch, model]
  int32_t* predicted;       // [batch], neurons in the mask
  int32_t* computed;        // [batch], neurons whose down row was read
  int32_t* active;          // [batch], neurons whose value was not zero
};

// y[t] = sum over open neurons i of f(gate_i . x) * (up_i . x) * down_i, or of f(up_i . x) * down_i if ungated;
// f is the activation: its curve above its threshold, else zero.
// The result depends on the arguments and kernels alone, never on the number of threads.
void SparseFfn(const FfnArgs& args, const RowKernels& kernels, ThreadPool& pool);

}  // namespace pjax

#endif  // PJAX_FFI_SPARSE_FFN_H_
