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
constexpr int64_t kBagsAhead = 4;
constexpr int64_t kOccurrencesPerRange = 4096;
constexpr int64_t kAllInRange = -1;
constexpr int64_t kElsewhere = -1;
// Fills the columns of a bag behind its rows.
constexpr int64_t kNone = -1;

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

// The columns of a sample's rows whose vectors are summed: bag g has starts[g]..starts[g + 1] - 1, its rows first.
struct Bags {
  const int64_t* starts;
  int64_t num_bags;
};

// Gradients of `num_samples` x `num_slots` rows; those of one sample lie side by side. With bags, one for each bag.
struct Part {
  const int64_t* rows;
  const void* gradients;
  int64_t num_samples;
  int64_t num_slots;
  int64_t sample_stride;
  Bags bags;
};

struct Table {
  float* weight;
  int64_t num_rows;
  int64_t width;
  uint8_t* changed;  // One byte for each row, set to 1 where an update changes it; may be null.
  float l2;          // By which an updated row is multiplied and added to its gradient.
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

// The distinct rows of one range, and for each the chain of its occurrences.
class Chains {
 public:
  Chains(int64_t most, int32_t* next) : next_(next), rows_(most), first_(most), last_(most) {
    int bits = 4;
    while ((int64_t{1} << bits) < 2 * most) ++bits;
    shift_ = 64 - bits;
    mask_ = (uint64_t{1} << bits) - 1;
    table_.assign(mask_ + 1, -1);
  }

  void add(int64_t row, int32_t occurrence) {
    uint64_t place = mix(row) >> shift_;
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
  int32_t next(int32_t occurrence) const { return next_[occurrence]; }

 private:
  int32_t* next_;
  std::vector<int64_t> rows_;
  std::vector<int32_t> first_, last_, table_;
  int64_t size_ = 0;
  int shift_;
  uint64_t mask_;
};

// Ranges of a table's rows with some thousand occurrences each, so that what finds repeated ones stays in the cache.
class Ranges {
 public:
  Ranges(const int64_t* rows, int64_t total, int64_t num_rows) {
    while ((num_rows - 1) >> shift_ > total / kOccurrencesPerRange) ++shift_;
    firsts_.assign(((num_rows - 1) >> shift_) + 2, 0);
    for (int64_t n = 0; n < total; ++n) {
      if (rows[n] != kElsewhere) ++firsts_[(rows[n] >> shift_) + 1];
    }
    for (size_t range = 1; range < firsts_.size(); ++range) firsts_[range] += firsts_[range - 1];
  }

  // Calls `visit(occurrence, place)` in order; places of a range follow one another.
  template <class Visit>
  void for_each(const int64_t* rows, int64_t total, const Visit& visit) const {
    std::vector<int64_t> places = firsts_;
    for (int64_t n = 0; n < total; ++n) {
      if (rows[n] != kElsewhere) visit(n, places[rows[n] >> shift_]++);
    }
  }

  int64_t count() const { return static_cast<int64_t>(firsts_.size()) - 1; }
  int64_t first(int64_t range) const { return firsts_[range]; }

