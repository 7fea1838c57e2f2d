// Rows of float32, bfloat16 and float16. Part of row_kernels_inl.h.
//
// Within 32 columns, activations and sums are kept in the order in which registers of weights come out of memory: as
// stored, except for bfloat16, where the 16 even elements come before the 16 odd ones.

// Columns that are added up at a time: their totals stay in the first-level cache.
constexpr int64_t kTile = 512;

constexpr int kVectorsPerBlock = kBlock / Vector::kLanes;

struct Float32Row {
  using Element = float;
  static constexpr WeightType kType = WeightType::kFloat32;
  static constexpr bool kEvenOdd = false;
  static Vector::Floats Load(const float* block, int vector) { return Vector::Load(block + vector * Vector::kLanes); }
};

struct Bfloat16Row {
  using Element = uint16_t;
  static constexpr WeightType kType = WeightType::kBfloat16;
  static constexpr bool kEvenOdd = true;
  static Vector::Floats Load(const uint16_t* block, int vector) {
    const int lane = vector * Vector::kLanes;
    const uint16_t* pairs = block + 2 * (lane % (kBlock / 2));
    return lane < kBlock / 2 ? Vector::LoadEven(pairs) : Vector::LoadOdd(pairs);
  }
};

struct Float16Row {
  using Element = uint16_t;
  static constexpr WeightType kType = WeightType::kFloat16;
  static constexpr bool kEvenOdd = false;
  static Vector::Floats Load(const uint16_t* block, int vector) {
    return Vector::LoadHalfs(block + vector * Vector::kLanes);
  }
};

template <typename Row>
struct FloatKernels {
  using Floats = Vector::Floats;
  using Element = typename Row::Element;
  static constexpr int64_t kBlockBytes = kBlock * sizeof(Element);

  static int64_t RowBytes(int64_t size) { return size * sizeof(Element); }
  static int64_t PreparedBytes(int64_t size) { return (size + kBlock - 1) / kBlock * kBlock * sizeof(float); }

  // Whole blocks are moved without a test of the size, so that the compiler makes shuffles of them.
  static void ToLaneOrder(const float* from, float* to) {
    for (int64_t i = 0; i < kBlock / 2; ++i) {
      to[Row::kEvenOdd ? i : 2 * i] = from[2 * i];
      to[Row::kEvenOdd ? kBlock / 2 + i : 2 * i + 1] = from[2 * i + 1];
    }
  }

  static void FromLaneOrder(const float* from, float* to) {
    for (int64_t i = 0; i < kBlock / 2; ++i) {
      to[2 * i] = from[Row::kEvenOdd ? i : 2 * i];
      to[2 * i + 1] = from[Row::kEvenOdd ? kBlock / 2 + i : 2 * i + 1];
    }
  }

  static void Prepare(const float* x, int64_t size, void* prepared) {
    float* to = static_cast<float*>(prepared);
    int64_t start = 0;
    for (; start + kBlock <= size; start += kBlock) ToLaneOrder(x + start, to + start);
    if (start < size) {
      float rest[kBlock] = {};
      memcpy(rest, x + start, (size - start) * sizeof(float));
      ToLaneOrder(rest, to + start);
    }
  }

  template <int num_tokens>
  static void Dots(const void* row, const char* prepared, int64_t stride, int64_t size, const void* next,
                   float* products) {
    constexpr int kBlocksPerStep = Vector::kAccumulators / kVectorsPerBlock;
    const auto* weights = static_cast<const Element*>(row);
    const int64_t num_blocks = size / kBlock;
    Floats sums[num_tokens][Vector::kAccumulators];
#pragma GCC unroll 2
    for (auto& token_sums : sums) {
#pragma GCC unroll 8
      for (auto& sum : token_sums) sum = Vector::Zero();
    }

    const auto add_block = [&](const Element* block_weights, int64_t block, int first_sum) {
      const auto* x = reinterpret_cast<const float*>(prepared) + block * kBlock;
#pragma GCC unroll 8
      for (int v = 0; v < kVectorsPerBlock; ++v) {
        const Floats loaded = Row::Load(block_weights, v);
#pragma GCC unroll 2
        for (int t = 0; t < num_tokens; ++t) {
          const auto* factors = reinterpret_cast<const float*>(reinterpret_cast<const char*>(x) + t * stride);
          Floats& sum = sums[t][first_sum + v];
          sum = Vector::MultiplyAdd(loaded, Vector::Load(factors + v * Vector::kLanes), sum);
        }
      }
    };

    int64_t block = 0;
    for (; block + kBlocksPerStep <= num_blocks; block += kBlocksPerStep) {
#pragma GCC unroll 8
      for (int k = 0; k < kBlocksPerStep; ++k) {
        PrefetchLines(next, (block + k) * kBlockBytes, kBlockBytes);
        add_block(weights + (block + k) * kBlock, block + k, k * kVectorsPerBlock);
      }
    }
    for (; block < num_blocks; ++block) add_block(weights + block * kBlock, block, 0);
    if (const int64_t rest = size - num_blocks * kBlock; rest > 0) {
      // Reading past the end of the last row is not allowed, so the remainder goes through a zero-padded copy.
      Element padded[kBlock] = {};
      memcpy(padded, weights + num_blocks * kBlock, rest * sizeof(padded[0]));
      add_block(padded, num_blocks, 0);
    }

#pragma GCC unroll 2
    for (int t = 0; t < num_tokens; ++t) {
#pragma GCC unroll 8
      for (int width = Vector::kAccumulators / 2; width > 0; width /= 2) {
#pragma GCC unroll 8
        for (int i = 0; i < width; ++i) sums[t][i] = Vector::Add(sums[t][i], sums[t][i + width]);
      }
      products[t] = Vector::Sum(sums[t][0]);
    }
  }

