// What the environment variables may hold, and what is said about the rest.
#include <string>

#include "testing.h"
#include "thread_pool.h"

int main() {
  using namespace pjax;
  std::string error;
  PJAX_CHECK(NumThreads(nullptr, &error) >= 1 && error.empty(), error);
  PJAX_CHECK(NumThreads("", &error) == NumThreads(nullptr, &error) && error.empty(), error);
  PJAX_CHECK(NumThreads("3", &error) == 3 && error.empty(), error);
  for (const char* wrong : {"0", "-1", "two", "3x", "99999", " "}) {
    error.clear();
    PJAX_CHECK(NumThreads(wrong, &error) == 1, std::string(wrong));
    PJAX_CHECK(error.find("PJAX_NUM_THREADS") == 0 && error.find(wrong) != std::string::npos, error);
  }

  error.clear();
  PJAX_CHECK(ChooseCpuLevel(nullptr, &error) == SupportedCpuLevels().back() && error.empty(), error);
  for (CpuLevel level : SupportedCpuLevels()) {
    PJAX_CHECK(ChooseCpuLevel(CpuLevelName(level), &error) == level && error.empty(), error);
  }
  PJAX_CHECK(ChooseCpuLevel("avx1024", &error) == CpuLevel::kPortable, error);
  PJAX_CHECK(error.find("PJAX_CPU") == 0 && error.find("avx1024") != std::string::npos, error);
  return 0;
}
