// Look-ups and updates of the rows of an embedding table, each in one pass over memory.
//
// A batch touches some 100,000 rows far apart in memory, so both wait for memory rather than compute: rows are
// fetched ahead of their use, and an update reads each gradient once, where it lies. Rows that occur more than once
// are chained by a hash table; a chain is summed in the order of occurrence, so the number of threads changes nothing.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include <omp.h>

namespace {

// Rows between a prefetch and its use: memory takes about as long as the work on so many. Chosen, not tuned.
constexpr int64_t kAhead = 16;
constexpr int64_t kAllInRange = -1;
constexpr int64_t kElsewhere = -1;

// A number of 16 bits: the upper half of a float32.
struct BFloat16 {
  uint16_t bits;
};

inline float to_float(float value) { return value; }
inline float to_float(BFloat16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

inline void store(float value, float* to) { *to = value; }
inline void store(float value, BFloat16* to) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  // To the nearest, ties to even; what is no number stays none.
  const uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  to->bits = static_cast<uint16_t>(value != value ? 0x7FC0 : rounded);
}

// Gradients of `num_samples` x `num_slots` rows; those of one sample lie side by side.
struct Part {
  const int64_t* rows;
  const void* gradients;
  int64_t num_samples;
  int64_t num_slots;
  int64_t sample_stride;
};

struct Table {
  float* weight;
  int64_t num_rows;
  int64_t width;
};

// Which rows of a larger table these are: an update passes over all others. Without it none may lie outside.
struct Shard {
  int64_t is_cut;
  int64_t first_row;
};

inline uint64_t mix(int64_t row) { return static_cast<uint64_t>(row) * 0x9E3779B97F4A7C15ull; }

struct Sgd {
  float learning_rate;

  void prefetch(int64_t) const {}
  void apply(float* __restrict weight, const float* __restrict gradient, int64_t, int64_t width) const {
    for (int64_t d = 0; d < width; ++d) weight[d] -= learning_rate * gradient[d];
  }
};

inline float mean_square(const float* gradient, int64_t width) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t d = 0; d < width; ++d) sum += gradient[d] * gradient[d];
  return sum / static_cast<float>(width);
}

struct Adagrad {
  float* accumulator;
  float learning_rate;
  float epsilon;

  void prefetch(int64_t row) const { __builtin_prefetch(accumulator + row, 1); }
  void apply(float* __restrict weight, const float* __restrict gradient, int64_t row, int64_t width) const {
    accumulator[row] += mean_square(gradient, width);
    const float step = learning_rate / (std::sqrt(accumulator[row]) + epsilon);
    for (int64_t d = 0; d < width; ++d) weight[d] -= step * gradient[d];
  }
};

// 1 - decay^count, tabulated: two powers for each row would take longer than all the rest.
class BiasCorrection {
 public:
  explicit BiasCorrection(float decay) : decay_(decay) {
    double power = 1.0;
    for (float& value : table_) {
      value = static_cast<float>(1.0 - power);
      power *= decay;
    }
  }
  float operator()(float count) const {
    return count < kTabulated ? table_[static_cast<int64_t>(count)] : 1.0f - std::pow(decay_, count);
  }

 private:
  static constexpr int64_t kTabulated = 1024;
  float decay_;
  float table_[kTabulated];
};

struct Adam {
  float* mean;
  float* square;
  float* num_updates;
  float learning_rate;
  float mean_decay;
  float square_decay;
  float epsilon;
  int64_t table_width;
  BiasCorrection mean_correction{mean_decay};
  BiasCorrection square_correction{square_decay};

  void prefetch(int64_t row) const {
    __builtin_prefetch(mean + row * table_width, 1);
    __builtin_prefetch(square + row, 1);
    __builtin_prefetch(num_updates + row, 1);
  }
  void apply(float* __restrict weight, const float* __restrict gradient, int64_t row, int64_t width) const {
    const float count = (num_updates[row] += 1.0f);
    square[row] = square_decay * square[row] + (1.0f - square_decay) * mean_square(gradient, width);
    const float root = std::sqrt(square[row] / square_correction(count));
    const float step = learning_rate / (mean_correction(count) * (root + epsilon));
    float* __restrict row_mean = mean + row * width;
    for (int64_t d = 0; d < width; ++d) {
      row_mean[d] = mean_decay * row_mean[d] + (1.0f - mean_decay) * gradient[d];
      weight[d] -= step * row_mean[d];
    }
  }
};