  template <int num_rows>
  static void AddRows(const void* const* rows, const float* coefficients, float* sums, int64_t size,
                      const void* const* next) {
    const int64_t num_blocks = size / kBlock;
    const Element* weights[num_rows];
    Floats factors[num_rows];
#pragma GCC unroll 8
    for (int r = 0; r < num_rows; ++r) {
      weights[r] = static_cast<const Element*>(rows[r]);
      factors[r] = Vector::Broadcast(coefficients[r]);
    }

    const auto add_block = [&](const Element* const* blocks, int64_t block) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectorsPerBlock; ++v) {
        float* out = sums + block * kBlock + v * Vector::kLanes;
        Floats sum = Vector::Load(out);
#pragma GCC unroll 8
        for (int r = 0; r < num_rows; ++r) sum = Vector::MultiplyAdd(Row::Load(blocks[r], v), factors[r], sum);
        Vector::Store(out, sum);
      }
    };

    const Element* blocks[num_rows];
    for (int64_t block = 0; block < num_blocks; ++block) {
#pragma GCC unroll 8
      for (int r = 0; r < num_rows; ++r) {
        PrefetchLines(next[r], block * kBlockBytes, kBlockBytes);
        blocks[r] = weights[r] + block * kBlock;
      }
      add_block(blocks, block);
    }
    if (const int64_t rest = size - num_blocks * kBlock; rest > 0) {
      Element padded[num_rows][kBlock] = {};
      for (int r = 0; r < num_rows; ++r) {
        memcpy(padded[r], weights[r] + num_blocks * kBlock, rest * sizeof(padded[r][0]));
        blocks[r] = padded[r];
      }
      add_block(blocks, num_blocks);
    }
  }

  static void Unpack(const void* row, int64_t /*size*/, int64_t first, int64_t count, float* columns) {
    const auto* weights = static_cast<const Element*>(row);
    const auto unpack_block = [&](const Element* block, float* to) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectorsPerBlock; ++v) Vector::Store(to + v * Vector::kLanes, Row::Load(block, v));
    };
    int64_t i = 0;
    for (; i + kBlock <= count; i += kBlock) unpack_block(weights + first + i, columns + i);
    if (i == count) return;
    Element padded[kBlock] = {};
    memcpy(padded, weights + first + i, (count - i) * sizeof(padded[0]));
    unpack_block(padded, columns + i);
  }

  static void Finish(const float* sums, int64_t stride, int64_t num_sums, int64_t size, float* y) {
    int64_t start = 0;
    alignas(64) float total[kTile];
    for (; start + kTile <= size; start += kTile) {
      AddSums<kTile>(sums + start, stride, num_sums, total);
      for (int64_t i = 0; i < kTile; i += kBlock) FromLaneOrder(total + i, y + start + i);
    }
    for (; start < size; start += kBlock) {
      float ordered[kBlock];
      AddSums<kBlock>(sums + start, stride, num_sums, total);
      FromLaneOrder(total, ordered);
      memcpy(y + start, ordered, (size - start < kBlock ? size - start : kBlock) * sizeof(float));
    }
  }

  static bool JoinsRows(int64_t /*size*/) { return false; }

  static constexpr RowKernels kTable = {
      Row::kType, kBlock, 1, RowBytes, PreparedBytes, Prepare, DotTokens<FloatKernels, Vector::kFloatTokens>,
      DotRowByRow<FloatKernels>, JoinsRows, AddAnyRows<FloatKernels>, Finish, Unpack, TransposePanel,
      MultiplyPanel<Vector::kPanelTokens>, SumWords};
};
