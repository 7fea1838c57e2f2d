#include "scratch.h"

#include <mutex>
#include <new>
#include <vector>

namespace pjax {
namespace {

struct Buffer {
  char* data;
  size_t capacity;
};

struct FreeList {
  std::mutex mutex;
  std::vector<Buffer> buffers;
};

// Never destroyed, since a call may still run while the process exits.
FreeList& Free() {
  static FreeList* list = new FreeList;
  return *list;
}

}  // namespace

Scratch::Scratch(size_t bytes) : data_(nullptr), capacity_(0) {
  {
    FreeList& free = Free();
    const std::lock_guard<std::mutex> lock(free.mutex);
    if (!free.buffers.empty()) {
      data_ = free.buffers.back().data;
      capacity_ = free.buffers.back().capacity;
      free.buffers.pop_back();
    }
  }
  if (capacity_ >= bytes && data_ != nullptr) return;
  ::operator delete(data_, std::align_val_t{kAlignment});
  data_ = static_cast<char*>(::operator new(bytes, std::align_val_t{kAlignment}));
  capacity_ = bytes;
}

Scratch::~Scratch() {
  FreeList& free = Free();
  const std::lock_guard<std::mutex> lock(free.mutex);
  free.buffers.push_back({data_, capacity_});
}

}  // namespace pjax