// The distinct rows of one thread, and for each the chain of its occurrences.
class Chains {
 public:
  Chains(int64_t most, int32_t* next) : next_(next), rows_(most), first_(most), last_(most) {
    int bits = 4;
    while ((int64_t{1} << bits) < 2 * most) ++bits;
    shift_ = 64 - bits;
    mask_ = (uint64_t{1} << bits) - 1;
    table_.assign(mask_ + 1, -1);
  }

  void prefetch(uint64_t mixed) const { __builtin_prefetch(&table_[mixed >> shift_]); }

  void add(int64_t row, uint64_t mixed, int32_t occurrence) {
    uint64_t place = mixed >> shift_;
    while (table_[place] >= 0 && rows_[table_[place]] != row) place = (place + 1) & mask_;
    next_[occurrence] = -1;
    if (table_[place] >= 0) {
      const int32_t known = table_[place];
      next_[last_[known]] = occurrence;
      last_[known] = occurrence;
      return;
    }
    table_[place] = static_cast<int32_t>(size_);
    rows_[size_] = row;
    first_[size_] = last_[size_] = occurrence;
    ++size_;
  }

  int64_t size() const { return size_; }
  int64_t row(int64_t index) const { return rows_[index]; }
  int32_t first(int64_t index) const { return first_[index]; }

 private:
  int32_t* next_;
  std::vector<int64_t> rows_;
  std::vector<int32_t> first_, last_, table_;
  int64_t size_ = 0;
  int shift_;
  uint64_t mask_;
};

// Returns kAllInRange, or the position of a row number outside the table, in which case nothing was updated.
template <int64_t kWidth, class Element, class Rule>
int64_t update_from(const Table& table, const Shard& shard, const Part* parts, int64_t num_parts,
                    const Rule& rule) {
  const int64_t width = kWidth ? kWidth : table.width;
  int64_t total = 0;
  for (int64_t p = 0; p < num_parts; ++p) total += parts[p].num_samples * parts[p].num_slots;
  std::unique_ptr<int64_t[]> rows(new int64_t[total]);
  std::unique_ptr<const Element*[]> gradients(new const Element*[total]);
  std::unique_ptr<int32_t[]> next(new int32_t[total]);
  int64_t bad = kAllInRange, offset = 0;
  for (int64_t p = 0; p < num_parts; ++p) {
    const Part& part = parts[p];
#pragma omp parallel for schedule(static)
    for (int64_t sample = 0; sample < part.num_samples; ++sample) {
      for (int64_t slot = 0; slot < part.num_slots; ++slot) {
        const int64_t n = sample * part.num_slots + slot;
        const int64_t row = part.rows[n] - shard.first_row;
        const bool is_inside = static_cast<uint64_t>(row) < static_cast<uint64_t>(table.num_rows);
        rows[offset + n] = is_inside ? row : kElsewhere;
        gradients[offset + n] =
            static_cast<const Element*>(part.gradients) + sample * part.sample_stride + slot * width;
        if (!is_inside && !shard.is_cut) {
#pragma omp atomic write
          bad = offset + n;
        }
      }
    }
    offset += part.num_samples * part.num_slots;
  }
  if (bad != kAllInRange) return bad;
#pragma omp parallel
  {
    const uint64_t num_threads = omp_get_num_threads(), thread = omp_get_thread_num();
    // The upper bits place a row in the table of its thread, lower ones choose the thread.
    const auto is_mine = [=](int64_t row, uint64_t mixed) {
      return row != kElsewhere && (mixed >> 16 & 0xFFFF) % num_threads == thread;
    };
    int64_t most = 0;
    for (int64_t n = 0; n < total; ++n) most += is_mine(rows[n], mix(rows[n]));
    Chains chains(most, next.get());
    for (int64_t n = 0; n < total; ++n) {
      if (n + kAhead < total) chains.prefetch(mix(rows[n + kAhead]));
      const uint64_t mixed = mix(rows[n]);
      if (is_mine(rows[n], mixed)) chains.add(rows[n], mixed, static_cast<int32_t>(n));
    }
    std::vector<float> sum(width);
    for (int64_t u = 0; u < chains.size(); ++u) {
      if (u + kAhead < chains.size()) {
        const int64_t ahead = chains.row(u + kAhead);
        __builtin_prefetch(table.weight + ahead * width, 1);
        __builtin_prefetch(gradients[chains.first(u + kAhead)]);
        rule.prefetch(ahead);
      }
      int32_t n = chains.first(u);
      for (int64_t d = 0; d < width; ++d) sum[d] = to_float(gradients[n][d]);
      for (n = next[n]; n >= 0; n = next[n]) {
        for (int64_t d = 0; d < width; ++d) sum[d] += to_float(gradients[n][d]);
      }
      rule.apply(table.weight + chains.row(u) * width, sum.data(), chains.row(u), width);
    }
  }
  return kAllInRange;
}