 private:
  int shift_ = 0;
  std::vector<int64_t> firsts_;
};

// Calls `visit(column, bag)` for each row of a sample.
template <class Visit>
void for_each_row(const Bags& bags, const int64_t* rows, const Visit& visit) {
  for (int64_t bag = 0; bag < bags.num_bags; ++bag) {
    for (int64_t column = bags.starts[bag]; column < bags.starts[bag + 1] && rows[column] != kNone; ++column) {
      visit(column, bag);
    }
  }
}

// Returns for each sample of a part how many rows the samples before it have, then the number of all.
std::vector<int64_t> first_rows(const Part& part) {
  std::vector<int64_t> firsts(part.num_samples + 1, 0);
#pragma omp parallel for schedule(static)
  for (int64_t sample = 0; sample < part.num_samples; ++sample) {
    const int64_t* rows = part.rows + sample * part.num_slots;
    for_each_row(part.bags, rows, [&](int64_t, int64_t) { ++firsts[sample + 1]; });
  }
  for (int64_t sample = 0; sample < part.num_samples; ++sample) firsts[sample + 1] += firsts[sample];
  return firsts;
}

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
  int64_t bad = kAllInRange, offset = 0, before = 0;
  for (int64_t p = 0; p < num_parts; ++p) {
    const Part& part = parts[p];
    const auto take = [&](int64_t n, int64_t sample, int64_t column, int64_t vector) {
      const int64_t place = sample * part.num_slots + column;
      const int64_t row = part.rows[place] - shard.first_row;
      const bool is_inside = static_cast<uint64_t>(row) < static_cast<uint64_t>(table.num_rows);
      rows[offset + n] = is_inside ? row : kElsewhere;
      gradients[offset + n] =
          static_cast<const Element*>(part.gradients) + sample * part.sample_stride + vector * width;
      if (!is_inside && !shard.is_cut) {
#pragma omp atomic write
        bad = before + place;
      }
    };
    if (part.bags.starts) {
      const std::vector<int64_t> firsts = first_rows(part);
#pragma omp parallel for schedule(static)
      for (int64_t sample = 0; sample < part.num_samples; ++sample) {
        int64_t n = firsts[sample];
        for_each_row(part.bags, part.rows + sample * part.num_slots,
                     [&](int64_t column, int64_t bag) { take(n++, sample, column, bag); });
      }
      offset += firsts.back();
    } else {
#pragma omp parallel for schedule(static)
      for (int64_t sample = 0; sample < part.num_samples; ++sample) {
        for (int64_t slot = 0; slot < part.num_slots; ++slot) {
          take(sample * part.num_slots + slot, sample, slot, slot);
        }
      }
      offset += part.num_samples * part.num_slots;
    }
    before += part.num_samples * part.num_slots;
  }
  if (bad != kAllInRange) return bad;
  const Ranges ranges(rows.get(), offset, table.num_rows);
  std::unique_ptr<int64_t[]> sorted_rows(new int64_t[offset]);
  std::unique_ptr<const Element*[]> sorted_gradients(new const Element*[offset]);
  ranges.for_each(rows.get(), offset, [&](int64_t n, int64_t place) {
    sorted_rows[place] = rows[n];
    sorted_gradients[place] = gradients[n];
  });
#pragma omp parallel for schedule(dynamic)
  for (int64_t range = 0; range < ranges.count(); ++range) {
    const int64_t first = ranges.first(range), size = ranges.first(range + 1) - first;
    const Element** own = sorted_gradients.get() + first;
    Chains chains(size, next.get() + first);
    for (int64_t n = 0; n < size; ++n) chains.add(sorted_rows[first + n], static_cast<int32_t>(n));
    std::vector<float> sum(width);
    for (int64_t u = 0; u < chains.size(); ++u) {
      if (u + kAhead < chains.size()) {
        const int64_t ahead = chains.row(u + kAhead);
        __builtin_prefetch(table.weight + ahead * width, 1);
        __builtin_prefetch(own[chains.first(u + kAhead)]);
        rule.prefetch(ahead);
        if (table.changed) __builtin_prefetch(table.changed + ahead, 1);
      }
      int32_t n = chains.first(u);
      for (int64_t d = 0; d < width; ++d) sum[d] = to_float(own[n][d]);
      for (n = chains.next(n); n >= 0; n = chains.next(n)) {
        for (int64_t d = 0; d < width; ++d) sum[d] += to_float(own[n][d]);
      }
      float* const weight = table.weight + chains.row(u) * width;
      if (table.l2 != 0.0f) {
        for (int64_t d = 0; d < width; ++d) sum[d] += table.l2 * weight[d];
      }
      rule.apply(weight, sum.data(), chains.row(u), width);
      if (table.changed) table.changed[chains.row(u)] = 1;
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

// Writes the sum of each bag's rows into `out`, those of one sample side by side. Returns as `update_from` does.
template <int64_t kWidth, class Element>
int64_t pool_into(const Table* table, const int64_t* rows, int64_t num_samples, int64_t num_slots, const Bags* bags,
                  Element* out, int64_t sample_stride) {
  const int64_t width = kWidth ? kWidth : table->width, num_bags = bags->num_bags;
  int64_t bad = kAllInRange;
#pragma omp parallel
  {
    std::vector<float> sum(width);
#pragma omp for schedule(static)
    for (int64_t sample = 0; sample < num_samples; ++sample) {
      const int64_t* own = rows + sample * num_slots;
      for (int64_t bag = 0; bag < num_bags; ++bag) {
        const int64_t next = bag + kBagsAhead;
        const int64_t* ahead = own + (next < num_bags ? 0 : num_slots);
        const int64_t bag_ahead = next % num_bags;
        if (next < num_bags || (sample + 1 < num_samples && next < 2 * num_bags)) {
          for (int64_t column = bags->starts[bag_ahead];
               column < bags->starts[bag_ahead + 1] && ahead[column] != kNone; ++column) {
            __builtin_prefetch(table->weight + ahead[column] * width);
          }
        }
        for (int64_t d = 0; d < width; ++d) sum[d] = 0.0f;
        for (int64_t column = bags->starts[bag]; column < bags->starts[bag + 1] && own[column] != kNone; ++column) {
          if (static_cast<uint64_t>(own[column]) >= static_cast<uint64_t>(table->num_rows)) {
#pragma omp atomic write
            bad = sample * num_slots + column;
            continue;
          }
          const float* from = table->weight + own[column] * width;
          for (int64_t d = 0; d < width; ++d) sum[d] += from[d];
        }
        Element* to = out + sample * sample_stride + bag * width;
        for (int64_t d = 0; d < width; ++d) store(sum[d], to + d);
      }
    }
  }
  return bad;
}

template <class Element>
int64_t pool_wide(const Table* table, const int64_t* rows, int64_t num_samples, int64_t num_slots, const Bags* bags,
                  void* out, int64_t sample_stride) {
  Element* to = static_cast<Element*>(out);
  return table->width == 16 ? pool_into<16>(table, rows, num_samples, num_slots, bags, to, sample_stride)
                            : pool_into<0>(table, rows, num_samples, num_slots, bags, to, sample_stride);
}

}  // namespace

extern "C" {

int64_t heterps_pool(const Table* table, const int64_t* rows, int64_t num_samples, int64_t num_slots,
                     const Bags* bags, void* out, int64_t sample_stride, int64_t is_bf16) {
  return is_bf16 ? pool_wide<BFloat16>(table, rows, num_samples, num_slots, bags, out, sample_stride)
                 : pool_wide<float>(table, rows, num_samples, num_slots, bags, out, sample_stride);
}

int64_t heterps_gather(const Table* table, const int64_t* rows, int64_t num_samples, int64_t num_slots, void* out,
                       int64_t sample_stride, int64_t is_bf16) {
  return is_bf16
             ? gather_into(table, rows, num_samples, num_slots, static_cast<BFloat16*>(out), sample_stride)
             : gather_into(table, rows, num_samples, num_slots, static_cast<float*>(out), sample_stride);
}

// Returns how many rows are marked. With `rows` it writes their numbers there, ascending, and clears the marks.
int64_t heterps_changed(uint8_t* changed, int64_t num_rows, int64_t* rows) {
  int64_t count = 0, row = 0;
  if (!rows) {
    for (; row < num_rows; ++row) count += changed[row];
    return count;
  }
  for (; row + 8 <= num_rows; row += 8) {
    // The marks of eight rows, the first in the lowest byte.
    uint64_t marks;
    std::memcpy(&marks, changed + row, sizeof(marks));
    for (; marks; marks &= marks - 1) rows[count++] = row + __builtin_ctzll(marks) / 8;
  }
  for (; row < num_rows; ++row) {
    if (changed[row]) rows[count++] = row;
  }
  std::memset(changed, 0, static_cast<size_t>(num_rows));
  return count;
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
