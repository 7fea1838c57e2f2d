#include "matvec.h"

#include <string.h>

#include "chunks.h"
#include "panel_product.h"
#include "scratch.h"

namespace pjax {
namespace {

// Smaller pieces restart the memory stream too often.
constexpr int64_t kMinChunkBytes = 32 * 1024;

// Bytes read below which a call stays on its thread: about 10 us of work, less than waking a worker takes.
constexpr int64_t kInlineBytes = 128 * 1024;

// Rows are read one after the other; the request runs this far ahead. The streamer stops at a page of 4 KB, and a
// request in the next one starts it there early (+20 to +35 % of the stream; 2 to 8 KB are equal within 2 %).
constexpr int64_t kAheadBytes = 4096;

// Tokens that rows pass by together: as many as a kernel takes at a time, fewer where their prepared x would not stay
// in the first-level cache (8 of 2048 columns in int8 take 20 KB, of float32 64 KB).
constexpr int64_t kMaxTileTokens = 8;
constexpr int64_t kTileBytes = 40 * 1024;

// Tokens of float weights from which panels are faster: before that, making them costs more than they save. Measured on
// 5632 x 2048: float32 is equal at 8, float16 at 10, bfloat16 at 12.
constexpr int64_t kMinPanelTokens = 12;

// Tokens whose prepared x is kept at a time: reading the weights again after so many costs nothing, and the working
// memory stays small.
constexpr int64_t kTokensPerPass = 2048;

// Bytes of the rows that all tokens are multiplied with before the next ones are read: they stay in the second level.
constexpr int64_t kPieceBytes = 256 * 1024;

// Tokens from which the threads share the preparation of x, about 1 us each.
constexpr int64_t kMinSharedTokens = 16;

struct MatvecWork {
  const MatvecArgs& args;
  const RowKernels& kernels;
  char* x;  // [batch, prepared_bytes]
  int64_t prepared_bytes, tile_tokens;
  Chunks tokens, rows;
};

void PrepareTokens(void* data) {
  MatvecWork& work = *static_cast<MatvecWork*>(data);
  const int64_t columns = work.args.columns;
  for (Chunk chunk = work.tokens.Next(); chunk.begin < chunk.end; chunk = work.tokens.Next()) {
    for (int64_t token = chunk.begin; token < chunk.end; ++token) {
      work.kernels.prepare(work.args.x + token * columns, columns, work.x + token * work.prepared_bytes);
    }
  }
}

void MultiplyPiece(const MatvecWork& work, Chunk rows) {
  const MatvecArgs& args = work.args;
  const auto* weight = static_cast<const char*>(args.weight);
  for (int64_t first = 0; first < args.batch; first += work.tile_tokens) {
    const int64_t num_tokens = std::min(work.tile_tokens, args.batch - first);
    const char* x = work.x + first * work.prepared_bytes;
    if (num_tokens == 1) {
      float* y = args.y + first * args.rows;
      work.kernels.dot_rows(weight + rows.begin * args.row_stride, args.row_stride, rows.end - rows.begin, x,
                            args.columns, y + rows.begin);
      for (int64_t r = rows.begin; args.bias != nullptr && r < rows.end; ++r) y[r] += args.bias[r];
      continue;
    }
    for (int64_t r = rows.begin; r < rows.end; ++r) {
      const char* row = weight + r * args.row_stride;
      const float bias = args.bias != nullptr ? args.bias[r] : 0.0f;
      float products[kMaxTileTokens];
      work.kernels.dots(row, x, work.prepared_bytes, num_tokens, args.columns, row + kAheadBytes, products);
      for (int64_t t = 0; t < num_tokens; ++t) args.y[(first + t) * args.rows + r] = products[t] + bias;
    }
  }
}

void MultiplyRows(void* data) {
  MatvecWork& work = *static_cast<MatvecWork*>(data);
  const int64_t piece_rows = kPieceBytes / std::max<int64_t>(1, work.kernels.row_bytes(work.args.columns)) + 1;
  for (Chunk chunk = work.rows.Next(); chunk.begin < chunk.end; chunk = work.rows.Next()) {
    for (int64_t begin = chunk.begin; begin < chunk.end; begin += piece_rows) {
      MultiplyPiece(work, {begin, std::min(chunk.end, begin + piece_rows)});
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

// The most tokens, a power of two, that fit.
int64_t TileTokens(int64_t prepared_bytes) {
  int64_t tokens = kMaxTileTokens;
  while (tokens > 1 && tokens * prepared_bytes > kTileBytes) tokens /= 2;
  return tokens;
}

void MultiplyByDots(const MatvecArgs& args, const RowKernels& kernels, ThreadPool& pool) {
  const int64_t prepared_bytes = kernels.prepared_bytes(args.columns), row_bytes = kernels.row_bytes(args.columns);
  Scratch scratch(Scratch::BytesFor<char>(args.batch * prepared_bytes));
  const int64_t min_rows = kMinChunkBytes / std::max<int64_t>(1, row_bytes);
  MatvecWork work{args,
                  kernels,
                  scratch.Take<char>(args.batch * prepared_bytes),
                  prepared_bytes,
                  kernels.joins_rows(args.columns) ? 1 : TileTokens(prepared_bytes),
                  Chunks(args.batch, 1, pool.num_threads()),
                  Chunks(args.rows, min_rows, pool.num_threads())};
  pool.Run(args.batch >= kMinSharedTokens, PrepareTokens, &work);
  pool.Run(args.rows * row_bytes > kInlineBytes, MultiplyRows, &work);
}

}  // namespace

void Matvec(const MatvecArgs& args, const RowKernels& kernels, ThreadPool& pool) {
  for (int64_t first = 0; first < args.batch; first += kTokensPerPass) {
    MatvecArgs some = args;
    some.batch = std::min(kTokensPerPass, args.batch - first);
    some.x += first * args.columns;
    some.y += first * args.rows;
    if (kernels.columns_per_scale == 1 && some.batch >= kMinPanelTokens) {
      MultiplyByPanels(some, kernels, pool);
    } else {
      MultiplyByDots(some, kernels, pool);
    }
  }
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
