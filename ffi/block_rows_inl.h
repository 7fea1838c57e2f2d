// Rows of q8_0 and q4_0; see RowKernels for their layout. Part of row_kernels_inl.h.

constexpr int kGroupBlocks = 16;
constexpr int kGroupColumns = kGroupBlocks * kBlock;

// Bytes of the 16 lanes of one vector of codes, four to a lane.
constexpr int kVectorBytes = 4 * kGroupBlocks;

// Registers that the 16 lanes fill.
constexpr int kParts = kGroupBlocks / Vector::kLanes;

// Bytes behind a vector of codes that a kernel may read: scales follow the last one.
constexpr int kReadBehind = 4;

// Activations below this count as zero: their scale, or its inverse, would not be a normal number.
constexpr float kSmallestInput = 0x1p-110f;

constexpr int32_t kInfinityBits = 0x7f800000;

// x of one group. The codes lie as those of q8_0, 16 lanes whatever the number of blocks; missing ones are zero.
struct PreparedGroup {
  int8_t codes[kGroupColumns];
  float scales[kGroupBlocks];
  int32_t starts[kGroupBlocks];  // minus the offset of the codes times the sum of the block's x: the sums start here
};

struct ByteRow {
  static constexpr WeightType kType = WeightType::kQ8_0;
  static constexpr int kVectors = 8;
  static constexpr int kOffset = Vector::kByteOffset;
  template <int num_tokens, typename Load>
  static void Dots(const Load& load, const int8_t* x, int64_t stride, Vector::Ints* sums) {
    Vector::DotBytes<num_tokens>(load, x, stride, sums);
  }

  // Sums lie as the codes do, 16 lanes in any group: sum 64 v + 4 l + k is weight 4 v + k of block l.
  template <int num_rows>
  static void Add(const char* const* codes, const float (*factors)[kGroupBlocks], float* sums) {
    constexpr int kBlocksPerVector = Vector::kLanes / 4;
#pragma GCC unroll 1
    for (int first = 0; first < kGroupBlocks; first += kBlocksPerVector) {
      Vector::Floats repeated[num_rows];
#pragma GCC unroll 4
      for (int r = 0; r < num_rows; ++r) repeated[r] = Vector::RepeatFourTimes(factors[r] + first);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        const int start = v * kVectorBytes + 4 * first;
        Vector::Floats sum = Vector::Load(sums + start);
#pragma GCC unroll 4
        for (int r = 0; r < num_rows; ++r) {
          sum = Vector::MultiplyAdd(Vector::LoadBytes(codes[r] + start), repeated[r], sum);
        }
        Vector::Store(sums + start, sum);
      }
    }
  }

  static void ToMemoryOrder(const float* sums, float* y) {
    for (int block = 0; block < kGroupBlocks; ++block) {
      for (int v = 0; v < kVectors; ++v) memcpy(y + block * kBlock + 4 * v, sums + v * kVectorBytes + 4 * block, 16);
    }
  }
};

struct NibbleRow {
  static constexpr WeightType kType = WeightType::kQ4_0;
  static constexpr int kVectors = 4;
  static constexpr int kOffset = 8;
  template <int num_tokens, typename Load>
  static void Dots(const Load& load, const int8_t* x, int64_t stride, Vector::Ints* sums) {
    Vector::DotNibbles<num_tokens>(load, x, stride, sums);
  }

  // Sum 16 i + l is weight i of block l.
  template <int num_rows>
  static void Add(const char* const* codes, const float (*factors)[kGroupBlocks], float* sums) {
#pragma GCC unroll 2
    for (int part = 0; part < kParts; ++part) {
      const int lane = part * Vector::kLanes;
      Vector::Floats factor[num_rows];
#pragma GCC unroll 4
      for (int r = 0; r < num_rows; ++r) factor[r] = Vector::Load(factors[r] + lane);
#pragma GCC unroll 1
      for (int j = 0; j < kVectors; ++j) {
#pragma GCC unroll 8
        for (int nibble = 0; nibble < 8; ++nibble) {
          const int weight = 8 * j + nibble / 2 + nibble % 2 * 4;
          float* out = sums + weight * kGroupBlocks + lane;
          Vector::Floats sum = Vector::Load(out);
#pragma GCC unroll 4
          for (int r = 0; r < num_rows; ++r) {
            const char* words = codes[r] + j * kVectorBytes + 4 * lane;
            sum = Vector::MultiplyAdd(Vector::LoadNibbles(words, nibble), factor[r], sum);
          }
          Vector::Store(out, sum);
        }
      }
    }
  }

