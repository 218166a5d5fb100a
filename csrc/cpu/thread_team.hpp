// Persistent threads that run one body together.
//
// Rule: spinning is bounded. On shared cores a thread that spins keeps the thread it waits for from
// running (measured: 7 ms steps became 88 ms), so every wait yields, and between runs sleeps.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "worker.hpp"

namespace octavo {

class ThreadTeam {
 public:
  using Body = void (*)(void* argument, const Worker& worker);

  // Starts num_threads - 1 threads; the caller of run() is thread 0. Throws std::system_error.
  explicit ThreadTeam(int num_threads);
  ~ThreadTeam();
  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;

  int size() const { return num_threads_; }

  // Run the body on every thread; return when all have.
  void run(Body body, void* argument);

  void barrier();
  bool claim(int64_t total, int64_t chunk, Range* range);

 private:
  void work(int thread);
  void wait_for_run(uint32_t seen);
  void stop();

  const int num_threads_;
  Body body_ = nullptr;
  void* argument_ = nullptr;
  bool stopping_ = false;

  alignas(64) std::atomic<int64_t> next_item_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> barrier_generation_{0};
  alignas(64) std::atomic<uint32_t> run_generation_{0};

  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> threads_;
};

}  // namespace octavo
