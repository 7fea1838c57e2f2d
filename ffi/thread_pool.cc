#include "thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>

#include <chrono>

#if defined(PJAX_X86)
#include <immintrin.h>
#endif

namespace pjax {
namespace {

constexpr uint64_t kOpen = uint64_t{1} << 31;
constexpr uint64_t kInside = kOpen - 1;
constexpr int kJobShift = 32;

// Longer than the longest serial gap inside a token (0.5 to 2 ms): waking a sleeping worker takes 40 us, which at six
// forks a layer would cost more than the work. Short enough that XLA's own pool soon has the CPUs for itself.
constexpr std::chrono::microseconds kSpin{2500};

// Pauses after which an idle worker looks at the clock, and offers its CPU to whoever waits for it, about 15 us: two
// processes that decode side by side then have 1.5 times the tokens, and one alone loses nothing.
constexpr int kPausesPerClock = 256;

// Pauses that a caller waits for its workers before it offers its CPU, on which a worker may be waiting to run.
constexpr int kPausesBeforeYield = 2000;

constexpr int kMaxThreads = 1024;

std::atomic<bool> forked{false};

void Pause() {
#if defined(PJAX_X86)
  _mm_pause();
#endif
}

uint32_t JobOf(uint64_t state) { return static_cast<uint32_t>(state >> kJobShift); }

}  // namespace

ScopedFlushDenormals::ScopedFlushDenormals() : saved_(0) {
#if defined(PJAX_X86)
  constexpr unsigned kFlushToZero = 0x8000, kDenormalsAreZero = 0x0040;
  saved_ = _mm_getcsr();
  _mm_setcsr(saved_ | kFlushToZero | kDenormalsAreZero);
#endif
}

ScopedFlushDenormals::~ScopedFlushDenormals() {
#if defined(PJAX_X86)
  _mm_setcsr(saved_);
#endif
}

int NumThreads(const char* requested, std::string* error) {
  if (requested == nullptr || *requested == '\0') {
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    if (sched_getaffinity(0, sizeof(cpus), &cpus) != 0) return 1;
    return CPU_COUNT(&cpus);
  }
  char* end = nullptr;
  const long number = strtol(requested, &end, 10);
  if (*end == '\0' && number >= 1 && number <= kMaxThreads) return static_cast<int>(number);
  *error = "PJAX_NUM_THREADS: expected a number from 1 to " + std::to_string(kMaxThreads) + ", got '" +
           std::string(requested) + "'.";
  return 1;
}

ThreadPool& ThreadPool::Process() {
  static ThreadPool* pool = [] {
    std::string ignored;  // pjax_init has reported it
    // A forked child has no workers, and perhaps a pool that was busy when it was copied.
    pthread_atfork(nullptr, nullptr, [] { forked.store(true, std::memory_order_relaxed); });
    return new ThreadPool(NumThreads(getenv("PJAX_NUM_THREADS"), &ignored));
  }();
  return *pool;
}

ThreadPool::ThreadPool(int num_threads) {
  for (int i = 1; i < num_threads; ++i) workers_.emplace_back([this] { WorkerLoop(); });
}

ThreadPool::~ThreadPool() {
  stopping_.store(true);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    wake_.notify_all();
  }
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::Run(bool parallel, WorkFn fn, void* work) {
  const ScopedFlushDenormals flush;
  if (!parallel || workers_.empty() || forked.load(std::memory_order_relaxed) ||
      busy_.exchange(true, std::memory_order_acquire)) {
    fn(work);
    return;
  }
  fn_ = fn;
  work_ = work;
  const uint64_t next_job = JobOf(state_.load(std::memory_order_relaxed)) + uint32_t{1};
  // Sequentially consistent with Sleep(): either this sees the sleeper or the sleeper sees the job.
  state_.store(next_job << kJobShift | kOpen, std::memory_order_seq_cst);
  if (num_sleeping_.load(std::memory_order_seq_cst) > 0) {
    const std::lock_guard<std::mutex> lock(mutex_);
    wake_.notify_all();
  }
  fn(work);
  // Closed, so that a worker that comes too late stays out and is not waited for.
  state_.fetch_and(~kOpen, std::memory_order_acq_rel);
  for (int pauses = 0; (state_.load(std::memory_order_acquire) & kInside) != 0; ++pauses) {
    if (pauses < kPausesBeforeYield) {
      Pause();
    } else {
      sched_yield();
    }
  }
  busy_.store(false, std::memory_order_release);
}

void ThreadPool::WorkerLoop() {
  const ScopedFlushDenormals flush;
  uint32_t seen = 0;
  while (JoinNextJob(&seen)) {
    fn_(work_);
    state_.fetch_sub(1, std::memory_order_release);
  }
}

bool ThreadPool::HasNews(uint32_t seen) const {
  const uint64_t state = state_.load(std::memory_order_seq_cst);
  return stopping_.load() || ((state & kOpen) != 0 && JobOf(state) != seen);
}

bool ThreadPool::JoinNextJob(uint32_t* seen) {
  auto spin_until = std::chrono::steady_clock::now() + kSpin;
  for (int pauses = 1; !stopping_.load(std::memory_order_relaxed); ++pauses) {
    uint64_t state = state_.load(std::memory_order_acquire);
    if ((state & kOpen) != 0 && JobOf(state) != *seen) {
      if (state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) {
        *seen = JobOf(state);
        return true;
      }
      continue;
    }
    Pause();
    if (pauses % kPausesPerClock != 0) continue;
    sched_yield();
    if (std::chrono::steady_clock::now() > spin_until) {
      Sleep(*seen);
      spin_until = std::chrono::steady_clock::now() + kSpin;
    }
  }
  return false;
}

void ThreadPool::Sleep(uint32_t seen) {
  std::unique_lock<std::mutex> lock(mutex_);
  num_sleeping_.fetch_add(1, std::memory_order_seq_cst);
  wake_.wait(lock, [&] { return HasNews(seen); });
  num_sleeping_.fetch_sub(1, std::memory_order_seq_cst);
}

}  // namespace pjax
