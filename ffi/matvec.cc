#include "matvec.h"

#include <string.h>

#include <vector>

#include "chunks.h"
#include "panel_product.h"
#include "scratch.h"

namespace pjax {
namespace {

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

// Products of one x. Their rows are counted through, from those of the first product to those of the last.
struct MatvecWork {
  const MatvecArgs* products;
  int64_t num_products;
  const RowKernels& kernels;
  char* x;  // [batch, prepared_bytes]
  int64_t prepared_bytes, tile_tokens;
  Chunks tokens, rows;
};

void PrepareTokens(void* data) {
  MatvecWork& work = *static_cast<MatvecWork*>(data);
  const MatvecArgs& args = work.products[0];
  for (Chunk chunk = work.tokens.Next(); chunk.begin < chunk.end; chunk = work.tokens.Next()) {
    for (int64_t token = chunk.begin; token < chunk.end; ++token) {
      work.kernels.prepare(args.x + token * args.columns, args.columns, work.x + token * work.prepared_bytes);
    }
  }
}

void MultiplyPiece(const MatvecWork& work, const MatvecArgs& args, Chunk rows) {
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
  const int64_t row_bytes = work.kernels.row_bytes(work.products[0].columns);
  const int64_t piece_rows = kPieceBytes / std::max<int64_t>(1, row_bytes) + 1;
  for (Chunk chunk = work.rows.Next(); chunk.begin < chunk.end; chunk = work.rows.Next()) {
    int64_t first = 0;  // number of the product's first row
    for (int64_t i = 0; i < work.num_products; first += work.products[i++].rows) {
      const MatvecArgs& product = work.products[i];
      const int64_t end = std::min(chunk.end - first, product.rows);
      for (int64_t begin = std::max<int64_t>(0, chunk.begin - first); begin < end; begin += piece_rows) {
        MultiplyPiece(work, product, {begin, std::min(end, begin + piece_rows)});
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

// The most tokens, a power of two, that fit.
int64_t TileTokens(int64_t prepared_bytes) {
  int64_t tokens = kMaxTileTokens;
  while (tokens > 1 && tokens * prepared_bytes > kTileBytes) tokens /= 2;
  return tokens;
}

void MultiplyByDots(const MatvecArgs* products, int64_t count, const RowKernels& kernels, ThreadPool& pool) {
  const int64_t batch = products[0].batch, columns = products[0].columns;
  const int64_t prepared_bytes = kernels.prepared_bytes(columns), row_bytes = kernels.row_bytes(columns);
  Scratch scratch(Scratch::BytesFor<char>(batch * prepared_bytes));
  const int64_t min_rows = kMinChunkBytes / std::max<int64_t>(1, row_bytes);
  int64_t num_rows = 0;
  for (int64_t i = 0; i < count; ++i) num_rows += products[i].rows;
  MatvecWork work{products,
                  count,
                  kernels,
                  scratch.Take<char>(batch * prepared_bytes),
                  prepared_bytes,
                  kernels.joins_rows(columns) ? 1 : TileTokens(prepared_bytes),
                  Chunks(batch, 1, pool.num_threads()),
                  Chunks(num_rows, min_rows, pool.num_threads())};
  pool.Run(batch >= kMinSharedTokens, PrepareTokens, &work);
  pool.Run(num_rows * row_bytes > kMatvecInlineBytes, MultiplyRows, &work);
}

// The products for `batch` tokens from number `first` on.
void MultiplyTokens(const MatvecArgs* products, int64_t count, int64_t first, int64_t batch, const RowKernels& kernels,
                    ThreadPool& pool) {
  std::vector<MatvecArgs> some(products, products + count);
  for (MatvecArgs& product : some) {
    product.batch = batch;
    product.x += first * product.columns;
    product.y += first * product.rows;
  }
  if (kernels.columns_per_scale != 1 || batch < kMinPanelTokens) {
    MultiplyByDots(some.data(), count, kernels, pool);
    return;
  }
  for (const MatvecArgs& product : some) MultiplyByPanels(product, kernels, pool);
}

}  // namespace

void Matvec(const MatvecArgs& args, const RowKernels& kernels, ThreadPool& pool) { Matvecs(&args, 1, kernels, pool); }

void Matvecs(const MatvecArgs* products, int64_t count, const RowKernels& kernels, ThreadPool& pool) {
  const int64_t batch = products[0].batch;
  for (int64_t first = 0; first < batch; first += kTokensPerPass) {
    MultiplyTokens(products, count, first, std::min(kTokensPerPass, batch - first), kernels, pool);
  }
}

uint32_t StreamSum(const void* data, int64_t bytes, const RowKernels& kernels, ThreadPool& pool) {
  constexpr int64_t kWordBytes = sizeof(uint32_t);
  const int64_t num_words = bytes / kWordBytes;
  StreamWork work{static_cast<const uint32_t*>(data), kernels,
                  Chunks(num_words, kMinChunkBytes / kWordBytes, pool.num_threads())};
  pool.Run(bytes > kMatvecInlineBytes, StreamChunks, &work);
  uint32_t last = 0;
  if (const int64_t rest = bytes % kWordBytes; rest > 0) {
    memcpy(&last, static_cast<const char*>(data) + num_words * kWordBytes, rest);
  }
  return work.total.load() + last;
}

}  // namespace pjax
