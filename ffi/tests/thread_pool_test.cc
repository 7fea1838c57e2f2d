// Every piece of work is done once, also with sleeping workers, several callers, and after a fork.
#include "thread_pool.h"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "testing.h"

namespace pjax {
namespace {

struct Count {
  int num_pieces;
  std::atomic<int> next{0};
  std::atomic<int> done{0};
};

void DoPieces(void* data) {
  Count& count = *static_cast<Count*>(data);
  while (count.next.fetch_add(1) < count.num_pieces) count.done.fetch_add(1);
}

void RunAndCheck(ThreadPool& pool, bool parallel, int num_pieces) {
  Count count{num_pieces};
  pool.Run(parallel, DoPieces, &count);
  PJAX_CHECK(count.done.load() == num_pieces, std::to_string(count.done.load()));
}

void CheckManyRuns() {
  for (int num_threads = 1; num_threads <= 4; ++num_threads) {
    ThreadPool pool(num_threads);
    PJAX_CHECK(pool.num_threads() == num_threads, std::to_string(pool.num_threads()));
    for (int i = 0; i < 2000; ++i) RunAndCheck(pool, i % 3 != 0, i % 50);
  }
}

void CheckSleepingWorkers() {
  ThreadPool pool(3);
  for (int i = 0; i < 20; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(4));
    RunAndCheck(pool, true, 100);
  }
}

void CheckConcurrentCallers() {
  ThreadPool pool(3);
  std::vector<std::thread> callers;
  for (int i = 0; i < 3; ++i) {
    callers.emplace_back([&] {
      for (int j = 0; j < 1000; ++j) RunAndCheck(pool, true, 20);
    });
  }
  for (std::thread& caller : callers) caller.join();
}

void CheckFork() {
  RunAndCheck(ThreadPool::Process(), true, 100);
  const pid_t child = fork();
  if (child == 0) {
    RunAndCheck(ThreadPool::Process(), true, 100);
    _exit(0);
  }
  int status = -1;
  waitpid(child, &status, 0);
  PJAX_CHECK(status == 0, std::to_string(status));
}

void MultiplyDenormals(void* data) {
  volatile float tiny = 1e-39f, half = 0.5f;
  *static_cast<float*>(data) = tiny * half;
}

void CheckDenormals() {
#if defined(PJAX_X86)
  ThreadPool pool(1);
  float inside = -1;
  pool.Run(false, MultiplyDenormals, &inside);
  float outside = -1;
  MultiplyDenormals(&outside);
  PJAX_CHECK(inside == 0 && outside > 0, std::to_string(inside) + " " + std::to_string(outside));
#endif
}

}  // namespace
}  // namespace pjax

int main() {
  setenv("PJAX_NUM_THREADS", "2", 1);
  pjax::CheckManyRuns();
  pjax::CheckSleepingWorkers();
  pjax::CheckConcurrentCallers();
  pjax::CheckDenormals();
  pjax::CheckFork();
  return 0;
}