// A width that the compiler knows makes a row a few vector instructions.
template <class Element, class Rule>
int64_t update_wide(const Table& table, const Shard& shard, const Part* parts, int64_t num_parts,
                    const Rule& rule) {
  if (table.width == 16) return update_from<16, Element>(table, shard, parts, num_parts, rule);
  return update_from<0, Element>(table, shard, parts, num_parts, rule);
}

template <class Rule>
int64_t update(const Table& table, const Shard& shard, const Part* parts, int64_t num_parts, int64_t is_bf16,
               const Rule& rule) {
  if (is_bf16) return update_wide<BFloat16>(table, shard, parts, num_parts, rule);
  return update_wide<float>(table, shard, parts, num_parts, rule);
}

// Copies rows into `out`, those of one sample side by side. Returns as `update_from` does.
template <class Element>
int64_t gather_into(const Table* table, const int64_t* rows, int64_t num_samples, int64_t num_slots, Element* out,
                    int64_t sample_stride) {
  int64_t bad = kAllInRange;
  const int64_t total = num_samples * num_slots, width = table->width;
#pragma omp parallel for schedule(static)
  for (int64_t sample = 0; sample < num_samples; ++sample) {
    for (int64_t slot = 0; slot < num_slots; ++slot) {
      const int64_t n = sample * num_slots + slot;
      if (n + kAhead < total) __builtin_prefetch(table->weight + rows[n + kAhead] * width);
      if (static_cast<uint64_t>(rows[n]) >= static_cast<uint64_t>(table->num_rows)) {
#pragma omp atomic write
        bad = n;
        continue;
      }
      const float* from = table->weight + rows[n] * width;
      Element* to = out + sample * sample_stride + slot * width;
      for (int64_t d = 0; d < width; ++d) store(from[d], to + d);
    }
  }
  return bad;
}

}  // namespace

extern "C" {

int64_t heterps_gather(const Table* table, const int64_t* rows, int64_t num_samples, int64_t num_slots, void* out,
                       int64_t sample_stride, int64_t is_bf16) {
  return is_bf16
             ? gather_into(table, rows, num_samples, num_slots, static_cast<BFloat16*>(out), sample_stride)
             : gather_into(table, rows, num_samples, num_slots, static_cast<float*>(out), sample_stride);
}

int64_t heterps_sgd(const Table* table, const Shard* shard, const Part* parts, int64_t num_parts, int64_t is_bf16,
                    float learning_rate) {
  return update(*table, *shard, parts, num_parts, is_bf16, Sgd{learning_rate});
}

int64_t heterps_adagrad(const Table* table, const Shard* shard, const Part* parts, int64_t num_parts,
                        int64_t is_bf16, float* accumulator, float learning_rate, float epsilon) {
  return update(*table, *shard, parts, num_parts, is_bf16, Adagrad{accumulator, learning_rate, epsilon});
}

int64_t heterps_adam(const Table* table, const Shard* shard, const Part* parts, int64_t num_parts, int64_t is_bf16,
                     float* mean, float* square, float* num_updates, float learning_rate, float mean_decay,
                     float square_decay, float epsilon) {
  return update(*table, *shard, parts, num_parts, is_bf16,
                Adam{mean, square, num_updates, learning_rate, mean_decay, square_decay, epsilon, table->width});
}
}
