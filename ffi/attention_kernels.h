// The inner loops of attention: one key head's tokens and the query heads that share it, for one instruction set and
// cache type.
//
// Included by files that are compiled for a particular instruction set; see row_kernels.h for why it holds no functions.
#ifndef PJAX_FFI_ATTENTION_KERNELS_H_
#define PJAX_FFI_ATTENTION_KERNELS_H_

#include <stdint.h>

#include "row_kernels.h"

namespace pjax {

// Scores of one query head are padded to whole vectors of this many.
constexpr int64_t kScoreBlock = 16;

// Rows in lane order are padded with zeros to whole blocks of this many, enough for every instruction set.
constexpr int64_t kRowBlock = 32;

// Tokens [begin, end) of one key head. Queries and sums are in lane order, rows of `padded` entries with zeros behind
// head_dim.
struct AttentionRange {
  const void* k;        // row of token 0, rows of head_dim
  const void* v;
  int64_t begin, end;
  int64_t head_dim, padded, group;
  const float* q;       // [group, padded], scaled
  float scale;          // of scores; q has it already
  const float* slopes;  // [group], not scaled, or nullptr
  int64_t position;     // of the queries
  const void* next;     // what this thread reads afterwards, to be requested in time (any address)
  float* scores;        // working memory [group, score_stride]; score_stride >= end - begin, in whole kScoreBlocks
  int64_t score_stride;
  float* sums;          // out [group, padded]: sum of exp(score - maximum) * v
  float* maxima;        // out [group]
  float* totals;        // out [group]: sum of exp(score - maximum)
};

struct AttentionKernels {
  void (*attend)(const AttentionRange& range);
  // out = scale * in, `size` entries in memory order to lane order, zeros behind them up to `padded`.
  void (*to_lanes)(const float* in, float scale, int64_t size, int64_t padded, float* out);
  // out = scale * in, lane order to `size` entries in memory order.
  void (*from_lanes)(const float* in, float scale, int64_t size, float* out);
};

const AttentionKernels& PortableAttentionKernels(WeightType type);
const AttentionKernels& Avx2AttentionKernels(WeightType type);
const AttentionKernels& Avx512AttentionKernels(WeightType type);

}  // namespace pjax

#endif  // PJAX_FFI_ATTENTION_KERNELS_H_
