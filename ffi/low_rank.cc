#include "low_rank.h"

#include "matvec.h"
#include "scratch.h"

namespace pjax {

void LowRankMask(const LowRankArgs& args, ThreadPool& pool) {
  const int64_t rank = args.first.count, neurons = args.second.count, batch = args.batch;
  Scratch scratch(Scratch::BytesFor<float>(batch * rank) + Scratch::BytesFor<float>(batch * neurons));
  float* hidden = scratch.Take<float>(batch * rank);
  float* scores = scratch.Take<float>(batch * neurons);
  Matvec({args.first.data, args.first.stride, nullptr, args.x, batch, rank, args.columns, hidden}, *args.first.kernels,
         pool);
  for (int64_t i = 0; i < batch * rank; ++i) hidden[i] = hidden[i] < 0.0f ? 0.0f : hidden[i];  // a NaN stays
  Matvec({args.second.data, args.second.stride, args.bias, hidden, batch, neurons, rank, scores}, *args.second.kernels,
         pool);
  for (int64_t i = 0; i < batch * neurons; ++i) args.mask[i] = scores[i] > args.threshold;
}

}  // namespace pjax
