// Persistent threads that work through the phases of a run together.
//
// Rule: a phase waits for its items, not for the team's threads. Where cores are shared, a thread
// that lost its core delays the few items it holds; one that held none delays nobody and catches up
// later. (Measured with barriers on two busy cores: steps of 6 ms took 88.) Waiting threads spin a
// little, then yield; between runs they sleep.
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
  // What each thread executes in a run: the same phases on every thread.
  using Body = void (*)(const void* argument, Worker& worker);

  // Starts num_threads - 1 threads; the caller of run() is thread 0. Throws std::system_error.
  explicit ThreadTeam(int num_threads);
  ~ThreadTeam();
  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;

  int size() const { return num_threads_; }

  // Run the body on every thread; return when all items of all phases are done. Threads that hold
  // none may still be on their way through: wait_idle() before changing what they read.
  void run(Body body, const void* argument);

  // Wait until no thread but the caller is inside a body.
  void wait_idle();

  bool claim(Worker& worker, int64_t total, int64_t chunk, Range* range);
  void end_phase(Worker& worker);

 private:
  void work(Worker worker);
  void wait_for_run(uint32_t seen);
  void stop();

  const int num_threads_;
  Worker caller_;
  Body body_ = nullptr;
  const void* argument_ = nullptr;
  bool stopping_ = false;

  // The phase that is being worked on, and its first item that nobody has claimed: in one word, so
  // that a thread that comes late to a phase cannot claim items of the next.
  //
  //   bits 63 .. 32   phase, modulo 2^32
  //   bits 31 .. 0    next item
  alignas(64) std::atomic<uint64_t> claims_{0};
  alignas(64) std::atomic<int64_t> items_done_{0};  // of this phase
  alignas(64) std::atomic<uint32_t> run_generation_{0};
  alignas(64) std::atomic<int> num_idle_;  // threads that have left the last run

  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> threads_;
};

}  // namespace octavo
