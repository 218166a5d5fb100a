// From a row of logits to a token: greedy, or drawn from the tokens that min_p, top_k and top_p leave.
//
// Rule: the same tokens as octavo/sampling/choice.py, bit for bit in every number that decides. What can't
// win is passed over by exact bounds; nothing sorts a vocabulary.

#include "choice.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

namespace octavo {

namespace {

int chunks_of(int width) { return (width + kChoiceChunk - 1) / kChoiceChunk; }

// One row and the memory to work on it.
//
//   weights  int64 [width, padded]     by token
//   ids      int32  [width, padded]     candidates
//   maxima   float  [chunks]
//   sorted   float  [chunks]
struct Row {
  Row(const ChoiceKernels& kernels, const OctavoChoice& choice, int32_t width, void* scratch)
      : kernels(kernels), choice(choice), logits(choice.logits), width(width) {
    const size_t padded = static_cast<size_t>(chunks_of(width)) * kChoiceChunk;
    weights = static_cast<int64_t*>(scratch);
    ids = reinterpret_cast<int32_t*>(weights + padded);
    maxima = reinterpret_cast<float*>(ids + padded);
    sorted = maxima + chunks_of(width);
  }

  double scaled(int32_t id) const { return static_cast<double>(logits[id]) / choice.temperature; }
  bool likelier(int32_t a, int32_t b) const {
    return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
  }

