// The activation functions of an FFN, by the names that pjax gives them.
#ifndef PJAX_FFI_ACTIVATION_H_
#define PJAX_FFI_ACTIVATION_H_

#include <optional>
#include <string_view>

namespace pjax {

struct Activation {
  float threshold;        // a neuron is closed where its opening product is not above this
  float (*curve)(float);  // as what an open product enters; nullptr: as it is
  bool rectify_up;        // up is also rectified, and a neuron where that leaves zero is closed; gated only
};

// "relu", "relu2", "fatrelu" and "drelu" close at the threshold; "silu", "gelu" and "gelu_pytorch_tanh" never do.
// Nothing for any other name.
std::optional<Activation> ActivationNamed(std::string_view name, float threshold);

}  // namespace pjax

#endif  // PJAX_FFI_ACTIVATION_H_
