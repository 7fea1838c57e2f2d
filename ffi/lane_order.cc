#include "lane_order.h"

#include <string.h>

namespace pjax {
namespace {

// Whole blocks are written without a test of the size, so that the compiler makes shuffles of them.
void EvensThenOdds(const float* from, float* to) {
  for (int64_t i = 0; i < kBlock / 2; ++i) {
    to[i] = from[2 * i];
    to[kBlock / 2 + i] = from[2 * i + 1];
  }
}

void Interleave(const float* from, float* to) {
  for (int64_t i = 0; i < kBlock / 2; ++i) {
    to[2 * i] = from[i];
    to[2 * i + 1] = from[kBlock / 2 + i];
  }
}

}  // namespace

void ToLaneOrder(const RowKernels& kernels, const float* from, int64_t size, float* to) {
  const int64_t whole = size / kBlock * kBlock;
  float rest[kBlock] = {};
  if (size > whole) memcpy(rest, from + whole, (size - whole) * sizeof(float));
  for (int64_t start = 0; start < PaddedSize(size); start += kBlock) {
    const float* block = start < whole ? from + start : rest;
    if (kernels.even_odd) {
      EvensThenOdds(block, to + start);
    } else {
      memcpy(to + start, block, sizeof(rest));
    }
  }
}

void FromLaneOrder(const RowKernels& kernels, const float* from, int64_t size, float* to) {
  for (int64_t start = 0; start < size; start += kBlock) {
    float block[kBlock];
    if (kernels.even_odd) {
      Interleave(from + start, block);
    } else {
      memcpy(block, from + start, sizeof(block));
    }
    const int64_t count = size - start < kBlock ? size - start : kBlock;
    memcpy(to + start, block, count * sizeof(float));
  }
}

}  // namespace pjax
