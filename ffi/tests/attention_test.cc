// Decode attention against double precision, on caches of exactly their size; the same bits for every number of
// threads, every capacity and every batch.
#include "attention.h"

#include <algorithm>

#include "testing.h"

namespace pjax {
namespace {

struct Case {
  int64_t heads, kv_heads, head_dim, capacity, width, window;
  bool alibi;
  std::vector<int32_t> positions;

  std::string Text() const {
    std::string text = std::to_string(heads) + "/" + std::to_string(kv_heads) + "x" + std::to_string(head_dim) +
                       " width " + std::to_string(width) + " window " + std::to_string(window) +
                       (alibi ? " alibi" : "") + " positions";
    for (int32_t position : positions) text += " " + std::to_string(position);
    return text;
  }
};

struct Inputs {
  std::vector<float> q, k, v, rotation, slopes;
  Weights k_cache, v_cache;
};

Inputs MakeInputs(const Case& c, WeightType type, int64_t batch) {
  std::mt19937 rng(c.heads * 1000 + c.head_dim);
  const int64_t kv_size = batch * c.kv_heads * c.head_dim;
  std::vector<float> q = RandomFloats(rng, batch * c.heads * c.head_dim), k = RandomFloats(rng, kv_size);
  std::vector<float> v = RandomFloats(rng, kv_size), rotation(batch * c.width), slopes(c.alibi ? c.heads : 0);
  for (float& value : q) value *= 3;  // so that some weights are much larger than others
  for (int64_t i = 0; i < batch; ++i) {
    for (int64_t j = 0; j < c.width / 2; ++j) {
      const double angle = c.positions[i] * pow(1000.0, -static_cast<double>(j) / c.width);
      rotation[i * c.width + j] = static_cast<float>(cos(angle));
      rotation[i * c.width + c.width / 2 + j] = static_cast<float>(sin(angle));
    }
  }
  for (int64_t i = 0; i < static_cast<int64_t>(slopes.size()); ++i) slopes[i] = 1.0f / static_cast<float>(i + 1);
  return {q, k, v, rotation, slopes, Weights(rng, type, 1, kv_size * c.capacity), Weights(rng, type, 1, kv_size * c.capacity)};
}

std::vector<float> Run(const Case& c, const Inputs& in, WeightType type, const AttentionKernels& kernels,
                       int num_threads, std::vector<char>* k_cache, std::vector<char>* v_cache) {
  const int64_t batch = c.positions.size();
  ThreadPool pool(num_threads);
  std::vector<float> y(batch * c.heads * c.head_dim, -1);
  AttentionArgs args;
  args.q = in.q.data();
  args.k = in.k.data();
  args.v = in.v.data();
  args.k_cache = k_cache->data();
  args.v_cache = v_cache->data();
  args.positions = c.positions.data();
  args.rotation = in.rotation.data();
  args.slopes = c.alibi ? in.slopes.data() : nullptr;
  args.batch = batch;
  args.heads = c.heads;
  args.kv_heads = c.kv_heads;
  args.head_dim = c.head_dim;
  args.capacity = c.capacity;
  args.half = c.width / 2;
  args.window = c.window;
  args.y = y.data();
  DecodeAttention(args, type, kernels, pool);
  return y;
}

std::vector<double> Rotated(const float* row, const float* rotation, const Case& c) {
  const int64_t half = c.width / 2;
  std::vector<double> out(row, row + c.head_dim);
  for (int64_t i = 0; i < half; ++i) {
    const double cosine = rotation[i], sine = rotation[i + half];
    out[i] = row[i] * cosine - row[i + half] * sine;
    out[i + half] = row[i + half] * cosine + row[i] * sine;
  }
  return out;
}

double ElementAt(const std::vector<char>& bytes, WeightType type, int64_t index) {
  uint32_t bits = 0;
  if (type == WeightType::kFloat32) {
    memcpy(&bits, &bytes[index * 4], 4);
  } else {
    memcpy(reinterpret_cast<char*>(&bits) + 2, &bytes[index * 2], 2);
  }
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

// The new rows, rounded, where they belong, and nothing else changed.
void CheckAppended(const Case& c, WeightType type, const std::vector<float>& rows, const float* rotation,
                   const Weights& before, const std::vector<char>& after, const std::string& text) {
  // A rotation in float32 errs by 3 roundings of two terms of size 5 at most.
  const double rounding = type == WeightType::kFloat32 ? 0 : 1.0 / 256, rotating = 2e-6;
  for (int64_t head = 0; head < static_cast<int64_t>(c.positions.size()) * c.kv_heads; ++head) {
    const int64_t batch = head / c.kv_heads;
    const int64_t at = std::clamp<int64_t>(c.positions[batch], 0, c.capacity - 1);
    const float* row = rows.data() + head * c.head_dim;
    const std::vector<double> expected =
        rotation != nullptr ? Rotated(row, rotation + batch * c.width, c) : std::vector<double>(row, row + c.head_dim);
    for (int64_t token = 0; token < c.capacity; ++token) {
      for (int64_t d = 0; d < c.head_dim; ++d) {
        const int64_t index = (head * c.capacity + token) * c.head_dim + d;
        const double got = ElementAt(after, type, index);
        const double wanted = token == at ? expected[d] : before.values[index];
        const double bound = token == at ? rounding * fabs(wanted) + rotating : 0.0;
        PJAX_CHECK(fabs(got - wanted) <= bound, text + ", cache row " + std::to_string(token));
      }
    }
  }
}

void CheckValues(const Case& c, const Inputs& in, WeightType type, const std::vector<char>& keys,
                 const std::vector<char>& values, const std::vector<float>& y, const std::string& text) {
  const double scale = 1 / sqrt(static_cast<double>(c.head_dim));
  for (int64_t query = 0; query < static_cast<int64_t>(c.positions.size()) * c.heads; ++query) {
    const int64_t batch = query / c.heads, head = query % c.heads, position = c.positions[batch];
    const int64_t kv_head = batch * c.kv_heads + head / (c.heads / c.kv_heads);
    const std::vector<double> q = Rotated(&in.q[query * c.head_dim], in.rotation.data() + batch * c.width, c);
    std::vector<double> sums(c.head_dim), sizes(c.head_dim), scores(c.capacity, -INFINITY);
    double maximum = -INFINITY, total = 0, error = 0;
    for (int64_t token = 0; token < c.capacity; ++token) {
      const int64_t distance = position - token;
      if (distance < 0 || (c.window > 0 && distance >= c.window)) continue;
      double score = 0, magnitude = 0;
      for (int64_t d = 0; d < c.head_dim; ++d) {
        const double term = q[d] * ElementAt(keys, type, (kv_head * c.capacity + token) * c.head_dim + d) * scale;
        score += term;
        magnitude += fabs(term);
      }
      const double fall = c.alibi ? in.slopes[head] * scale * distance : 0;
      scores[token] = score - fall;
      error = std::max(error, SumTolerance(c.head_dim + 4, magnitude + fabs(fall)));
      maximum = std::max(maximum, scores[token]);
    }
    for (int64_t token = 0; token < c.capacity; ++token) {
      const double weight = exp(scores[token] - maximum);
      total += weight;
      for (int64_t d = 0; d < c.head_dim; ++d) {
        const double term = weight * ElementAt(values, type, (kv_head * c.capacity + token) * c.head_dim + d);
        sums[d] += term;
        sizes[d] += fabs(term);
      }
    }
    // A score that is off by e makes its weight off by e of itself; numerator and total err alike.
    const double relative = 2 * (2 * error + SumTolerance(c.capacity + 8, 1));
    for (int64_t d = 0; d < c.head_dim; ++d) {
      const double expected = sums[d] / total;
      const float got = y[query * c.head_dim + d];
      const std::string where = text + ", query " + std::to_string(query) + ", entry " + std::to_string(d);
      if (maximum == -INFINITY) {
        PJAX_CHECK(isnan(got), where);
      } else {
        PJAX_CHECK(fabs(got - expected) <= relative * (sizes[d] / total) + 1e-37, where);
      }
    }
  }
}

// The same sequence alone, in a cache of another capacity, with `num_threads`.
void CheckAlone(const Case& c, const Inputs& in, WeightType type, const AttentionKernels& kernels, int64_t number,
                const std::vector<float>& y, const std::string& text) {
  const int64_t element_bytes = type == WeightType::kFloat32 ? 4 : 2;
  const int64_t row_bytes = c.head_dim * element_bytes, queries = c.heads * c.head_dim;
  Case one = c;
  one.positions = {c.positions[number]};
  one.capacity = c.capacity + 5;
  std::vector<char> caches[2];
  for (int side = 0; side < 2; ++side) {
    const std::vector<char>& from = side == 0 ? in.k_cache.bytes : in.v_cache.bytes;
    caches[side].resize(c.kv_heads * one.capacity * row_bytes);
    for (int64_t head = 0; head < c.kv_heads; ++head) {
      memcpy(&caches[side][head * one.capacity * row_bytes],
             &from[(number * c.kv_heads + head) * c.capacity * row_bytes], c.capacity * row_bytes);
    }
  }
  Inputs alone = in;
  alone.q.erase(alone.q.begin(), alone.q.begin() + number * queries);
  alone.k.erase(alone.k.begin(), alone.k.begin() + number * c.kv_heads * c.head_dim);
  alone.v.erase(alone.v.begin(), alone.v.begin() + number * c.kv_heads * c.head_dim);
  alone.rotation.erase(alone.rotation.begin(), alone.rotation.begin() + number * c.width);
  const std::vector<float> got = Run(one, alone, type, kernels, 2, &caches[0], &caches[1]);
  const std::vector<float> expected(y.begin() + number * queries, y.begin() + (number + 1) * queries);
  PJAX_CHECK(SameBits(expected, got), text + ", alone " + std::to_string(number));
}

void Check(const Case& c, WeightType type, const AttentionKernels& kernels, const std::string& level) {
  const std::string text = level + " " + c.Text();
  const int64_t batch = c.positions.size();
  const Inputs in = MakeInputs(c, type, batch);
  std::vector<float> first;
  for (int num_threads = 1; num_threads <= 4; ++num_threads) {
    std::vector<char> k_cache = in.k_cache.bytes, v_cache = in.v_cache.bytes;
    const std::vector<float> y = Run(c, in, type, kernels, num_threads, &k_cache, &v_cache);
    if (num_threads == 1) {
      first = y;
      CheckAppended(c, type, in.k, in.rotation.data(), in.k_cache, k_cache, text);
      CheckAppended(c, type, in.v, nullptr, in.v_cache, v_cache, text);
      CheckValues(c, in, type, k_cache, v_cache, y, text);
    }
    PJAX_CHECK(SameBits(first, y), text + ", threads " + std::to_string(num_threads));
  }
  for (int64_t number = 0; number < batch; ++number) {
    if (c.positions[number] < c.capacity) CheckAlone(c, in, type, kernels, number, first, text);
  }
}

// Large scores underflow to nothing, and a NaN in a key or a value is not lost.
void CheckExtremes(WeightType type, const AttentionKernels& kernels, const std::string& level) {
  Case c{2, 1, 16, 40, 0, 0, false, {39}};
  Inputs in = MakeInputs(c, type, 1);
  for (float& value : in.q) value *= 1e4f;
  std::vector<char> k_cache = in.k_cache.bytes, v_cache = in.v_cache.bytes;
  const std::vector<float> y = Run(c, in, type, kernels, 1, &k_cache, &v_cache);
  for (float value : y) PJAX_CHECK(isfinite(value), level + ", large scores");
  in = MakeInputs(c, type, 1);
  for (std::vector<float>* row : {&in.k, &in.v}) {
    const float saved = (*row)[3];
    (*row)[3] = NAN;
    const std::vector<float> poisoned = Run(c, in, type, kernels, 1, &k_cache, &v_cache);
    for (int64_t query : {0, 1}) PJAX_CHECK(isnan(poisoned[query * c.head_dim + 3]), level + ", NaN");
    (*row)[3] = saved;
  }
}

}  // namespace
}  // namespace pjax

int main() {
  using namespace pjax;
  const std::vector<Case> cases = {
      {1, 1, 1, 1, 0, 0, false, {0}},
      {4, 4, 16, 70, 16, 0, false, {69, 0, 33}},
      {3, 1, 7, 130, 4, 0, true, {129, 64}},
      {7, 7, 33, 20, 32, 5, false, {19, 3}},
      {14, 2, 80, 100, 32, 0, false, {99, 50}},
      {8, 2, 64, 300, 64, 128, true, {299, 127, 128}},
      {5, 1, 256, 40, 256, 0, false, {39}},
      {12, 2, 96, 65, 48, 1, false, {64}},
      {71, 1, 64, 30, 64, 0, false, {29}},
      {2, 1, 128, 2600, 128, 0, false, {2599, 1024}},  // several ranges, by bytes and by tokens
      {2, 2, 128, 1300, 0, 1100, true, {1299, 700}},
      {4, 2, 16, 10, 16, 0, false, {10, 400, -1}},  // not within the cache
      {4, 2, 16, 10, 16, 3, false, {11, 400}},      // the last query's window has left it
  };
  for (CpuLevel level : SupportedCpuLevels()) {
    for (WeightType type : {WeightType::kFloat32, WeightType::kBfloat16}) {
      const AttentionKernels& kernels = AttentionKernelsFor(level, type);
      const std::string text = std::string(CpuLevelName(level)) + " " + TypeName(type);
      for (const Case& c : cases) Check(c, type, kernels, text);
      CheckExtremes(type, kernels, text);
    }
  }
  return 0;
}