  static void ToMemoryOrder(const float* sums, float* y) {
    for (int block = 0; block < kGroupBlocks; block += 4) {
      for (int weight = 0; weight < kBlock; weight += 4) {
        Vector::Transpose4(sums + weight * kGroupBlocks + block, kGroupBlocks, y + block * kBlock + weight, kBlock);
      }
    }
  }
};

// The scale of a block with this largest magnitude, given as the bits of a float32.
float ScaleOf(int32_t magnitude_bits) {
  if (magnitude_bits >= kInfinityBits) return __builtin_nanf("");
  float magnitude;
  memcpy(&magnitude, &magnitude_bits, sizeof(magnitude));
  return magnitude < kSmallestInput ? 0.0f : magnitude / 127.0f;
}

template <typename Row>
struct BlockKernels {
  using Floats = Vector::Floats;
  static constexpr int64_t kBlockBytes = Row::kVectors * 4;
  static constexpr int64_t kGroupBytes = kGroupBlocks * kBlockBytes;
  static constexpr int64_t kScaleBytes = 2;

  // Without sign, so that they are shifts.
  static int64_t NumBlocks(int64_t size) { return static_cast<uint64_t>(size) / kBlock; }
  static int64_t NumGroups(int64_t size) { return static_cast<uint64_t>(size) / kGroupColumns; }

  static int64_t RowBytes(int64_t size) { return NumBlocks(size) * (kBlockBytes + kScaleBytes); }
  static int64_t PreparedBytes(int64_t size) {
    return (size + kGroupColumns - 1) / kGroupColumns * static_cast<int64_t>(sizeof(PreparedGroup));
  }

  static const char* ScalesOf(const void* row, int64_t size, int64_t group) {
    return static_cast<const char*>(row) + NumBlocks(size) * kBlockBytes + group * kGroupBlocks * kScaleBytes;
  }

  // What lies behind the whole groups: the last codes and the scales.
  static void PrefetchRest(const void* row, int64_t size) {
    const char* line = static_cast<const char*>(row) + NumGroups(size) * kGroupBytes;
    const char* end = static_cast<const char*>(row) + RowBytes(size);
#pragma GCC unroll 1
    for (; line < end; line += kLineBytes) __builtin_prefetch(line, 0, 3);
  }

  static void Prepare(const float* x, int64_t size, void* prepared) {
    auto* group = static_cast<PreparedGroup*>(prepared);
    for (int64_t start = 0; start < size; start += kGroupColumns, ++group) {
      const int64_t rest = (size - start) / kBlock;
      const int num_blocks = static_cast<int>(rest < kGroupBlocks ? rest : kGroupBlocks);
      if (num_blocks < kGroupBlocks) memset(group, 0, sizeof(*group));
      for (int block = 0; block < num_blocks; ++block) {
        const float* from = x + start + block * kBlock;
        const float scale = ScaleOf(Vector::MagnitudeBits(from));
        int8_t codes[kBlock];
        Vector::RoundBlock(from, scale > 0 ? 1.0f / scale : 0.0f, codes);  // any codes will do beside a scale of NaN
        group->scales[block] = scale;
        for (int v = 0; v < kBlock / 4; ++v) memcpy(group->codes + v * kVectorBytes + 4 * block, codes + 4 * v, 4);
      }
      SumCodes(group);
    }
  }

