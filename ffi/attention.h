// Attention of one new token per sequence over the KV cache, at the speed at which the cache comes out of memory.
#ifndef PJAX_FFI_ATTENTION_H_
#define PJAX_FFI_ATTENTION_H_

#include <stdint.h>

#include "attention_kernels.h"
#include "thread_pool.h"

namespace pjax {

// A key row of a sequence lies at [sequence, kv_head, position]. Caches are float32, or bfloat16 as its bits.
struct AttentionArgs {
  const float* q;            // [batch, heads, head_dim]
  const float* k;            // [batch, kv_heads, head_dim]
  const float* v;            // [batch, kv_heads, head_dim]
  void* k_cache;             // [batch, kv_heads, capacity, head_dim]
  void* v_cache;
  const int32_t* positions;  // [batch], of the new tokens
  const float* rotation;     // [batch, 2 * half]: cosines, then sines; of q and k, entry i turns with entry i + half
  const float* slopes;       // [heads] or nullptr: subtracted from a score, before scaling, per token of distance
  int64_t batch, heads, kv_heads, head_dim, capacity, half;
  int64_t window;            // keys that a query sees, itself included; 0 for all
  float* y;                  // [batch, heads * head_dim]
};

const AttentionKernels& AttentionKernelsFor(CpuLevel level, WeightType type);

// Rotates q and k, writes k and v to the caches at the positions (at the last row if they lie behind it), and attends
// to the rows up to them. A query that sees no row gets NaN. Of each sequence the bits are the same for every number
// of threads, every capacity and every batch.
void DecodeAttention(const AttentionArgs& args, WeightType type, const AttentionKernels& kernels, ThreadPool& pool);

}  // namespace pjax

#endif  // PJAX_FFI_ATTENTION_H_
