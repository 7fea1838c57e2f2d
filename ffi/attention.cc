#include "attention.h"

#include <math.h>
#include <string.h>

#include <algorithm>
#include <atomic>
#include <new>

#include "chunks.h"
#include "scratch.h"

namespace pjax {
namespace {

// A key head's tokens are split into ranges whose number depends on the sequence alone; each has its own softmax and
// the last thread to finish one joins them in order. That keeps the bits independent of who computes which range.
// With 16 tasks a thread that finishes first waits for 6 % of the call at most.
constexpr int64_t kWantedTasks = 16;

// Keys and values of a range, in bytes, below which the start of its two streams costs too much.
constexpr int64_t kMinRangeBytes = 128 * 1024;

// Tokens of a range at most, so that the scores of a group of heads stay in the second-level cache.
constexpr int64_t kMaxRangeTokens = 1024;

// Bytes read below which a call stays on its thread: about 10 us of work, less than waking a worker takes.
constexpr int64_t kInlineBytes = 256 * 1024;

constexpr int64_t RoundUp(int64_t size, int64_t block) { return (size + block - 1) / block * block; }

struct Sequence {
  int64_t position, row;  // of the new token, and where it is stored
  int64_t begin, end;     // rows that the query sees
  int64_t num_ranges;
  int64_t first_task;     // number of its first range among those of all sequences

  int64_t Boundary(int64_t range) const { return begin + range * (end - begin) / num_ranges; }
};

// Working memory of one thread.
struct Buffers {
  float* q;       // [group, padded]
  float* scores;  // [group, score_stride]
  float* row;     // [head_dim]
};

struct AttentionWork {
  const AttentionArgs& args;
  const AttentionKernels& kernels;
  const WeightType type;
  const int64_t element_bytes, group, padded, score_stride;
  const Sequence* sequences;       // [batch]
  float* sums;                     // [tasks, group, padded], lane order
  float* maxima;                   // [tasks, group]
  float* totals;                   // [tasks, group]
  std::atomic<int64_t>* unfinished;  // [batch, kv_heads]: ranges
  Buffers* buffers;                // [threads]
  Chunks chunks;
  std::atomic<int> next_buffers{0};

