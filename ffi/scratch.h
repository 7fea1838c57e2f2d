// Working memory of one call, kept for the next one.
#ifndef PJAX_FFI_SCRATCH_H_
#define PJAX_FFI_SCRATCH_H_

#include <stddef.h>
#include <stdint.h>

namespace pjax {

// Borrows one 64-byte aligned buffer from a process-wide list for as long as it lives. A fresh allocation per call
// would pay for page faults every time; a thread_local one would be held by every thread that XLA ever runs a call on.
class Scratch {
 public:
  explicit Scratch(size_t bytes);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  // Bytes that Take<T>(count) uses up; the sum of these is what the constructor is given.
  template <typename T>
  static constexpr size_t BytesFor(int64_t count) {
    return (static_cast<size_t>(count) * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
  }

  // The next `count` elements of the buffer, uninitialised.
  template <typename T>
  T* Take(int64_t count) {
    T* start = reinterpret_cast<T*>(data_ + used_);
    used_ += BytesFor<T>(count);
    return start;
  }

 private:
  static constexpr size_t kAlignment = 64;

  char* data_;
  size_t capacity_;
  size_t used_ = 0;
};

}  // namespace pjax

#endif  // PJAX_FFI_SCRATCH_H_
