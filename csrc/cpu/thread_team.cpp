#include "thread_team.hpp"

#include <sched.h>

namespace octavo {

namespace {

constexpr int kWaitSpins = 2000;  // tens of microseconds: longer than most phases of a decode step
constexpr int kIdleSpins = 1000;  // between runs the front end wants the core

void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

template <class Condition>
void wait_until(Condition condition) {
  for (int spins = 0; !condition(); ++spins) {
    if (spins < kWaitSpins) {
      pause_briefly();
    } else {
      sched_yield();
    }
  }
}

uint32_t phase_of(uint64_t claims) { return static_cast<uint32_t>(claims >> 32); }
int64_t next_item_of(uint64_t claims) { return static_cast<int64_t>(claims & 0xffffffff); }
uint64_t make_claims(uint32_t phase, int64_t next_item) {
  return static_cast<uint64_t>(phase) << 32 | static_cast<uint64_t>(next_item);
}

}  // namespace

ThreadTeam::ThreadTeam(int num_threads)
    : num_threads_(num_threads), caller_{this, 0, num_threads, 0}, num_idle_(num_threads - 1) {
  threads_.reserve(num_threads - 1);
  try {
    for (int thread = 1; thread < num_threads; ++thread) {
      threads_.emplace_back([=] { work({this, thread, num_threads_, 0}); });
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

void ThreadTeam::run(Body body, const void* argument) {
  wait_idle();
  if (num_threads_ > 1) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      body_ = body;
      argument_ = argument;
      num_idle_.store(0, std::memory_order_relaxed);
      run_generation_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
  }
  body(argument, caller_);
}

void ThreadTeam::wait_idle() {
  wait_until([this] { return num_idle_.load(std::memory_order_acquire) == num_threads_ - 1; });
}

void ThreadTeam::work(Worker worker) {
  uint32_t seen = 0;
  while (true) {
    wait_for_run(seen);
    ++seen;
    if (stopping_) return;
    body_(argument_, worker);
    num_idle_.fetch_add(1, std::memory_order_release);
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

bool ThreadTeam::claim(Worker& worker, int64_t total, int64_t chunk, Range* range) {
  const int64_t just_done = range->end - range->begin;
  if (just_done > 0 &&
      items_done_.fetch_add(just_done, std::memory_order_acq_rel) + just_done == total) {
    items_done_.store(0, std::memory_order_relaxed);
    claims_.store(make_claims(worker.phase + 1, 0), std::memory_order_release);
    return false;
  }
  uint64_t claims = claims_.load(std::memory_order_acquire);
  while (phase_of(claims) == worker.phase) {
    const int64_t begin = next_item_of(claims);
    if (begin >= total && total > 0) return false;
    const int64_t end = begin + chunk < total ? begin + chunk : total;
    // A phase without items ends with the first thread that comes by.
    const uint64_t taken =
        total > 0 ? make_claims(worker.phase, end) : make_claims(worker.phase + 1, 0);
    if (claims_.compare_exchange_weak(claims, taken, std::memory_order_acq_rel)) {
      *range = {begin, end};
      return total > 0;
    }
  }
  return false;
}

void ThreadTeam::end_phase(Worker& worker) {
  wait_until([&] { return phase_of(claims_.load(std::memory_order_acquire)) != worker.phase; });
  ++worker.phase;
}

bool claim(Worker& worker, int64_t total, int64_t chunk, Range* range) {
  return worker.team->claim(worker, total, chunk, range);
}

void end_phase(Worker& worker) { worker.team->end_phase(worker); }

}  // namespace octavo
