// Attention kernels for any CPU: four lanes, which every baseline has and GCC and Clang write without intrinsics.
#include <string.h>

#include "attention_kernels.h"

namespace pjax {
namespace {

struct Vector {
  typedef float Floats __attribute__((vector_size(16)));
  typedef uint32_t Words __attribute__((vector_size(16)));
  static constexpr int kLanes = 4;
  static constexpr int kSums = 8;

  static Floats Zero() { return Broadcast(0); }
  static Floats Broadcast(float value) { return Floats{value, value, value, value}; }
  static Floats Load(const float* from) {
    Floats value;
    memcpy(&value, from, sizeof(value));
    return value;
  }
  static void Store(float* to, Floats value) { memcpy(to, &value, sizeof(value)); }
  static Floats Add(Floats a, Floats b) { return a + b; }
  static Floats Subtract(Floats a, Floats b) { return a - b; }
  static Floats Multiply(Floats a, Floats b) { return a * b; }
  static Floats MultiplyAdd(Floats a, Floats b, Floats sum) { return sum + a * b; }
  static Floats Max(Floats a, Floats b) { return a > b ? a : b; }

  static Floats SumEach(const Floats* of) {
    Floats sums;
    for (int i = 0; i < kLanes; ++i) sums[i] = (of[i][0] + of[i][2]) + (of[i][1] + of[i][3]);
    return sums;
  }

  static Floats PowerOfTwo(Floats shifted) { return Bits<Floats>((Bits<Words>(shifted) << 23) + 0x3f800000u); }
  static Floats ZeroBelow(Floats value, Floats x, Floats limit) { return x < limit ? Zero() : value; }

  static void Deinterleave(Floats* pair) {
    const Floats a = pair[0], b = pair[1];
    pair[0] = Floats{a[0], a[2], b[0], b[2]};
    pair[1] = Floats{a[1], a[3], b[1], b[3]};
  }
  static void Interleave(Floats* pair) {
    const Floats even = pair[0], odd = pair[1];
    pair[0] = Floats{even[0], odd[0], even[1], odd[1]};
    pair[1] = Floats{even[2], odd[2], even[3], odd[3]};
  }

  static void LoadPair(const float* from, Floats* pair) {
    pair[0] = Load(from);
    pair[1] = Load(from + kLanes);
  }
  // A bfloat16 is the upper half of a float32.
  static void LoadPair(const uint16_t* from, Floats* pair) {
    pair[0] = Bits<Floats>(Words{from[0], from[2], from[4], from[6]} << 16);
    pair[1] = Bits<Floats>(Words{from[1], from[3], from[5], from[7]} << 16);
  }
  template <typename Element>
  static void LoadPart(const Element* from, int64_t count, Floats* pair) {
    Element padded[2 * kLanes] = {};
    memcpy(padded, from, count * sizeof(Element));
    LoadPair(padded, pair);
  }

 private:
  template <typename To, typename From>
  static To Bits(const From& from) {
    static_assert(sizeof(To) == sizeof(From), "the bits are kept");
    To to;
    memcpy(&to, &from, sizeof(to));
    return to;
  }
};

}  // namespace
}  // namespace pjax

#include "attention_kernels_inl.h"

namespace pjax {

const AttentionKernels& PortableAttentionKernels(WeightType type) { return AttentionKernelsOf(type); }

}  // namespace pjax