  int64_t HeadBytes() const { return args.capacity * args.head_dim * element_bytes; }
};

struct Task {
  int64_t batch, kv_head, range;
};

Task TaskAt(const AttentionWork& work, int64_t number) {
  const Sequence* const end = work.sequences + work.args.batch;
  const auto starts_later = [](int64_t task, const Sequence& sequence) { return task < sequence.first_task; };
  const Sequence& sequence = *(std::upper_bound(work.sequences, end, number, starts_later) - 1);
  const int64_t within = number - sequence.first_task;
  return {&sequence - work.sequences, within / sequence.num_ranges, within % sequence.num_ranges};
}

char* HeadOf(const AttentionWork& work, void* cache, const Task& task) {
  return static_cast<char*>(cache) + (task.batch * work.args.kv_heads + task.kv_head) * work.HeadBytes();
}

void Rotate(const float* in, const float* rotation, int64_t half, int64_t size, float* out) {
  for (int64_t i = 0; i < half; ++i) {
    const float low = in[i], high = in[i + half], cosine = rotation[i], sine = rotation[i + half];
    out[i] = low * cosine - high * sine;
    out[i + half] = high * cosine + low * sine;
  }
  std::copy(in + 2 * half, in + size, out + 2 * half);
}

// To nearest, ties to even; NaN stays NaN.
uint16_t ToBfloat16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>(value != value ? (bits >> 16) | 0x40u : rounded);
}

void StoreRow(const AttentionWork& work, const float* row, char* head, int64_t token) {
  const int64_t size = work.args.head_dim;
  char* to = head + token * size * work.element_bytes;
  if (work.type == WeightType::kFloat32) {
    memcpy(to, row, size * sizeof(float));
    return;
  }
  auto* halves = reinterpret_cast<uint16_t*>(to);
  for (int64_t i = 0; i < size; ++i) halves[i] = ToBfloat16(row[i]);
}

// Joins the ranges of one key head: y = sum_i exp(m_i - m) sums_i / sum_i exp(m_i - m) totals_i.
void JoinRanges(const AttentionWork& work, const Task& task, int64_t first_task) {
  const AttentionArgs& args = work.args;
  const int64_t num_ranges = work.sequences[task.batch].num_ranges;
  for (int64_t head = 0; head < work.group; ++head) {
    const float* maxima = work.maxima + first_task * work.group + head;
    const float* totals = work.totals + first_task * work.group + head;
    float* sums = work.sums + (first_task * work.group + head) * work.padded;
    float total = *totals;
    if (num_ranges > 1) {
      float maximum = *maxima;
      for (int64_t i = 1; i < num_ranges; ++i) maximum = std::max(maximum, maxima[i * work.group]);
      total = 0;
      for (int64_t i = 0; i < num_ranges; ++i) {
        const float factor = expf(maxima[i * work.group] - maximum);
        const float* added = sums + i * work.group * work.padded;
        total += factor * totals[i * work.group];
        for (int64_t d = 0; d < work.padded; ++d) sums[d] = (i == 0 ? 0.0f : sums[d]) + factor * added[d];
      }
    }
    const int64_t query = task.batch * args.heads + task.kv_head * work.group + head;
    work.kernels.from_lanes(sums, 1.0f / total, args.head_dim, args.y + query * args.head_dim);
  }
}

void RunTask(const AttentionWork& work, const Buffers& buffers, int64_t number, const void* next) {
  const AttentionArgs& args = work.args;
  const Task task = TaskAt(work, number);
  const Sequence& sequence = work.sequences[task.batch];
  const float* rotation = args.rotation + task.batch * 2 * args.half;
  char* keys = HeadOf(work, args.k_cache, task);
  char* values = HeadOf(work, args.v_cache, task);
  const int64_t kv_row = (task.batch * args.kv_heads + task.kv_head) * args.head_dim;
  if (task.range == sequence.num_ranges - 1) {  // the one that sees the new row
    Rotate(args.k + kv_row, rotation, args.half, args.head_dim, buffers.row);
    StoreRow(work, buffers.row, keys, sequence.row);
    StoreRow(work, args.v + kv_row, values, sequence.row);
  }
  const float scale = 1.0f / sqrtf(static_cast<float>(args.head_dim));
  for (int64_t head = 0; head < work.group; ++head) {
    Rotate(args.q + kv_row * work.group + head * args.head_dim, rotation, args.half, args.head_dim, buffers.row);
    work.kernels.to_lanes(buffers.row, scale, args.head_dim, work.padded, buffers.q + head * work.padded);
  }
  AttentionRange range;
  range.k = keys;
  range.v = values;
  range.begin = sequence.Boundary(task.range);
  range.end = sequence.Boundary(task.range + 1);
  range.head_dim = args.head_dim;
  range.padded = work.padded;
  range.group = work.group;
  range.q = buffers.q;
  range.scale = scale;
  range.slopes = args.slopes == nullptr ? nullptr : args.slopes + task.kv_head * work.group;
  range.position = sequence.position;
  range.next = next == nullptr ? keys : next;
  range.scores = buffers.scores;
  range.score_stride = work.score_stride;
  range.sums = work.sums + number * work.group * work.padded;
  range.maxima = work.maxima + number * work.group;
  range.totals = work.totals + number * work.group;
  work.kernels.attend(range);
  std::atomic<int64_t>& unfinished = work.unfinished[task.batch * args.kv_heads + task.kv_head];
  if (unfinished.fetch_sub(1, std::memory_order_acq_rel) == 1) JoinRanges(work, task, number - task.range);
}

void RunTasks(void* data) {
  AttentionWork& work = *static_cast<AttentionWork*>(data);
  const Buffers& buffers = work.buffers[work.next_buffers.fetch_add(1, std::memory_order_relaxed)];
  for (Chunk chunk = work.chunks.Next(); chunk.begin < chunk.end; chunk = work.chunks.Next()) {
    for (int64_t number = chunk.begin; number < chunk.end; ++number) {
      const void* next = nullptr;
      if (number + 1 < chunk.end) {
        const Task task = TaskAt(work, number + 1);
        const int64_t first = work.sequences[task.batch].Boundary(task.range);
        next = HeadOf(work, work.args.k_cache, task) + first * work.args.head_dim * work.element_bytes;
      }
      RunTask(work, buffers, number, next);
    }
  }
}

Sequence SequenceAt(const AttentionArgs& args, int64_t token_bytes, int64_t number) {
  Sequence sequence;
  sequence.position = args.positions[number];
  sequence.row = std::clamp<int64_t>(sequence.position, 0, args.capacity - 1);
  sequence.end = std::clamp<int64_t>(sequence.position + 1, 0, args.capacity);
  sequence.begin = args.window == 0 ? 0 : std::clamp<int64_t>(sequence.position - args.window + 1, 0, sequence.end);
  const int64_t tokens = sequence.end - sequence.begin;
  const int64_t wanted = (kWantedTasks + args.kv_heads - 1) / args.kv_heads;
  const int64_t needed = (tokens + kMaxRangeTokens - 1) / kMaxRangeTokens;
  sequence.num_ranges = std::max({int64_t{1}, needed, std::min(wanted, tokens * token_bytes / kMinRangeBytes)});
  return sequence;
}

}  // namespace

