// Into lane order and back is the identity, whatever the size.
#include "lane_order.h"

#include "testing.h"

int main() {
  using namespace pjax;
  std::mt19937 rng(0);
  ForEachKernels([&](const RowKernels& kernels, WeightType type, const std::string& text) {
    for (int64_t size : {0, 1, 7, 31, 32, 33, 64, 100, 257}) {
      const std::string what = text + ", size " + std::to_string(size);
      const std::vector<float> from = RandomFloats(rng, size);
      std::vector<float> lanes(PaddedSize(size), NAN), back(size, NAN);
      ToLaneOrder(kernels, from.data(), size, lanes.data());
      FromLaneOrder(kernels, lanes.data(), size, back.data());
      PJAX_CHECK(back == from, what);
      for (int64_t lane = 0; lane < PaddedSize(size); ++lane) {
        const int64_t in_block = lane % kBlock;
        const int64_t element = type == WeightType::kFloat32 ? in_block : in_block % 16 * 2 + in_block / 16;
        const int64_t index = lane - in_block + element;
        PJAX_CHECK(lanes[lane] == (index < size ? from[index] : 0.0f), what);
      }
    }
  });
  return 0;
}
