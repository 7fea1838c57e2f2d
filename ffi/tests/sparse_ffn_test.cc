// The sparse FFN against double precision over awkward sizes; the same bits for every number of threads, for rows
// bundled or in three matrices, and whatever the other tokens of the batch.
#include "sparse_ffn.h"

#include <math.h>

#include "testing.h"

namespace pjax {
namespace {

struct Function {
  const char* name;
  float threshold;
  double (*curve)(double);  // of what is above the threshold; nullptr: as it is
  bool rectify_up = false;
};

constexpr Function kRelu{"relu", 0, nullptr};
constexpr Function kDrelu{"drelu", 0, nullptr, true};  // gated only

double Square(double x) { return x * x; }
double Silu(double x) { return x / (1 + exp(-x)); }
double Gelu(double x) { return x / 2 * erfc(-x / sqrt(2)); }
double GeluTanh(double x) { return x / 2 * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x))); }

struct Case {
  int64_t batch, neurons, model;
  bool gated, biased, every_neuron;
  double density;  // share of true mask entries; negative: no mask
  Function activation = kRelu;
};

struct Data {
  WeightType type;
  Weights gate, up, down;
  std::vector<float> gate_bias, up_bias, x;
  std::vector<uint8_t> mask;
};

struct Result {
  std::vector<float> y;
  std::vector<int32_t> counts;  // predicted, computed, active; [3, batch]
};

std::string Text(const std::string& kernels, const Case& c) {
  return kernels + ", batch " + std::to_string(c.batch) + ", neurons " + std::to_string(c.neurons) + ", model " +
         std::to_string(c.model) + (c.gated ? ", gated" : "") + (c.biased ? ", biased" : "") +
         (c.every_neuron ? ", every neuron" : "") + ", density " + std::to_string(c.density) + ", " +
         c.activation.name;
}

Data MakeData(const Case& c, WeightType type) {
  std::mt19937 rng(c.neurons * 7919 + c.model);
  const auto weights = [&] { return Weights(rng, type, c.neurons, c.model); };
  Data data{type,                           weights(),                      weights(),
            weights(),
            RandomFloats(rng, c.neurons),   RandomFloats(rng, c.neurons),   RandomFloats(rng, c.batch * c.model),
            std::vector<uint8_t>(c.batch * c.neurons)};
  for (uint8_t& bit : data.mask) bit = std::uniform_real_distribution<double>()(rng) < c.density;
  return data;
}

// The rows of each neuron one after the other.
std::vector<char> Bundle(const Case& c, const Data& data) {
  std::vector<char> bundle;
  for (int64_t n = 0; n < c.neurons; ++n) {
    for (const Weights* weights : {&data.gate, &data.up, &data.down}) {
      if (weights == &data.gate && !c.gated) continue;
      const char* row = weights->bytes.data() + n * weights->row_bytes;
      bundle.insert(bundle.end(), row, row + weights->row_bytes);
    }
  }
  return bundle;
}

Result Run(const Case& c, const Data& data, const RowKernels& kernels, int num_threads, bool bundled = false) {
  ThreadPool pool(num_threads);
  Result result{std::vector<float>(c.batch * c.model, NAN), std::vector<int32_t>(3 * c.batch, -1)};
  FfnArgs args{};
  args.gate = c.gated ? data.gate.bytes.data() : nullptr;
  args.up = data.up.bytes.data();
  args.down = data.down.bytes.data();
  args.row_stride = data.up.row_bytes;
  const std::vector<char> bundle = bundled ? Bundle(c, data) : std::vector<char>();
  if (bundled) {
    args.gate = c.gated ? bundle.data() : nullptr;
    args.up = bundle.data() + (c.gated ? 1 : 0) * args.row_stride;
    args.down = bundle.data() + (c.gated ? 2 : 1) * args.row_stride;
    args.row_stride *= c.gated ? 3 : 2;
  }
  args.gate_bias = c.gated && c.biased ? data.gate_bias.data() : nullptr;
  args.up_bias = c.biased ? data.up_bias.data() : nullptr;
  args.x = data.x.data();
  args.mask = c.density < 0 ? nullptr : data.mask.data();
  args.batch = c.batch;
  args.neurons = c.neurons;
  args.model = c.model;
  args.activation = *ActivationNamed(c.activation.name, c.activation.threshold);
  args.every_neuron = c.every_neuron;
  args.y = result.y.data();
  args.predicted = result.counts.data();
  args.computed = result.counts.data() + c.batch;
  args.active = result.counts.data() + 2 * c.batch;
  SparseFfn(args, kernels, pool);
  return result;
}

