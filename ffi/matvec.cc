#include "matvec.h"

#include <string.h>

#include "chunks.h"
#include "scratch.h"

namespace pjax {
namespace {

// Smaller pieces restart the memory stream too often.
constexpr int64_t kMinChunkBytes = 32 * 1024;

// Bytes read below which a call stays on its thread: about 10 us of work, less than waking a worker takes.
constexpr int64_t kInlineBytes = 256 * 1024;

// Rows are read one after the other; the request runs this far ahead. The streamer stops at a page of 4 KB, and a
// request in the next one starts it there early (+20 to +35 % of the stream; 2 to 8 KB are equal within 2 %).
constexpr int64_t kAheadBytes = 4096;

struct MatvecWork {
  const MatvecArgs& args;
  const RowKernels& kernels;
  const char* x;  // [batch, prepared_bytes]
  int64_t prepared_bytes;
  Chunks chunks;
};

void MatvecChunks(void* data) {
  MatvecWork& work = *static_cast<MatvecWork*>(data);
  const MatvecArgs& args = work.args;
  const int64_t row_bytes = work.kernels.row_bytes(args.columns);
  for (Chunk chunk = work.chunks.Next(); chunk.begin < chunk.end; chunk = work.chunks.Next()) {
    for (int64_t r = chunk.begin; r < chunk.end; ++r) {
      const char* row = static_cast<const char*>(args.weight) + r * row_bytes;
      const float bias = args.bias != nullptr ? args.bias[r] : 0.0f;
      for (int64_t token = 0; token < args.batch; ++token) {
        const char* next = token == 0 ? row + kAheadBytes : row;  // later tokens find the row in the cache
        args.y[token * args.rows + r] =
            work.kernels.dot(row, work.x + token * work.prepared_bytes, args.columns, next) + bias;
      }
    }
  }
}

struct StreamWork {
  const uint32_t* words;
  const RowKernels& kernels;
  Chunks chunks;
  std::atomic<uint32_t> total{0};
};

void StreamChunks(void* data) {
  StreamWork& work = *static_cast<StreamWork*>(data);
  uint32_t total = 0;
  for (Chunk chunk = work.chunks.Next(); chunk.begin < chunk.end; chunk = work.chunks.Next()) {
    total += work.kernels.sum_words(work.words + chunk.begin, chunk.end - chunk.begin);
  }
  work.total.fetch_add(total, std::memory_order_relaxed);
}

}  // namespace

void Matvec(const MatvecArgs& args, const RowKernels& kernels, ThreadPool& pool) {
  const int64_t prepared_bytes = kernels.prepared_bytes(args.columns), row_bytes = kernels.row_bytes(args.columns);
  Scratch scratch(Scratch::BytesFor<char>(args.batch * prepared_bytes));
  char* x = scratch.Take<char>(args.batch * prepared_bytes);
  for (int64_t token = 0; token < args.batch; ++token) {
    kernels.prepare(args.x + token * args.columns, args.columns, x + token * prepared_bytes);
  }
  const int64_t min_rows = kMinChunkBytes / std::max<int64_t>(1, row_bytes);
  MatvecWork work{args, kernels, x, prepared_bytes, Chunks(args.rows, min_rows, pool.num_threads())};
  pool.Run(args.rows * row_bytes > kInlineBytes, MatvecChunks, &work);
}

uint32_t StreamSum(const void* data, int64_t bytes, const RowKernels& kernels, ThreadPool& pool) {
  constexpr int64_t kWordBytes = sizeof(uint32_t);
  const int64_t num_words = bytes / kWordBytes;
  StreamWork work{static_cast<const uint32_t*>(data), kernels,
                  Chunks(num_words, kMinChunkBytes / kWordBytes, pool.num_threads())};
  pool.Run(bytes > kInlineBytes, StreamChunks, &work);
  uint32_t last = 0;
  if (const int64_t rest = bytes % kWordBytes; rest > 0) {
    memcpy(&last, static_cast<const char*>(data) + num_words * kWordBytes, rest);
  }
  return work.total.load() + last;
}

}  // namespace pjax