  // The sums of x are its products with weights of one.
  static void SumCodes(PreparedGroup* group) {
    alignas(64) int8_t ones[kVectorBytes];
    memset(ones, 1 - Vector::kByteOffset, sizeof(ones));
    const auto load = [&](int) { return Vector::LoadInts(ones); };
    for (int lane = 0; lane < kGroupBlocks; lane += Vector::kLanes) {
      Vector::Ints sum = Vector::ZeroInts();
      Vector::DotBytes<1>(load, group->codes + 4 * lane, 0, &sum);
      Vector::StoreInts(group->starts + lane, sum);
    }
    for (int32_t& start : group->starts) start *= -Row::kOffset;
  }

  template <int num_tokens>
  static void Dots(const void* row, const char* prepared, int64_t stride, int64_t size, const void* next,
                   float* products) {
    const int64_t num_groups = NumGroups(size);
    const auto* codes = static_cast<const char*>(row);
    const char* scales = ScalesOf(row, size, 0);
    Floats sums[num_tokens][kParts];
#pragma GCC unroll 8
    for (auto& parts : sums) {
      for (Floats& sum : parts) sum = Vector::Zero();
    }

    const auto add = [&](int part, int64_t g, const auto& load, Floats weight_scales) {
      const int lane = part * Vector::kLanes;
      const char* x = prepared + g * static_cast<int64_t>(sizeof(PreparedGroup));
      const auto group = [&](int t) { return reinterpret_cast<const PreparedGroup*>(x + t * stride); };
      Vector::Ints totals[num_tokens];
#pragma GCC unroll 8
      for (int t = 0; t < num_tokens; ++t) totals[t] = Vector::LoadInts(group(t)->starts + lane);
      Row::template Dots<num_tokens>(load, group(0)->codes + 4 * lane, stride, totals);
#pragma GCC unroll 8
      for (int t = 0; t < num_tokens; ++t) {
        const Floats scaled = Vector::Multiply(Vector::ToFloats(totals[t]), Vector::Load(group(t)->scales + lane));
        sums[t][part] = Vector::MultiplyAdd(scaled, weight_scales, sums[t][part]);
      }
    };

    for (int64_t g = 0; g < num_groups; ++g) {
      PrefetchLines(next, g * kGroupBytes, kGroupBytes);
#pragma GCC unroll 2
      for (int part = 0; part < kParts; ++part) {
        const char* lanes = codes + g * kGroupBytes + 4 * part * Vector::kLanes;
        const char* group_scales = scales + (g * kGroupBlocks + part * Vector::kLanes) * kScaleBytes;
        add(part, g, [&](int v) { return Vector::LoadInts(lanes + v * kVectorBytes); },
            Vector::LoadHalfs(group_scales));
      }
    }
    const int rest = static_cast<int>(NumBlocks(size) - num_groups * kGroupBlocks);
    for (int part = 0; part * Vector::kLanes < rest; ++part) {
      const int first = part * Vector::kLanes, count = rest - first;
      const char* lanes = codes + num_groups * kGroupBytes + 4 * first;
      add(part, num_groups, [&](int v) { return Vector::LoadSomeInts(lanes + v * 4 * rest, count); },
          Vector::LoadSomeHalfs(scales + (num_groups * kGroupBlocks + first) * kScaleBytes, count));
    }
    PrefetchRest(next, size);
#pragma GCC unroll 8
    for (int t = 0; t < num_tokens; ++t) {
      for (int part = 1; part < kParts; ++part) sums[t][0] = Vector::Add(sums[t][0], sums[t][part]);
      products[t] = Vector::Sum(sums[t][0]);
    }
  }

  static bool JoinsRows(int64_t size) {
    return Vector::kJoinsRows && size > 0 && NumBlocks(size) <= kGroupBlocks / 2;
  }

  // x of n blocks for each of the rows that share a vector: lane `lanes` r + l is block l of row r.
  static void Repeat(const PreparedGroup& x, int num_blocks, int lanes, PreparedGroup* repeated) {
    memset(repeated, 0, sizeof(*repeated));
    for (int lane = 0; lane < kGroupBlocks; ++lane) {
      const int block = lane % lanes;
      if (block >= num_blocks) continue;
      for (int v = 0; v < kBlock / 4; ++v) {
        memcpy(repeated->codes + v * kVectorBytes + 4 * lane, x.codes + v * kVectorBytes + 4 * block, 4);
      }
      repeated->scales[lane] = x.scales[block];
      repeated->starts[lane] = x.starts[block];
    }
  }