  const ChoiceKernels& kernels;
  const OctavoChoice& choice;
  const float* logits;
  const int width;
  int64_t* weights;
  int32_t* ids;
  float* maxima;
  float* sorted;
  double peak = 0;  // of the scaled logits
};

int32_t first_nan(const Row& row) {
  int32_t id = 0;
  while (row.logits[id] == row.logits[id]) ++id;
  return id;
}

int32_t first_largest(const Row& row) {
  const float* best = std::max_element(row.maxima, row.maxima + chunks_of(row.width));
  int32_t id = static_cast<int32_t>(best - row.maxima) * kChoiceChunk;
  while (row.logits[id] != *best) ++id;
  return id;
}

// -- filters: each leaves ids[0, count), in no order ----------------------------------------------

// The `count` likeliest tokens, in no order. As many chunks have a largest logit of at least the
// count-th largest of these, so as many tokens do, and few more.
void select_likeliest(Row* row, int count) {
  const int chunks = chunks_of(row->width);
  float least = -std::numeric_limits<float>::infinity();
  if (count <= chunks) {
    std::copy_n(row->maxima, chunks, row->sorted);
    std::nth_element(row->sorted, row->sorted + count - 1, row->sorted + chunks, std::greater<float>());
    least = row->sorted[count - 1];
  }
  int found = 0;
  for (int chunk = 0; chunk < chunks; ++chunk) {
    if (row->maxima[chunk] < least) continue;
    const int end = std::min(row->width, (chunk + 1) * kChoiceChunk);
    for (int id = chunk * kChoiceChunk; id < end; ++id) {
      row->ids[found] = id;
      found += row->logits[id] >= least;
    }
  }
  if (found > count) {
    std::nth_element(row->ids, row->ids + count, row->ids + found,
                     [row](int32_t a, int32_t b) { return row->likelier(a, b); });
  }
}

int keep_min_p_of(Row* row, int count) {
  const double least = row->peak + row->choice.log_min_p;
  return static_cast<int>(
      std::remove_if(row->ids, row->ids + count, [&](int32_t id) { return row->scaled(id) < least; }) -
      row->ids);
}

int keep_min_p(Row* row) {
  const double least = row->peak + row->choice.log_min_p;
  int found = 0;
  for (int chunk = 0; chunk < chunks_of(row->width); ++chunk) {
    if (static_cast<double>(row->maxima[chunk]) / row->choice.temperature < least) continue;
    const int end = std::min(row->width, (chunk + 1) * kChoiceChunk);
    for (int id = chunk * kChoiceChunk; id < end; ++id) {
      row->ids[found] = id;
      found += row->scaled(id) >= least;
    }
  }
  return found;
}

// The fewest of the likeliest whose weights reach `enough`; weights lie by token. The sum of [0, low) is
// too little, that of [0, high) is enough. Most of it is at the front.
int cut_nucleus(Row* row, int count, int64_t enough) {
  int low = 0, high = count;
  while (high - low > 1) {
    const int middle = low + std::max(1, (high - low) / 4);
    std::nth_element(row->ids + low, row->ids + middle, row->ids + high,
                     [row](int32_t a, int32_t b) { return row->likelier(a, b); });
    int64_t sum = 0;
    for (int i = low; i < middle; ++i) sum += row->weights[row->ids[i]];
    if (sum >= enough) {
      high = middle;
    } else {
      enough -= sum;
      low = middle;
    }
  }
  return high;
}

int64_t part_of(int64_t total, double top_p) {
  return std::min(total, static_cast<int64_t>(std::ceil(top_p * static_cast<double>(total))));
}

int keep_nucleus_of(Row* row, int count) {
  int64_t total = 0;
  for (int i = 0; i < count; ++i) {
    const int32_t id = row->ids[i];
    total += row->kernels.weigh(row->logits + id, 1, row->choice.temperature, row->peak,
                                row->weights + id);
  }
  return cut_nucleus(row, count, part_of(total, row->choice.top_p));
}

// A power of two that the tokens of larger weights reach `enough` with: of the nucleus, or just below.
int64_t least_weight(const Row& row, int64_t enough) {
  constexpr int kTables = 4;  // so that an addition need not wait for the one before
  constexpr int kBits = 64;
  int64_t sums[kTables][kBits] = {};
  for (int id = 0; id < row.width; ++id) {
    const int64_t weight = row.weights[id];
    sums[id % kTables][__builtin_clzll(weight | 1)] += weight;
  }
  int64_t reached = 0;
  for (int zeros = 0; zeros < kBits; ++zeros) {
    for (int t = 0; t < kTables; ++t) reached += sums[t][zeros];
    if (reached >= enough) return int64_t{1} << (kBits - 1 - zeros);
  }
  return 0;
}

int keep_nucleus(Row* row) {
  const int64_t total = row->kernels.weigh(row->logits, row->width, row->choice.temperature,
                                           row->peak, row->weights);
  const int64_t enough = part_of(total, row->choice.top_p);
  const int64_t least = least_weight(*row, enough);
  int found = 0;
  for (int id = 0; id < row->width; ++id) {
    row->ids[found] = id;
    found += row->weights[id] >= least;
  }
  return cut_nucleus(row, found, enough);
}

// -- the draw ---------------------------------------------------------------------------------------

// log(x) for normal x > 0: x = 2^e m with m around 1, log(m) = 2 atanh((m - 1) / (m + 1)) as a series.
double log_of(double x) {
  constexpr int64_t kHalfRoot = 0x3fe6a09e667f3bcd;  // sqrt(0.5)
  int64_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const int64_t e = (bits - kHalfRoot) >> 52;
  bits -= static_cast<int64_t>(static_cast<uint64_t>(e) << 52);
  double m;
  std::memcpy(&m, &bits, sizeof m);
  const double f = m - 1.0;
  const double s = f / (f + 2.0);
  const double z = s * s;
  double p = 1.0 / 21.0;
  for (int k = 19; k >= 3; k -= 2) p = p * z + 1.0 / k;
  const double head = 2.0 * s;
  const double exponent = static_cast<double>(e);
  return exponent * kLn2High + (head + (head * z * p + exponent * kLn2Low));
}

double gumbel(uint32_t word) {
  const double uniform = (static_cast<double>(word) + 0.5) * 0x1p-32;
  return -log_of(-log_of(uniform));
}

// The largest sum of scaled logit and noise so far; of equals the smallest id.
struct Best {
  void offer(double sum, int32_t candidate) {
    if (sum > total || (sum == total && candidate < id)) {
      total = sum;
      id = candidate;
    }
  }

  double total = -std::numeric_limits<double>::infinity();
  int32_t id = std::numeric_limits<int32_t>::max();
};

// Offers tokens to the winner so far: those whose noise may decide, by exact bounds.
class Draw {
 public:
  Draw(const Row& row, int32_t likeliest) : row_(row) { offer(likeliest, word_of(likeliest)); }

  int32_t winner() const { return winner_; }