const AttentionKernels& AttentionKernelsFor(CpuLevel level, WeightType type) {
#if defined(PJAX_X86)
  if (level >= CpuLevel::kAvx512) return Avx512AttentionKernels(type);
  if (level == CpuLevel::kAvx2) return Avx2AttentionKernels(type);
#endif
  (void)level;
  return PortableAttentionKernels(type);
}

void DecodeAttention(const AttentionArgs& args, WeightType type, const AttentionKernels& kernels, ThreadPool& pool) {
  if (args.batch == 0 || args.heads == 0) return;
  const int64_t element_bytes = type == WeightType::kFloat32 ? 4 : 2;
  const int64_t token_bytes = 2 * args.head_dim * element_bytes;
  const int64_t group = args.heads / args.kv_heads, padded = RoundUp(args.head_dim, kRowBlock);
  Scratch sequence_scratch(Scratch::BytesFor<Sequence>(args.batch));
  Sequence* sequences = sequence_scratch.Take<Sequence>(args.batch);
  int64_t num_tasks = 0, longest = 0, num_tokens = 0;
  for (int64_t i = 0; i < args.batch; ++i) {
    sequences[i] = SequenceAt(args, token_bytes, i);
    sequences[i].first_task = num_tasks;
    num_tasks += sequences[i].num_ranges * args.kv_heads;
    const int64_t tokens = sequences[i].end - sequences[i].begin;
    longest = std::max(longest, tokens / sequences[i].num_ranges + 1);
    num_tokens += tokens;
  }

  const int64_t threads = pool.num_threads(), num_heads = args.batch * args.kv_heads;
  const int64_t score_stride = RoundUp(longest, kScoreBlock), row_floats = RoundUp(args.head_dim, kScoreBlock);
  const int64_t buffer_floats = group * (padded + score_stride) + row_floats;
  Scratch scratch(Scratch::BytesFor<float>(num_tasks * group * padded) +
                  2 * Scratch::BytesFor<float>(num_tasks * group) + Scratch::BytesFor<Buffers>(threads) +
                  Scratch::BytesFor<std::atomic<int64_t>>(num_heads) +
                  Scratch::BytesFor<float>(threads * buffer_floats));
  float* sums = scratch.Take<float>(num_tasks * group * padded);
  float* maxima = scratch.Take<float>(num_tasks * group);
  float* totals = scratch.Take<float>(num_tasks * group);
  Buffers* buffers = scratch.Take<Buffers>(threads);
  auto* unfinished = scratch.Take<std::atomic<int64_t>>(num_heads);
  float* working = scratch.Take<float>(threads * buffer_floats);
  for (int64_t i = 0; i < num_heads; ++i) {
    new (unfinished + i) std::atomic<int64_t>(sequences[i / args.kv_heads].num_ranges);
  }
  for (int64_t i = 0; i < threads; ++i, working += buffer_floats) {
    float* scores = working + group * padded;
    buffers[i] = {working, scores, scores + group * score_stride};
  }
  AttentionWork work{args,      kernels, type,   element_bytes, group,      padded,  score_stride,
                     sequences, sums,    maxima, totals,        unfinished, buffers, Chunks(num_tasks, 1, threads)};
  pool.Run(num_tokens * args.kv_heads * token_bytes > kInlineBytes, RunTasks, &work);
}

}  // namespace pjax