  // Rows of few blocks, 16 / lanes of them in a vector. V is Vector, in a template so that one that cannot join compiles.
  template <typename V, int lanes>
  static void DotJoinedRows(const char* rows, int64_t row_stride, int64_t num_rows, const PreparedGroup& prepared,
                            int64_t size, float* products) {
    constexpr int kTogether = kGroupBlocks / lanes;
    const int num_blocks = static_cast<int>(NumBlocks(size));
    PreparedGroup x;
    Repeat(prepared, num_blocks, lanes, &x);
    const auto dot = [&](const char* row, int count, float* to) {
      typename V::Ints codes[Row::kVectors];
      for (auto& vector : codes) vector = V::ZeroInts();
      typename V::Halfs halfs = V::ZeroHalfs();
#pragma GCC unroll 16
      for (int r = 0; r < kTogether; ++r, row += row_stride) {
        const int width = r < count ? num_blocks : 0;
#pragma GCC unroll 8
        for (int v = 0; v < Row::kVectors; ++v) {
          codes[v] = V::JoinInts(codes[v], row + v * 4 * num_blocks, r * lanes, width);
        }
        halfs = V::JoinHalfs(halfs, row + num_blocks * kBlockBytes, r * lanes, width);
      }
      typename V::Ints total = V::LoadInts(x.starts);
      Row::template Dots<1>([&](int v) { return codes[v]; }, x.codes, 0, &total);
      const Floats scaled = V::Multiply(V::ToFloats(total), V::Load(x.scales));
      V::template StoreSums<lanes>(V::Multiply(scaled, V::ToFloats(halfs)), count, to);
    };
    const char* line = rows + kStreamAheadBytes;
    int64_t r = 0;
    for (; r + kTogether <= num_rows; r += kTogether, rows += kTogether * row_stride) {
#pragma GCC unroll 1
      for (; line < rows + kTogether * row_stride + kStreamAheadBytes; line += kLineBytes) {
        __builtin_prefetch(line, 0, 3);
      }
      dot(rows, kTogether, products + r);
    }
    if (r < num_rows) dot(rows, static_cast<int>(num_rows - r), products + r);
  }

  static void DotRows(const void* rows, int64_t row_stride, int64_t num_rows, const void* prepared, int64_t size,
                      float* products) {
    if constexpr (Vector::kJoinsRows) {
      const auto& x = *static_cast<const PreparedGroup*>(prepared);
      const auto* row = static_cast<const char*>(rows);
      const int64_t n = NumBlocks(size);
      if (n == 1) return DotJoinedRows<Vector, 1>(row, row_stride, num_rows, x, size, products);
      if (n == 2) return DotJoinedRows<Vector, 2>(row, row_stride, num_rows, x, size, products);
      if (n == 3 || n == 4) return DotJoinedRows<Vector, 4>(row, row_stride, num_rows, x, size, products);
      if (n >= 5 && n <= 8) return DotJoinedRows<Vector, 8>(row, row_stride, num_rows, x, size, products);
    }
    DotRowByRow<BlockKernels>(rows, row_stride, num_rows, prepared, size, products);
  }

  // A partial last group of some rows, spread to 16 lanes: those that it lacks have factors of zero.
  template <int num_rows>
  struct LastGroup {
    alignas(64) char codes[num_rows][kGroupBytes + kReadBehind];
    alignas(64) float factors[num_rows][kGroupBlocks];
  };

  template <int num_rows>
  static void Spread(const void* const* rows, const float* coefficients, int64_t size, int num_blocks,
                     LastGroup<num_rows>* last) {
    for (int r = 0; r < num_rows; ++r) {
      const char* codes = static_cast<const char*>(rows[r]) + NumGroups(size) * kGroupBytes;
      const char* scales = ScalesOf(rows[r], size, NumGroups(size));
      for (int lane = 0; lane < kGroupBlocks; lane += Vector::kLanes) {
        const int count = num_blocks > lane ? num_blocks - lane : 0;
        const Floats scale = Vector::LoadSomeHalfs(scales + lane * kScaleBytes, count);
        Vector::Store(last->factors[r] + lane, Vector::Multiply(scale, Vector::Broadcast(coefficients[r])));
        for (int v = 0; v < Row::kVectors; ++v) {
          Vector::StoreInts(last->codes[r] + v * kVectorBytes + 4 * lane,
                            Vector::LoadSomeInts(codes + (v * num_blocks + lane) * 4, count));
        }
      }
    }
  }

