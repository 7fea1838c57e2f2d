#include "panel_product.h"

#include <string.h>

#include <algorithm>
#include <atomic>

#include "chunks.h"
#include "scratch.h"

namespace pjax {
namespace {

// Weights that are summed over before the sums go back to memory; of one panel they take 32 KB.
constexpr int64_t kDepth = 256;

// Outputs whose panels lie side by side, in the second-level cache: x is read once for all of them. Columns come in
// groups of up to 512; making panels of rows needs a transposition, and room for the sums of more tokens pays for it.
constexpr int64_t kBlockRows = 128;
constexpr int64_t kBlockColumns = 512;

// Sums of a block of outputs and tokens, 384 KB: they share the second-level cache with the panels.
constexpr int64_t kMaxSums = 96 * 1024;

// Tokens that a kernel is given at a time: a dozen is what AVX-512 has registers for, and the other levels divide it.
constexpr int64_t kTokensPerTile = 12;

int64_t RoundUp(int64_t size, int64_t unit) { return (size + unit - 1) / unit * unit; }

// What one thread works with.
struct Workspace {
  float* rows;    // [kPanelWidth, kDepth], or one row's block of columns
  float* panels;  // [block / kPanelWidth, kDepth, kPanelWidth]
  float* sums;    // [tokens, block]
};

// A block of outputs for a block of tokens is what threads take.
struct Product {
  const RowKernels& kernels;
  const float* x;
  int64_t x_stride, batch, depth, outputs, block_outputs, block_tokens;
  Workspace* spaces;
  std::atomic<int64_t> next_block{0};
  std::atomic<int> next_space{0};

