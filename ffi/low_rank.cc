#include "low_rank.h"

#include <algorithm>

#include "chunks.h"
#include "matvec.h"
#include "scratch.h"

namespace pjax {
namespace {

// Neurons whose scores are made before they are compared: they stay in the first-level cache.
constexpr int64_t kPieceNeurons = 256;

struct MaskWork {
  const LowRankArgs& args;
  const char* hidden;  // [batch, prepared_bytes]
  int64_t prepared_bytes;
  Chunks chunks;
};

void MarkNeurons(void* data) {
  MaskWork& work = *static_cast<MaskWork*>(data);
  const LowRankArgs& args = work.args;
  const int64_t rank = args.first.count, neurons = args.second.count, stride = args.second.stride;
  const auto* rows = static_cast<const char*>(args.second.data);
  float scores[kPieceNeurons];
  for (Chunk chunk = work.chunks.Next(); chunk.begin < chunk.end; chunk = work.chunks.Next()) {
    for (int64_t first = chunk.begin; first < chunk.end; first += kPieceNeurons) {
      const int64_t count = std::min(kPieceNeurons, chunk.end - first);
      for (int64_t token = 0; token < args.batch; ++token) {
        const char* hidden = work.hidden + token * work.prepared_bytes;
        args.second.kernels->dot_rows(rows + first * stride, stride, count, hidden, rank, scores);
        bool* mask = args.mask + token * neurons + first;
        for (int64_t i = 0; i < count; ++i) mask[i] = scores[i] + args.bias[first + i] > args.threshold;
      }
    }
  }
}

}  // namespace

void LowRankMask(const LowRankArgs& args, ThreadPool& pool) {
  const RowKernels& kernels = *args.second.kernels;
  const int64_t rank = args.first.count, neurons = args.second.count, batch = args.batch;
  const int64_t prepared_bytes = kernels.prepared_bytes(rank), row_bytes = kernels.row_bytes(rank);
  Scratch scratch(Scratch::BytesFor<float>(batch * rank) + Scratch::BytesFor<char>(batch * prepared_bytes));
  float* hidden = scratch.Take<float>(batch * rank);
  char* prepared = scratch.Take<char>(batch * prepared_bytes);
  Matvec({args.first.data, args.first.stride, nullptr, args.x, batch, rank, args.columns, hidden}, *args.first.kernels,
         pool);
  for (int64_t i = 0; i < batch * rank; ++i) hidden[i] = hidden[i] < 0.0f ? 0.0f : hidden[i];  // a NaN stays
  for (int64_t i = 0; i < batch; ++i) kernels.prepare(hidden + i * rank, rank, prepared + i * prepared_bytes);
  MaskWork work{args, prepared, prepared_bytes,
                Chunks(neurons, kMinChunkBytes / std::max<int64_t>(1, row_bytes), pool.num_threads())};
  pool.Run(neurons * row_bytes > kMatvecInlineBytes, MarkNeurons, &work);
}

}  // namespace pjax