  // Tokens of ids, in any order.
  void offer_ids(const int32_t* ids, int count) {
    uint32_t words[kChoiceChunk];
    float logits[kChoiceChunk];
    for (int first = 0; first < count; first += kChoiceChunk) {
      const int size = std::min(kChoiceChunk, count - first);
      for (int i = 0; i < size; ++i) {
        words[i] = word_of(ids[first + i]);
        logits[i] = row_.logits[ids[first + i]];
      }
      offer_survivors(logits, words, size, [&](int i) { return ids[first + i]; });
    }
  }

  // All tokens.
  void offer_all() {
    constexpr double kMostNoise = 34.0 * kLn2;
    const OctavoChoice& choice = row_.choice;
    uint32_t words[kChoiceChunk];
    for (int first = 0, chunk = 0; first < row_.width; first += kChoiceChunk, ++chunk) {
      const double most = static_cast<double>(row_.maxima[chunk]) + kMostNoise * choice.temperature;
      if (most < least_) continue;
      row_.kernels.words_of_chunk(choice.seed, choice.position, chunk, words);
      offer_survivors(row_.logits + first, words, std::min(kChoiceChunk, row_.width - first),
                      [&](int i) { return first + i; });
    }
  }

 private:
  uint32_t word_of(int32_t id) const {
    return row_.kernels.word_of_token(row_.choice.seed, row_.choice.position, id);
  }

  template <class IdOf>
  void offer_survivors(const float* logits, const uint32_t* words, int count, IdOf id_of) {
    uint8_t may_win[kChoiceChunk];
    row_.kernels.mark_survivors(logits, words, count, row_.choice.temperature, least_, may_win);
    for (int i = 0; i < count; ++i) {
      if (may_win[i]) offer(id_of(i), words[i]);
    }
  }

  void offer(int32_t id, uint32_t word) {
    const double sum = row_.scaled(id) + gumbel(word);
    if (sum > best_ || (sum == best_ && id < winner_)) {
      best_ = sum;
      winner_ = id;
      // What logit + temperature * noise must reach, less more than rounding can move.
      const double exact = sum * row_.choice.temperature;
      least_ = exact - (std::fabs(exact) + 64.0 * row_.choice.temperature) * 0x1p-40;
    }
  }

  const Row& row_;
  double best_ = -std::numeric_limits<double>::infinity();
  double least_ = -std::numeric_limits<double>::infinity();
  int32_t winner_ = std::numeric_limits<int32_t>::max();
};

int32_t chosen(Row& row) {
  const OctavoChoice& choice = row.choice;
  if (row.kernels.chunk_maxima(row.logits, row.width, row.maxima)) return first_nan(row);
  const int32_t likeliest = first_largest(row);
  if (choice.temperature == 0 || !std::isfinite(row.logits[likeliest])) return likeliest;
  row.peak = row.scaled(likeliest);
  const bool top_k = choice.top_k > 0 && choice.top_k < row.width;
  const bool min_p = choice.log_min_p > -std::numeric_limits<double>::infinity();
  const bool top_p = choice.top_p < 1.0;
  Draw draw(row, likeliest);
  if (!top_k && !min_p && !top_p) {
    draw.offer_all();
  } else {
    int count;
    if (top_k) {
      select_likeliest(&row, choice.top_k);
      count = min_p ? keep_min_p_of(&row, choice.top_k) : choice.top_k;
      if (top_p) count = keep_nucleus_of(&row, count);
    } else if (min_p) {
      count = keep_min_p(&row);
      if (top_p) count = keep_nucleus_of(&row, count);
    } else {
      count = keep_nucleus(&row);
    }
    draw.offer_ids(row.ids, count);
  }
  return draw.winner();
}

}  // namespace

int64_t choice_scratch_nbytes(int32_t width) {
  const int64_t chunks = chunks_of(width);
  return chunks * kChoiceChunk * (sizeof(int64_t) + sizeof(int32_t)) + 2 * chunks * sizeof(float);
}

void choose_token(const ChoiceKernels& kernels, OctavoChoice* choice, int32_t width, void* scratch) {
  Row row(kernels, *choice, width, scratch);
  const int32_t id = chosen(row);
  choice->token_id = std::isfinite(row.logits[id]) ? id : ~id;
}

}  // namespace octavo
