#include "sign_scores.h"

#include "chunks.h"
#include "scratch.h"

namespace pjax {
namespace {

// Bytes read below which a call stays on its thread: about 10 us of work, less than waking a worker takes.
constexpr int64_t kInlineBytes = 256 * 1024;

// Rows whose counts are kept at a time; their bits are found in the cache by the tokens that follow.
constexpr int64_t kPieceRows = 256;

struct SignWork {
  const SignScoresArgs& args;
  const SignKernels& kernels;
  const uint32_t* x;  // [batch, words]
  Chunks rows;
};

void ScorePiece(const SignWork& work, Chunk rows) {
  const SignScoresArgs& args = work.args;
  const int64_t words = SignWords(args.columns), num_rows = rows.end - rows.begin;
  int32_t differing[kPieceRows];
  for (int64_t token = 0; token < args.batch; ++token) {
    work.kernels.count(args.bits + rows.begin * words, num_rows, words, work.x + token * words, differing);
    float* y = args.y + token * args.rows + rows.begin;
    const float* bias = args.bias + rows.begin;
    const int32_t columns = static_cast<int32_t>(args.columns);
    for (int64_t r = 0; r < num_rows; ++r) {
      y[r] = args.slope * static_cast<float>(columns - 2 * differing[r]) + bias[r];
    }
  }
}

void ScoreRows(void* data) {
  SignWork& work = *static_cast<SignWork*>(data);
  for (Chunk chunk = work.rows.Next(); chunk.begin < chunk.end; chunk = work.rows.Next()) {
    for (int64_t begin = chunk.begin; begin < chunk.end; begin += kPieceRows) {
      ScorePiece(work, {begin, std::min(chunk.end, begin + kPieceRows)});
    }
  }
}

}  // namespace

const SignKernels& SignKernelsFor(CpuLevel level) {
#if defined(PJAX_X86)
  if (level >= CpuLevel::kAvx512 && __builtin_cpu_supports("avx512vpopcntdq")) return Avx512SignKernels();
  if (level >= CpuLevel::kAvx2 && __builtin_cpu_supports("popcnt")) return Avx2SignKernels();
#endif
  (void)level;
  return PortableSignKernels();
}

void SignScores(const SignScoresArgs& args, const SignKernels& kernels, ThreadPool& pool) {
  const int64_t words = SignWords(args.columns), row_bytes = words * static_cast<int64_t>(sizeof(uint32_t));
  Scratch scratch(Scratch::BytesFor<uint32_t>(args.batch * words));
  uint32_t* x = scratch.Take<uint32_t>(args.batch * words);
  for (int64_t token = 0; token < args.batch; ++token) {
    kernels.pack(args.x + token * args.columns, args.columns, x + token * words);
  }
  const int64_t min_rows = kMinChunkBytes / std::max<int64_t>(1, row_bytes);
  SignWork work{args, kernels, x, Chunks(args.rows, min_rows, pool.num_threads())};
  pool.Run(args.batch * args.rows * row_bytes > kInlineBytes, ScoreRows, &work);
}

}  // namespace pjax
