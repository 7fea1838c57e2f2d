// Panels of weights in float32, as many columns as the sums of some tokens fill registers. Part of row_kernels_inl.h.

constexpr int kPanelVectors = kPanelWidth / Vector::kLanes;

// Tokens whose x is reached from one pointer, at once, twice and no times the stride: one each would need too many.
constexpr int kTokensPerPointer = 3;

void TransposePanel(const float* rows, int64_t stride, int64_t depth, float* panel) {
  for (int64_t k = 0; k < depth; k += 4) {
#pragma GCC unroll 8
    for (int r = 0; r < kPanelWidth; r += 4) {
      Vector::Transpose4(rows + r * stride + k, stride, panel + k * kPanelWidth + r, kPanelWidth);
    }
  }
}

template <int num_tokens>
void MultiplyPanelTile(const float* panel, int64_t depth, const float* x, int64_t x_stride, float* sums,
                       int64_t sums_stride) {
  constexpr int kPointers = (num_tokens + kTokensPerPointer - 1) / kTokensPerPointer;
  const float* pointers[kPointers];
#pragma GCC unroll 4
  for (int p = 0; p < kPointers; ++p) pointers[p] = x + p * kTokensPerPointer * x_stride;
  Vector::Floats total[num_tokens][kPanelVectors];
#pragma GCC unroll 12
  for (int t = 0; t < num_tokens; ++t) {
#pragma GCC unroll 4
    for (int v = 0; v < kPanelVectors; ++v) total[t][v] = Vector::Load(sums + t * sums_stride + v * Vector::kLanes);
  }
  for (int64_t k = 0; k < depth; ++k) {
    Vector::Floats weights[kPanelVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kPanelVectors; ++v) weights[v] = Vector::Load(panel + k * kPanelWidth + v * Vector::kLanes);
#pragma GCC unroll 12
    for (int t = 0; t < num_tokens; ++t) {
      const float* from = pointers[t / kTokensPerPointer] + t % kTokensPerPointer * x_stride;
      const Vector::Floats factor = Vector::Broadcast(from[k]);
#pragma GCC unroll 4
      for (int v = 0; v < kPanelVectors; ++v) total[t][v] = Vector::MultiplyAdd(weights[v], factor, total[t][v]);
    }
  }
#pragma GCC unroll 12
  for (int t = 0; t < num_tokens; ++t) {
#pragma GCC unroll 4
    for (int v = 0; v < kPanelVectors; ++v) Vector::Store(sums + t * sums_stride + v * Vector::kLanes, total[t][v]);
  }
}

// Tokens are taken `count` at a time, the rest half as many at a time.
template <int count>
void MultiplyPanel(const float* panel, int64_t depth, const float* x, int64_t x_stride, int64_t num_tokens,
                   float* sums, int64_t sums_stride) {
  for (; num_tokens >= count; num_tokens -= count, x += count * x_stride, sums += count * sums_stride) {
    MultiplyPanelTile<count>(panel, depth, x, x_stride, sums, sums_stride);
  }
  if constexpr (count > 1) {
    if (num_tokens > 0) MultiplyPanel<count / 2>(panel, depth, x, x_stride, num_tokens, sums, sums_stride);
  }
}
