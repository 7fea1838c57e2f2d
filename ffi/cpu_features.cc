#include "cpu_features.h"

namespace pjax {
namespace {

bool Supports(CpuLevel level) {
#if defined(PJAX_X86)
  switch (level) {
    case CpuLevel::kPortable:
      return true;
    case CpuLevel::kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    case CpuLevel::kAvx512:
      return Supports(CpuLevel::kAvx2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    case CpuLevel::kAvx512Vnni:
      return Supports(CpuLevel::kAvx512) && __builtin_cpu_supports("avx512vnni");
  }
#endif
  return level == CpuLevel::kPortable;
}

constexpr CpuLevel kLevels[] = {CpuLevel::kPortable, CpuLevel::kAvx2, CpuLevel::kAvx512, CpuLevel::kAvx512Vnni};

}  // namespace

std::vector<CpuLevel> SupportedCpuLevels() {
  std::vector<CpuLevel> supported;
  for (CpuLevel level : kLevels) {
    if (Supports(level)) supported.push_back(level);
  }
  return supported;
}

const char* CpuLevelName(CpuLevel level) {
  switch (level) {
    case CpuLevel::kAvx2:
      return "avx2";
    case CpuLevel::kAvx512:
      return "avx512";
    case CpuLevel::kAvx512Vnni:
      return "avx512vnni";
    case CpuLevel::kPortable:
      break;
  }
  return "portable";
}

CpuLevel ChooseCpuLevel(const char* requested, std::string* error) {
  const std::vector<CpuLevel> supported = SupportedCpuLevels();
  if (requested == nullptr || *requested == '\0') return supported.back();
  std::string names;
  for (CpuLevel level : supported) {
    if (std::string(requested) == CpuLevelName(level)) return level;
    names += (names.empty() ? "" : ", ") + std::string(CpuLevelName(level));
  }
  *error = "PJAX_CPU: expected one of those that this machine supports (" + names + "), got '" + requested + "'.";
  return CpuLevel::kPortable;
}

const RowKernels& KernelsFor(CpuLevel level, WeightType type) {
#if defined(PJAX_X86)
  if (level == CpuLevel::kAvx512Vnni) return Avx512VnniKernels(type);
  if (level == CpuLevel::kAvx512) return Avx512Kernels(type);
  if (level == CpuLevel::kAvx2) return Avx2Kernels(type);
#endif
  (void)level;
  return PortableKernels(type);
}

}  // namespace pjax
