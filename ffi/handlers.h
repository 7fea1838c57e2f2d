// What the handlers share: checks of shapes, and the instruction set of this process.
#ifndef PJAX_FFI_HANDLERS_H_
#define PJAX_FFI_HANDLERS_H_

#include <stdlib.h>

#include <algorithm>
#include <initializer_list>
#include <string>

#include "cpu_features.h"
#include "xla/ffi/api/ffi.h"

#define PJAX_EXPORT __attribute__((visibility("default")))

#define PJAX_RETURN_IF_ERROR(expression) \
  if (xla::ffi::Error error = (expression); error.failure()) return error

namespace pjax {

inline std::string ShapeText(xla::ffi::Span<const int64_t> shape) {
  std::string text;
  for (int64_t size : shape) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "[" + text + "]";
}

inline xla::ffi::Error Expect(const char* name, xla::ffi::Span<const int64_t> shape,
                              std::initializer_list<int64_t> expected) {
  if (std::equal(shape.begin(), shape.end(), expected.begin(), expected.end())) return xla::ffi::Error::Success();
  return xla::ffi::Error::InvalidArgument(std::string(name) + ": expected shape " +
                                          ShapeText(xla::ffi::Span<const int64_t>(expected.begin(), expected.size())) +
                                          ", got " + ShapeText(shape));
}

inline CpuLevel Level() {
  static const CpuLevel level = [] {
    std::string ignored;  // pjax_init has reported it
    return ChooseCpuLevel(getenv("PJAX_CPU"), &ignored);
  }();
  return level;
}

// An absent argument is passed as an array without elements.
template <typename Pointer>
Pointer* IfPresent(Pointer* data, size_t count) {
  return count == 0 ? nullptr : data;
}

}  // namespace pjax

#endif  // PJAX_FFI_HANDLERS_H_
