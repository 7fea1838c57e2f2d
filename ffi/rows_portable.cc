// Row kernels for any CPU: short loops over arrays, which compilers turn into the baseline's vectors.
#include "row_kernels.h"

namespace pjax {
namespace {

struct Vector {
  static constexpr int kLanes = 16;
  static constexpr int kAccumulators = 2;
  struct Floats {
    float lane[kLanes];
  };

  static Floats Zero() { return Floats{}; }
  static Floats Broadcast(float value) {
    Floats out;
    for (float& lane : out.lane) lane = value;
    return out;
  }
  static Floats Load(const float* from) {
    Floats out;
    __builtin_memcpy(out.lane, from, sizeof(out.lane));
    return out;
  }
  static void Store(float* to, const Floats& value) { __builtin_memcpy(to, value.lane, sizeof(value.lane)); }
  static Floats Add(Floats a, const Floats& b) {
    for (int i = 0; i < kLanes; ++i) a.lane[i] += b.lane[i];
    return a;
  }
  static Floats MultiplyAdd(const Floats& a, const Floats& b, Floats sum) {
    for (int i = 0; i < kLanes; ++i) sum.lane[i] += a.lane[i] * b.lane[i];
    return sum;
  }
  static float Sum(const Floats& value) {
    float total = 0;
    for (float lane : value.lane) total += lane;
    return total;
  }
  static Floats LoadEven(const uint16_t* pairs) { return LoadHalf(pairs, 0); }
  static Floats LoadOdd(const uint16_t* pairs) { return LoadHalf(pairs, 1); }

 private:
  static Floats LoadHalf(const uint16_t* pairs, int parity) {
    uint32_t bits[kLanes];
    for (int i = 0; i < kLanes; ++i) bits[i] = static_cast<uint32_t>(pairs[2 * i + parity]) << 16;
    Floats out;
    __builtin_memcpy(out.lane, bits, sizeof(bits));
    return out;
  }
};

}  // namespace
}  // namespace pjax

#include "row_kernels_inl.h"

namespace pjax {

const RowKernels& PortableKernels(WeightType type) { return KernelsOf(type); }

}  // namespace pjax
