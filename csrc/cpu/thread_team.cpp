#include "thread_team.hpp"

#include <sched.h>

namespace octavo {

namespace {

constexpr int kBarrierSpins = 4000;  // 50 to 200 us; the longest op of a decode step takes less
constexpr int kIdleSpins = 1000;     // between runs the front end wants the core

void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

ThreadTeam::ThreadTeam(int num_threads) : num_threads_(num_threads) {
  threads_.reserve(num_threads - 1);
  try {
    for (int thread = 1; thread < num_threads; ++thread) {
      threads_.emplace_back([this, thread] { work(thread); });
    }
  } catch (...) {
    stop();
    throw;
  }
}

ThreadTeam::~ThreadTeam() { stop(); }

void ThreadTeam::stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    run_generation_.fetch_add(1, std::memory_order_release);
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

void ThreadTeam::run(Body body, void* argument) {
  if (num_threads_ > 1) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      body_ = body;
      argument_ = argument;
      run_generation_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
  }
  body(argument, Worker{this, 0, num_threads_});
  barrier();
}

void ThreadTeam::work(int thread) {
  uint32_t seen = 0;
  while (true) {
    wait_for_run(seen);
    ++seen;
    if (stopping_) return;
    body_(argument_, Worker{this, thread, num_threads_});
    barrier();
  }
}

void ThreadTeam::wait_for_run(uint32_t seen) {
  for (int spin = 0; spin < kIdleSpins; ++spin) {
    if (run_generation_.load(std::memory_order_acquire) != seen) return;
    pause_briefly();
  }
  std::unique_lock<std::mutex> lock(mutex_);
  wake_.wait(lock, [&] { return run_generation_.load(std::memory_order_acquire) != seen; });
}

void ThreadTeam::barrier() {
  const uint32_t generation = barrier_generation_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == num_threads_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    next_item_.store(0, std::memory_order_relaxed);
    barrier_generation_.store(generation + 1, std::memory_order_release);
    return;
  }
  int spins = 0;
  while (barrier_generation_.load(std::memory_order_acquire) == generation) {
    if (++spins < kBarrierSpins) {
      pause_briefly();
    } else {
      sched_yield();
    }
  }
}

bool ThreadTeam::claim(int64_t total, int64_t chunk, Range* range) {
  const int64_t begin = next_item_.fetch_add(chunk, std::memory_order_relaxed);
  if (begin >= total) return false;
  *range = {begin, begin + chunk < total ? begin + chunk : total};
  return true;
}

bool claim(const Worker& worker, int64_t total, int64_t chunk, Range* range) {
  return worker.team->claim(total, chunk, range);
}

void barrier(const Worker& worker) { worker.team->barrier(); }

}  // namespace octavo