  int64_t NumOutputBlocks() const { return (outputs + block_outputs - 1) / block_outputs; }
  int64_t NumBlocks() const { return NumOutputBlocks() * ((batch + block_tokens - 1) / block_tokens); }
};

// Sums over all of the depth for `width` outputs. fill(k, depth) makes their panels for a stretch of it.
template <typename Fill>
void SumBlock(const Product& product, int64_t width, Chunk tokens, const Workspace& space, const Fill& fill) {
  const int64_t block = product.block_outputs;
  memset(space.sums, 0, (tokens.end - tokens.begin) * block * sizeof(float));
  for (int64_t k = 0; k < product.depth; k += kDepth) {
    const int64_t depth = std::min(kDepth, product.depth - k);
    fill(k, depth);
    for (int64_t t = tokens.begin; t < tokens.end; t += kTokensPerTile) {
      const float* x = product.x + t * product.x_stride + k;
      for (int64_t first = 0; first < width; first += kPanelWidth) {
        product.kernels.multiply_panel(space.panels + first * kDepth, depth, x, product.x_stride,
                                       std::min(kTokensPerTile, tokens.end - t),
                                       space.sums + (t - tokens.begin) * block + first, block);
      }
    }
  }
}

// Calls compute(outputs, tokens, workspace) for blocks of both until none are left.
template <typename Compute>
void ForEachBlock(Product& product, const Compute& compute) {
  const Workspace& space = product.spaces[product.next_space.fetch_add(1, std::memory_order_relaxed)];
  for (int64_t i; (i = product.next_block.fetch_add(1, std::memory_order_relaxed)) < product.NumBlocks();) {
    const int64_t output = i % product.NumOutputBlocks() * product.block_outputs;
    const int64_t token = i / product.NumOutputBlocks() * product.block_tokens;
    compute(Chunk{output, std::min(product.outputs, output + product.block_outputs)},
            Chunk{token, std::min(product.batch, token + product.block_tokens)}, space);
  }
}

struct RowsWork {
  const MatvecArgs& args;
  Product product;
  char* prepared;
  int64_t prepared_bytes;
  Chunks tokens;
};

void PrepareTokens(void* data) {
  RowsWork& work = *static_cast<RowsWork*>(data);
  for (Chunk chunk = work.tokens.Next(); chunk.begin < chunk.end; chunk = work.tokens.Next()) {
    for (int64_t t = chunk.begin; t < chunk.end; ++t) {
      work.product.kernels.prepare(work.args.x + t * work.args.columns, work.args.columns,
                                   work.prepared + t * work.prepared_bytes);
    }
  }
}

void MultiplyBlocks(void* data) {
  RowsWork& work = *static_cast<RowsWork*>(data);
  const MatvecArgs& args = work.args;
  const RowKernels& kernels = work.product.kernels;
  ForEachBlock(work.product, [&](Chunk rows, Chunk tokens, const Workspace& space) {
    SumBlock(work.product, rows.end - rows.begin, tokens, space, [&](int64_t k, int64_t depth) {
      for (int64_t first = rows.begin; first < rows.end; first += kPanelWidth) {
        for (int64_t r = 0; r < kPanelWidth; ++r) {
          // Behind the last row, any numbers will do.
          const char* row = static_cast<const char*>(args.weight) + std::min(first + r, rows.end - 1) * args.row_stride;
          kernels.unpack(row, args.columns, k, std::min(depth, args.columns - k), space.rows + r * kDepth);
        }
        kernels.transpose(space.rows, kDepth, depth, space.panels + (first - rows.begin) * kDepth);
      }
    });
    for (int64_t t = tokens.begin; t < tokens.end; ++t) {
      const float* sums = space.sums + (t - tokens.begin) * kBlockRows;
      for (int64_t r = rows.begin; r < rows.end; ++r) {
        args.y[t * args.rows + r] = sums[r - rows.begin] + (args.bias != nullptr ? args.bias[r] : 0.0f);
      }
    }
  });
}

struct CombineWork {
  const CombineArgs& args;
  Product product;
};

void CombineBlocks(void* data) {
  CombineWork& work = *static_cast<CombineWork*>(data);
  const CombineArgs& args = work.args;
  const RowKernels& kernels = work.product.kernels;
  ForEachBlock(work.product, [&](Chunk columns, Chunk tokens, const Workspace& space) {
    const int64_t count = columns.end - columns.begin, width = RoundUp(count, kernels.columns_per_group);
    SumBlock(work.product, width, tokens, space, [&](int64_t k, int64_t depth) {
      for (int64_t r = 0; r < depth; ++r) {
        const char* row = static_cast<const char*>(args.weight) + (k + r) * args.row_stride;
        kernels.unpack(row, args.columns, columns.begin, count, space.rows);
        for (int64_t first = 0; first < width; first += kPanelWidth) {
          memcpy(space.panels + first * kDepth + r * kPanelWidth, space.rows + first, kPanelWidth * sizeof(float));
        }
      }
    });
    for (int64_t t = tokens.begin; t < tokens.end; ++t) {
      kernels.finish(space.sums + (t - tokens.begin) * kBlockColumns, 0, 1, count,
                     args.y + t * args.columns + columns.begin);
    }
  });
}

size_t SpaceBytes(int64_t block_outputs, int64_t block_tokens) {
  return Scratch::BytesFor<float>(std::max(kPanelWidth * kDepth, block_outputs)) +
         Scratch::BytesFor<float>(block_outputs * kDepth) + Scratch::BytesFor<float>(block_outputs * block_tokens);
}

void TakeSpaces(Scratch& scratch, int num_threads, Product* product) {
  product->spaces = scratch.Take<Workspace>(num_threads);
  for (int i = 0; i < num_threads; ++i) {
    product->spaces[i] = {scratch.Take<float>(std::max(kPanelWidth * kDepth, product->block_outputs)),
                          scratch.Take<float>(product->block_outputs * kDepth),
                          scratch.Take<float>(product->block_outputs * product->block_tokens)};
  }
}

int64_t BlockTokens(int64_t block_outputs, int64_t batch) {
  const int64_t most = kMaxSums / block_outputs / kTokensPerTile * kTokensPerTile;
  return std::min(RoundUp(std::max<int64_t>(1, batch), kTokensPerTile), most);
}

}  // namespace

void MultiplyByPanels(const MatvecArgs& args, const RowKernels& kernels, ThreadPool& pool) {
  const int num_threads = pool.num_threads();
  // One line more than prepared: at strides of a power of two a dozen tokens would share the lines of one set.
  const int64_t prepared_bytes = kernels.prepared_bytes(args.columns) + 64;
  const int64_t block_tokens = BlockTokens(kBlockRows, args.batch);
  Scratch scratch(Scratch::BytesFor<char>(args.batch * prepared_bytes) + Scratch::BytesFor<Workspace>(num_threads) +
                  num_threads * SpaceBytes(kBlockRows, block_tokens));
  char* prepared = scratch.Take<char>(args.batch * prepared_bytes);
  const int64_t x_stride = prepared_bytes / static_cast<int64_t>(sizeof(float));
  RowsWork work{args,
                {kernels, reinterpret_cast<const float*>(prepared), x_stride, args.batch,
                 RoundUp(args.columns, kernels.columns_per_group), args.rows, kBlockRows, block_tokens, nullptr},
                prepared,
                prepared_bytes,
                Chunks(args.batch, 1, num_threads)};
  TakeSpaces(scratch, num_threads, &work.product);
  pool.Run(true, PrepareTokens, &work);
  pool.Run(true, MultiplyBlocks, &work);
}

void CombineRows(const CombineArgs& args, const RowKernels& kernels, ThreadPool& pool) {
  const int num_threads = pool.num_threads();
  const int64_t block_tokens = BlockTokens(kBlockColumns, args.batch);
  Scratch scratch(Scratch::BytesFor<Workspace>(num_threads) + num_threads * SpaceBytes(kBlockColumns, block_tokens));
  CombineWork work{args,
                   {kernels, args.x, args.rows, args.batch, args.rows, args.columns, kBlockColumns, block_tokens,
                    nullptr}};
  TakeSpaces(scratch, num_threads, &work.product);
  pool.Run(true, CombineBlocks, &work);
}

}  // namespace pjax
