#include "activation.h"

#include <math.h>

#include <limits>

namespace pjax {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

float Square(float x) { return x * x; }

float Silu(float x) { return x / (1.0f + expf(-x)); }

float Gelu(float x) { return 0.5f * x * (1.0f + erff(x * static_cast<float>(M_SQRT1_2))); }

// sqrt(2 / pi) and the factor of the cube are those of the tanh approximation in arXiv 1606.08415.
float GeluTanh(float x) { return 0.5f * x * (1.0f + tanhf(0.7978845608f * (x + 0.044715f * x * x * x))); }

}  // namespace

std::optional<Activation> ActivationNamed(std::string_view name, float threshold) {
  if (name == "relu" || name == "fatrelu") return Activation{threshold, nullptr, false};
  if (name == "relu2") return Activation{threshold, Square, false};
  if (name == "drelu") return Activation{threshold, nullptr, true};
  if (name == "silu") return Activation{kNever, Silu, false};
  if (name == "gelu") return Activation{kNever, Gelu, false};
  if (name == "gelu_pytorch_tanh") return Activation{kNever, GeluTanh, false};
  return std::nullopt;
}

}  // namespace pjax