double Product(const Weights& weights, int64_t row, const std::vector<double>& x, int64_t model) {
  double sum = 0;
  for (int64_t i = 0; i < model; ++i) sum += weights.values[row * model + i] * x[i];
  return sum;
}

void CheckToken(const Case& c, const Data& data, const Result& result, int64_t token, const std::string& text) {
  const std::vector<double> x = AsPrepared(data.type, data.x.data() + token * c.model, c.model);
  std::vector<double> expected(c.model), magnitude(c.model);
  int32_t predicted = 0, open = 0;
  for (int64_t n = 0; n < c.neurons; ++n) {
    if (c.density >= 0 && data.mask[token * c.neurons + n] == 0) continue;
    ++predicted;
    const double up = Product(data.up, n, x, c.model) + (c.biased ? data.up_bias[n] : 0);
    const double opener = c.gated ? Product(data.gate, n, x, c.model) + (c.biased ? data.gate_bias[n] : 0) : up;
    const bool is_open = opener > c.activation.threshold && !(c.activation.rectify_up && up <= 0);
    open += is_open;
    const double opened = c.activation.curve != nullptr ? c.activation.curve(opener) : opener;
    const double value = is_open ? opened * (c.gated ? up : 1) : 0;
    // The error of each product is bounded by its terms, about model of size 1 each; so is the product's own size.
    for (int64_t i = 0; i < c.model; ++i) {
      expected[i] += value * data.down.values[n * c.model + i];
      const double slope = (c.gated ? fabs(up) + fabs(opener) + 1 : 1) * 2 * (fabs(opener) + 1);
      const double size = fabs(value) + (c.model + 10) * slope;
      magnitude[i] += size * fabs(data.down.values[n * c.model + i]);
    }
  }
  for (int64_t i = 0; i < c.model; ++i) {
    const double error = fabs(result.y[token * c.model + i] - expected[i]);
    PJAX_CHECK(error <= SumTolerance(c.neurons + c.model, magnitude[i]), text + ", column " + std::to_string(i));
  }
  PJAX_CHECK(result.counts[token] == predicted, text);
  PJAX_CHECK(result.counts[c.batch + token] == (c.every_neuron ? predicted : open), text);
  // Functions that never close may still underflow to zero.
  const bool closes = c.activation.threshold >= 0;
  PJAX_CHECK(result.counts[2 * c.batch + token] == open || !closes, text);
}

void Check(const Case& c) {
  ForEachKernels([&](const RowKernels& kernels, WeightType type, const std::string& kernels_text) {
    const std::string text = Text(kernels_text, c);
    if (c.model % kernels.columns_per_scale != 0) return;
    const Data data = MakeData(c, type);
    const Result first = Run(c, data, kernels, 1);
    for (int64_t token = 0; token < c.batch; ++token) CheckToken(c, data, first, token, text);
    // What is small stays on one thread.
    const bool small = kernels.row_bytes(c.model) * c.neurons * c.batch < (1 << 19);
    for (int num_threads = small ? 1 : 2; num_threads <= (small ? 1 : 4); ++num_threads) {
      const Result again = Run(c, data, kernels, num_threads, small || num_threads % 2 == 0);
      PJAX_CHECK(SameBits(first.y, again.y), text);
      PJAX_CHECK(first.counts == again.counts, text);
    }
  });
}

