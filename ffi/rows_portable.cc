// Row kernels for any CPU: short loops over arrays, which compilers turn into the baseline's vectors.
#include <string.h>

#include "row_kernels.h"

namespace pjax {
namespace {

struct Vector {
  static constexpr int kLanes = 16;
  static constexpr int kAccumulators = 2;
  static constexpr int kFloatTokens = 1, kBlockTokens = 1, kPanelTokens = 1;
  static constexpr bool kJoinsRows = false;
  static constexpr int kByteOffset = 0;
  struct Floats {
    float lane[kLanes];
  };
  struct Ints {
    int32_t lane[kLanes];
  };

  static Floats Zero() { return Floats{}; }
  static Floats Broadcast(float value) {
    Floats out;
    for (float& lane : out.lane) lane = value;
    return out;
  }
  static Floats Load(const float* from) {
    Floats out;
    memcpy(out.lane, from, sizeof(out.lane));
    return out;
  }
  static void Store(float* to, const Floats& value) { memcpy(to, value.lane, sizeof(value.lane)); }
  static Floats Add(Floats a, const Floats& b) {
    for (int i = 0; i < kLanes; ++i) a.lane[i] += b.lane[i];
    return a;
  }
  static Floats Multiply(Floats a, const Floats& b) {
    for (int i = 0; i < kLanes; ++i) a.lane[i] *= b.lane[i];
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

  static Floats LoadEven(const uint16_t* pairs) { return LoadHalfOf(pairs, 0); }
  static Floats LoadOdd(const uint16_t* pairs) { return LoadHalfOf(pairs, 1); }
  static Floats LoadHalfs(const void* from) {
    uint16_t halfs[kLanes];
    memcpy(halfs, from, sizeof(halfs));
    Floats out;
    for (int i = 0; i < kLanes; ++i) out.lane[i] = FromHalf(halfs[i]);
    return out;
  }
  static Floats LoadSomeHalfs(const void* from, int count) {
    uint16_t halfs[kLanes] = {};
    memcpy(halfs, from, (count < kLanes ? count : kLanes) * sizeof(halfs[0]));
    return LoadHalfs(halfs);
  }
  static Floats LoadBytes(const void* from) {
    int8_t bytes[kLanes];
    memcpy(bytes, from, sizeof(bytes));
    Floats out;
    for (int i = 0; i < kLanes; ++i) out.lane[i] = bytes[i];
    return out;
  }

  static Ints LoadInts(const void* from) {
    Ints out;
    memcpy(out.lane, from, sizeof(out.lane));
    return out;
  }
  static Ints LoadSomeInts(const void* from, int count) {
    Ints out = {};
    memcpy(out.lane, from, (count < kLanes ? count : kLanes) * sizeof(out.lane[0]));
    return out;
  }
  static void StoreInts(void* to, const Ints& value) { memcpy(to, value.lane, sizeof(value.lane)); }
  static Floats ToFloats(const Ints& value) {
    Floats out;
    for (int i = 0; i < kLanes; ++i) out.lane[i] = static_cast<float>(value.lane[i]);
    return out;
  }
  static Ints ZeroInts() { return Ints{}; }

  static Floats RepeatFourTimes(const float* from) {
    Floats out;
    for (int i = 0; i < kLanes; ++i) out.lane[i] = from[i / 4];
    return out;
  }
  static Floats LoadNibbles(const char* words, int i) {
    const Ints ints = LoadInts(words);
    Floats out;
    for (int l = 0; l < kLanes; ++l) {
      const uint32_t shifted = static_cast<uint32_t>(ints.lane[l]) >> (4 * i);
      out.lane[l] = static_cast<float>(static_cast<int32_t>(shifted & 15) - 8);
    }
    return out;
  }
  static int32_t MagnitudeBits(const float* block) {
    int32_t largest = 0;
    for (int i = 0; i < 32; ++i) {
      const int32_t bits = BitsOf(block[i]) & 0x7fffffff;
      largest = largest > bits ? largest : bits;
    }
    return largest;
  }
  // A float of 1.5 * 2^23 has no bits left for fractions: adding it rounds, to nearest even as the other levels do.
  static void RoundBlock(const float* block, float factor, int8_t* codes) {
    constexpr float kNoFraction = 12582912.0f;
    for (int i = 0; i < 32; ++i) codes[i] = static_cast<int8_t>(BitsOf(block[i] * factor + kNoFraction));
  }
  static void Transpose4(const float* from, int64_t stride, float* to, int64_t to_stride) {
    for (int i = 0; i < 4; ++i) {
      for (int j = 0; j < 4; ++j) to[i * to_stride + j] = from[j * stride + i];
    }
  }

  template <int num_tokens, typename Load>
  static void DotBytes(const Load& load, const int8_t* x, int64_t stride, Ints* sums) {
    for (int v = 0; v < 8; ++v) {
      int8_t w[4 * kLanes];
      StoreInts(w, load(v));
      for (int t = 0; t < num_tokens; ++t) {
        const int8_t* token = x + t * stride + 64 * v;
        for (int i = 0; i < 4 * kLanes; ++i) sums[t].lane[i / 4] += w[i] * token[i];
      }
    }
  }
  template <int num_tokens, typename Load>
  static void DotNibbles(const Load& load, const int8_t* x, int64_t stride, Ints* sums) {
    for (int j = 0; j < 4; ++j) {
      uint8_t w[4 * kLanes];
      StoreInts(w, load(j));
      for (int t = 0; t < num_tokens; ++t) {
        const int8_t* token = x + t * stride + 128 * j;
        for (int i = 0; i < 4 * kLanes; ++i) {
          sums[t].lane[i / 4] += (w[i] & 15) * token[i] + (w[i] >> 4) * token[64 + i];
        }
      }
    }
  }

 private:
  static int32_t BitsOf(float value) {
    int32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
  }
  static float FloatOf(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
  }
  static Floats LoadHalfOf(const uint16_t* pairs, int parity) {
    Floats out;
    for (int i = 0; i < kLanes; ++i) out.lane[i] = FloatOf(static_cast<uint32_t>(pairs[2 * i + parity]) << 16);
    return out;
  }
  // The exponent's bias grows by 112; once more for infinity and NaN. A denormal is its bits times 2^-24, the last
  // digit of a float32 of 0.5: no float32 denormal arises, which may count as zero.
  static float FromHalf(uint16_t half) {
    constexpr uint32_t kRebias = 112u << 23, kHalf = 126u << 23;
    const uint32_t magnitude = half & 0x7fffu, sign = (half & 0x8000u) << 16;
    const uint32_t normal = (magnitude << 13) + (magnitude >= 0x7c00u ? 2 * kRebias : kRebias);
    const float denormal = FloatOf(kHalf | magnitude) - 0.5f;
    const uint32_t bits = magnitude < 0x400u ? static_cast<uint32_t>(BitsOf(denormal)) : normal;
    return FloatOf(bits | sign);
  }
};

}  // namespace
}  // namespace pjax

#include "row_kernels_inl.h"

namespace pjax {

const RowKernels& PortableKernels(WeightType type) { return KernelsOf(type); }

}  // namespace pjax
