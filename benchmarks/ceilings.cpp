// What this machine can do at most: the plainest loops of multiply-adds and of reads.
//
// Rule: a loop holds nothing but what it measures, so that no kernel can be faster. Built by
// ceilings.py for the CPU at hand (-march=native); what this CPU has no instruction for gives 0.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kRounds = 4096;     // of a loop between two looks at the clock
constexpr size_t kHugePage = 2 << 20;
constexpr size_t kStretch = 1 << 20;  // bytes read between two looks at the clock

using Words = uint64_t __attribute__((vector_size(64)));

#if defined(__x86_64__)
#define OPAQUE(x) asm volatile("" : "+v"(x))  // unknown from here on: what it makes can't leave a loop
#else
#define OPAQUE(x) asm volatile("" : "+w"(x))
#endif

#if defined(__AVX512F__)
using Lanes = float __attribute__((vector_size(64)));
#elif defined(__AVX__)
using Lanes = float __attribute__((vector_size(32)));
#else
using Lanes = float __attribute__((vector_size(16)));
#endif

// Twelve chains hide any instruction's latency. Each is a variable: an array would live in memory.
#define CHAINS(X) X(c0) X(c1) X(c2) X(c3) X(c4) X(c5) X(c6) X(c7) X(c8) X(c9) X(c10) X(c11)
constexpr int kChains = 12;

// chain = step(chain, a, b), `macs` multiply-adds each; returns multiply-adds done.
template <class Vector, class Step>
int64_t chains(int macs, Vector a, Vector b, Step step) {
#define BEGIN(chain) Vector chain = b;
#define ADVANCE(chain) \
  OPAQUE(a);           \
  chain = step(chain, a, b);
#define END(chain) OPAQUE(chain);
  CHAINS(BEGIN)
  for (int round = 0; round < kRounds; ++round) {
    CHAINS(ADVANCE)
  }
  CHAINS(END)
  return static_cast<int64_t>(kRounds) * kChains * macs;
}

int64_t fma_f32() {
  return chains(sizeof(Lanes) / sizeof(float), Lanes{} + 1.0f, Lanes{} + 1e-9f,
                [](Lanes acc, Lanes a, Lanes b) { return a * b + acc; });
}

int64_t madd_8() {
#if defined(__AVX512BW__)
  return chains(64, _mm512_set1_epi8(3), _mm512_set1_epi8(1), [](__m512i acc, __m512i a, __m512i b) {
    return _mm512_add_epi16(acc, _mm512_maddubs_epi16(a, b));
  });
#elif defined(__AVX2__)
  return chains(32, _mm256_set1_epi8(3), _mm256_set1_epi8(1), [](__m256i acc, __m256i a, __m256i b) {
    return _mm256_add_epi16(acc, _mm256_maddubs_epi16(a, b));
  });
#else
  return 0;
#endif
}

int64_t madd_16() {
#if defined(__AVX512BW__)
  return chains(32, _mm512_set1_epi16(3), _mm512_set1_epi16(1), [](__m512i acc, __m512i a, __m512i b) {
    return _mm512_add_epi32(acc, _mm512_madd_epi16(a, b));
  });
#elif defined(__AVX2__)
  return chains(16, _mm256_set1_epi16(3), _mm256_set1_epi16(1), [](__m256i acc, __m256i a, __m256i b) {
    return _mm256_add_epi32(acc, _mm256_madd_epi16(a, b));
  });
#else
  return 0;
#endif
}

int64_t dot_8() {
#if defined(__AVX512VNNI__)
  return chains(64, _mm512_set1_epi8(3), _mm512_set1_epi8(1), [](__m512i acc, __m512i a, __m512i b) {
    return _mm512_dpbusd_epi32(acc, a, b);
  });
#elif defined(__AVXVNNI__)
  return chains(32, _mm256_set1_epi8(3), _mm256_set1_epi8(1), [](__m256i acc, __m256i a, __m256i b) {
    return _mm256_dpbusd_avx_epi32(acc, a, b);
  });
#else
  return 0;
#endif
}