// A token's result must not depend on the tokens beside it.
void CheckTokensAlone() {
  const Case together{8, 300, 544, true, true, false, 0.3}, alone{1, 300, 544, true, true, false, 0.3};
  ForEachKernels([&](const RowKernels& kernels, WeightType type, const std::string& kernels_text) {
    if (together.model % kernels.columns_per_scale != 0) return;
    Data data = MakeData(together, type);
    const Result expected = Run(together, data, kernels, 2);
    const std::vector<float> x = data.x;
    const std::vector<uint8_t> mask = data.mask;
    for (int64_t token = 0; token < together.batch; ++token) {
      data.x.assign(x.begin() + token * alone.model, x.begin() + (token + 1) * alone.model);
      data.mask.assign(mask.begin() + token * alone.neurons, mask.begin() + (token + 1) * alone.neurons);
      const auto first = expected.y.begin() + token * alone.model;
      PJAX_CHECK(SameBits(Run(alone, data, kernels, 1).y, {first, first + alone.model}), Text(kernels_text, together));
    }
  });
}

// A gate that is not a number must reach the output: skipping it would hide that the model is broken.
void CheckNan() {
  for (const Function& activation : {kRelu, kDrelu, Function{"relu2", 0, Square}}) {
    const Case c{1, 8, 32, true, true, false, -1, activation};
    ForEachKernels([&](const RowKernels& kernels, WeightType type, const std::string& kernels_text) {
      Data data = MakeData(c, type);
      data.gate_bias[5] = NAN;
      data.up_bias[5] = 1e5f;  // open, whatever the weights
      PJAX_CHECK(isnan(Run(c, data, kernels, 1).y[0]), Text(kernels_text, c));
    });
  }
}

// Neurons whose gate is open and whose up is not leave groups of down rows with a gap, or with no row at all.
void CheckClosedGroups() {
  for (int64_t first : {0, 4, 8, 3}) {
    for (int64_t count : {1, 4, 5, 12}) {
      const Case c{1, 12, 96, true, true, false, -1, kDrelu};
      ForEachKernels([&](const RowKernels& kernels, WeightType type, const std::string& kernels_text) {
        Data data = MakeData(c, type);
        for (int64_t n = 0; n < c.neurons; ++n) {
          data.gate_bias[n] = 1e5f;
          data.up_bias[n] = n >= first && n < first + count ? -1e5f : 1e5f;
        }
        CheckToken(c, data, Run(c, data, kernels, 1), 0, Text(kernels_text, c));
      });
    }
  }
}

}  // namespace
}  // namespace pjax

int main() {
  using namespace pjax;
  const Function functions[] = {kRelu,
                                kDrelu,
                                {"relu2", 0, Square},
                                {"fatrelu", 0.01f, nullptr},
                                {"fatrelu", 0.7f, nullptr},
                                {"silu", -INFINITY, Silu},
                                {"gelu", -INFINITY, Gelu},
                                {"gelu_pytorch_tanh", -INFINITY, GeluTanh}};
  for (const Function& activation : functions) {
    for (bool gated : {true, false}) {
      if (!gated && activation.rectify_up) continue;
      for (int64_t model : {33, 96}) {
        for (double density : {-1.0, 0.4}) Check({2, 33, model, gated, true, false, density, activation});
        Check({1, 33, model, gated, true, true, -1, activation});
      }
    }
  }
  for (bool gated : {true, false}) {
    for (int64_t neurons : {0, 1, 7}) {
      for (int64_t model : {1, 7, 32, 544}) {
        for (double density : {0.0, 0.4, 1.0}) Check({2, neurons, model, gated, neurons != 7, false, density});
      }
    }
    Check({0, 33, 64, gated, true, false, 0.5});
    // Several ranges; several forks; float types, then all.
    Check({9, 1000, 257, gated, true, false, 0.2});
    Check({9, 1000, 512, gated, true, false, 0.2});
    Check({1, 1000, 480, gated, false, true, -1});
  }
  CheckClosedGroups();
  CheckTokensAlone();
  CheckNan();
  return 0;
}
