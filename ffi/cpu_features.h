// Which instruction set the kernels use on this machine.
#ifndef PJAX_FFI_CPU_FEATURES_H_
#define PJAX_FFI_CPU_FEATURES_H_

#include <string>
#include <vector>

#include "row_kernels.h"

namespace pjax {

// Levels that this CPU can run, slowest first; "portable" is always there.
std::vector<CpuLevel> SupportedCpuLevels();

// The fastest supported level, or the one that PJAX_CPU names. On a name that is unknown or not supported, `error`
// says so and the portable level is returned.
CpuLevel ChooseCpuLevel(const char* requested, std::string* error);

const char* CpuLevelName(CpuLevel level);

const RowKernels& KernelsFor(CpuLevel level, WeightType type);

}  // namespace pjax

#endif  // PJAX_FFI_CPU_FEATURES_H_