  template <int num_rows>
  static void AddRows(const void* const* rows, const float* coefficients, float* sums, int64_t size,
                      const void* const* next) {
    const int64_t num_groups = NumGroups(size);
    const int rest = static_cast<int>(NumBlocks(size) - num_groups * kGroupBlocks);
    alignas(64) float factors[num_rows][kGroupBlocks];
    const char* codes[num_rows];
    for (int64_t g = 0; g < num_groups; ++g) {
#pragma GCC unroll 4
      for (int r = 0; r < num_rows; ++r) {
        PrefetchLines(next[r], g * kGroupBytes, kGroupBytes);
        codes[r] = static_cast<const char*>(rows[r]) + g * kGroupBytes;
        const char* scales = ScalesOf(rows[r], size, g);
        for (int lane = 0; lane < kGroupBlocks; lane += Vector::kLanes) {
          const Floats scale = Vector::LoadHalfs(scales + lane * kScaleBytes);
          Vector::Store(factors[r] + lane, Vector::Multiply(scale, Vector::Broadcast(coefficients[r])));
        }
      }
      Row::template Add<num_rows>(codes, factors, sums + g * kGroupColumns);
    }
    for (int r = 0; r < num_rows; ++r) PrefetchRest(next[r], size);
    if (rest == 0) return;
    LastGroup<num_rows> last;
    Spread<num_rows>(rows, coefficients, size, rest, &last);
    for (int r = 0; r < num_rows; ++r) codes[r] = last.codes[r];
    Row::template Add<num_rows>(codes, last.factors, sums + num_groups * kGroupColumns);
  }

  static void Unpack(const void* row, int64_t size, int64_t first, int64_t count, float* columns) {
    const float one = 1.0f;
    for (int64_t start = first; start < first + count; start += kGroupColumns, columns += kGroupColumns) {
      const int64_t g = start / kGroupColumns, rest = NumBlocks(size) - g * kGroupBlocks;
      LastGroup<1> spread;
      const char* codes = static_cast<const char*>(row) + g * kGroupBytes;
      if (rest < kGroupBlocks) {
        Spread<1>(&row, &one, size, static_cast<int>(rest), &spread);
        codes = spread.codes[0];
      } else {
        for (int lane = 0; lane < kGroupBlocks; lane += Vector::kLanes) {
          Vector::Store(spread.factors[0] + lane, Vector::LoadHalfs(ScalesOf(row, size, g) + lane * kScaleBytes));
        }
      }
      memset(columns, 0, kGroupColumns * sizeof(float));
      Row::template Add<1>(&codes, spread.factors, columns);
    }
  }

  static void Finish(const float* sums, int64_t stride, int64_t num_sums, int64_t size, float* y) {
    alignas(64) float total[kGroupColumns], ordered[kGroupColumns];
    for (int64_t start = 0; start < size; start += kGroupColumns) {
      AddSums<kGroupColumns>(sums + start, stride, num_sums, total);
      const bool whole = size - start >= kGroupColumns;
      Row::ToMemoryOrder(total, whole ? y + start : ordered);
      if (!whole) memcpy(y + start, ordered, (size - start) * sizeof(float));
    }
  }

  static constexpr RowKernels kTable = {Row::kType, kGroupColumns, kBlock, RowBytes, PreparedBytes, Prepare,
                                        DotTokens<BlockKernels, Vector::kBlockTokens>, DotRows, JoinsRows,
                                        AddAnyRows<BlockKernels>, Finish, Unpack, TransposePanel, MultiplyPanel<Vector::kPanelTokens>,
                                        SumWords};
};