int64_t dot_16() {
#if defined(__AVX512VNNI__)
  return chains(32, _mm512_set1_epi16(3), _mm512_set1_epi16(1), [](__m512i acc, __m512i a, __m512i b) {
    return _mm512_dpwssd_epi32(acc, a, b);
  });
#elif defined(__AVXVNNI__)
  return chains(16, _mm256_set1_epi16(3), _mm256_set1_epi16(1), [](__m256i acc, __m256i a, __m256i b) {
    return _mm256_dpwssd_avx_epi32(acc, a, b);
  });
#else
  return 0;
#endif
}

// Bytes of its own that a thread reads over and over, on huge pages where there are any.
class Buffer {
 public:
  explicit Buffer(size_t nbytes) : nbytes_(nbytes) {
    const size_t whole = (nbytes + kHugePage - 1) / kHugePage * kHugePage;
    bytes_ = static_cast<char*>(aligned_alloc(kHugePage, whole));
    if (bytes_ == nullptr) abort();
#if defined(MADV_HUGEPAGE)
    madvise(bytes_, whole, MADV_HUGEPAGE);
#endif
    memset(bytes_, 1, whole);
  }
  ~Buffer() { free(bytes_); }
  Buffer(const Buffer&) = delete;

  // Read the next stretch; returns its bytes.
  int64_t read() {
    const size_t end = at_ + kStretch < nbytes_ ? at_ + kStretch : nbytes_;
    const size_t nbytes = end - at_;
    Words sum[4] = {};
    for (; at_ + sizeof sum <= end; at_ += sizeof sum) {
      const Words* from = reinterpret_cast<const Words*>(bytes_ + at_);
      for (int i = 0; i < 4; ++i) sum[i] += from[i];
    }
    Words total = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    asm volatile("" : : "m"(total));
    if (at_ + sizeof sum > nbytes_) at_ = 0;
    return static_cast<int64_t>(nbytes);
  }

 private:
  const size_t nbytes_;
  char* bytes_ = nullptr;
  size_t at_ = 0;
};

using Loop = int64_t (*)();
constexpr Loop kLoops[] = {fma_f32, madd_8, dot_8, madd_16, dot_16};

// Seconds of processor time that the calling thread has had.
double thread_seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

void run_threads(int threads, const std::function<void()>& work) {
  std::vector<std::thread> team;
  for (int i = 0; i < threads; ++i) team.emplace_back(work);
  for (std::thread& thread : team) thread.join();
}

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

// Multiply-adds a second by `threads` threads that each have a core: counted by processor time, so that
// others on shared cores don't lower it. kind: an index into kLoops.
EXPORTED double ceiling_macs(int kind, int threads, double seconds) {
  std::mutex mutex;
  double done = 0;
  double taken = 0;
  run_threads(threads, [&] {
    const double start = thread_seconds();
    double now = start;
    int64_t macs = 0;
    for (; now - start < seconds; now = thread_seconds()) {
      for (int i = 0; i < 8; ++i) macs += kLoops[kind]();
    }
    std::lock_guard<std::mutex> lock(mutex);
    done += static_cast<double>(macs);
    taken += now - start;
  });
  return done / taken * threads;
}

// Bytes a second read by `threads` threads together, each of `nbytes` of its own: in the best of `windows`
// windows, since on shared cores others take some of the time.
EXPORTED double ceiling_reads(int threads, size_t nbytes, int windows, double window_seconds) {
  const auto window = std::chrono::duration_cast<Clock::duration>(
      std::chrono::duration<double>(window_seconds));
  std::vector<std::atomic<int64_t>> done(windows);
  std::atomic<int> ready{0};
  std::atomic<Clock::rep> start{0};  // 0 until all threads have their bytes
  run_threads(threads, [&] {
    Buffer buffer(nbytes);
    if (ready.fetch_add(1) + 1 == threads) start = Clock::now().time_since_epoch().count();
    while (start == 0) std::this_thread::yield();
    while (true) {
      const int64_t amount = buffer.read();
      const auto index = (Clock::now().time_since_epoch() - Clock::duration(start.load())) / window;
      if (index >= windows) return;
      done[index].fetch_add(amount, std::memory_order_relaxed);
    }
  });
  int64_t best = 0;
  for (const auto& amount : done) best = amount > best ? amount.load() : best;
  return static_cast<double>(best) / window_seconds;
}
