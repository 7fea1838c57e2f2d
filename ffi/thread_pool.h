// Fork and join over all CPUs in about half a microsecond.
#ifndef PJAX_FFI_THREAD_POOL_H_
#define PJAX_FFI_THREAD_POOL_H_

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace pjax {

// Work that any number of threads may run at the same time: each call takes pieces until none are left.
using WorkFn = void (*)(void* work);

class ThreadPool {
 public:
  // `num_threads` counts the caller: one thread means no workers.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // The pool of this process, with NumThreads(getenv("PJAX_NUM_THREADS")) threads. Never destroyed.
  static ThreadPool& Process();

  int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls fn(work) on this thread and, if `parallel`, on the workers; returns when all calls have. Denormals count as
  // zero meanwhile. If another thread is inside, or the process has forked, all work is done on this thread: waiting
  // would make two programs that run at the same time take turns.
  void Run(bool parallel, WorkFn fn, void* work);

 private:
  void WorkerLoop();
  // Spins, then sleeps, until there is a job other than number `seen`; false when the pool is being destroyed.
  bool JoinNextJob(uint32_t* seen);
  void Sleep(uint32_t seen);
  bool HasNews(uint32_t seen) const;

  // Job number << 32 | kOpen while it may be joined | number of workers inside.
  std::atomic<uint64_t> state_{0};
  std::atomic<bool> busy_{false};
  std::atomic<bool> stopping_{false};
  std::atomic<int> num_sleeping_{0};
  WorkFn fn_ = nullptr;
  void* work_ = nullptr;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> workers_;
};

// `requested` as a number, or without it the CPUs this process may run on. On anything but a number from 1 to 1024,
// `error` says so and 1 is returned.
int NumThreads(const char* requested, std::string* error);

// Flushes denormals to zero on this thread for as long as it lives. One operation on a denormal costs 11 ns instead of
// 0.3, and XLA sets the same mode on its own threads.
class ScopedFlushDenormals {
 public:
  ScopedFlushDenormals();
  ~ScopedFlushDenormals();

 private:
  unsigned saved_;
};

}  // namespace pjax

#endif  // PJAX_FFI_THREAD_POOL_H_
