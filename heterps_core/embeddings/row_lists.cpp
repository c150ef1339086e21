// Lists of row indices, and copies of rows between memory and blocks of a file.
//
// A batch looks up some 100,000 rows. They are sorted by radix (LSD, digits of up to 11 bits), which takes as long for
// any order of them; lists that ascend are merged.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

namespace {

constexpr int kMostDigitBits = 11;
constexpr int kRowShift = 32;
// Fills the columns of a bag behind its rows.
constexpr int64_t kNone = -1;
// Rows between a prefetch and its use. Chosen, not tuned.
constexpr int64_t kAhead = 16;

// Sorts keys by their bits from `shift` on, of which `num_bits` are used; `spare` has room for as many. Returns which of
// both has them in order.
template <class Key>
Key* sort_by_radix(Key* keys, Key* spare, int64_t count, int shift, int num_bits) {
  const int num_passes = std::max(1, (num_bits + kMostDigitBits - 1) / kMostDigitBits);
  const int digit_bits = std::max(1, (num_bits + num_passes - 1) / num_passes);
  const Key mask = (Key{1} << digit_bits) - 1;
  std::vector<uint32_t> places(size_t{1} << digit_bits);
  for (int pass = 0; pass < num_passes; ++pass, shift += digit_bits) {
    std::fill(places.begin(), places.end(), 0);
    for (int64_t n = 0; n < count; ++n) ++places[keys[n] >> shift & mask];
    uint32_t before = 0;
    for (uint32_t& place : places) {
      const uint32_t count = place;
      place = before;
      before += count;
    }
    for (int64_t n = 0; n < count; ++n) spare[places[keys[n] >> shift & mask]++] = keys[n];
    std::swap(keys, spare);
  }
  return keys;
}

int bits_of(uint64_t largest) { return largest ? 64 - __builtin_clzll(largest) : 0; }

}  // namespace

extern "C" {

// Writes the distinct rows, ascending, and for each row its position in them, kNone for kNone where it is allowed.
// Returns their number, or -1 - n where row n is outside of 0..num_rows - 1, which is at most 2^32.
int64_t heterps_distinct(const int64_t* rows, int64_t count, int64_t num_rows, int64_t allows_none,
                         int64_t* distinct, int64_t* inverse) {
  std::vector<uint64_t> keys;
  keys.reserve(count);
  for (int64_t n = 0; n < count; ++n) {
    if (rows[n] == kNone && allows_none) {
      inverse[n] = kNone;
    } else if (static_cast<uint64_t>(rows[n]) >= static_cast<uint64_t>(num_rows)) {
      return -1 - n;
    } else {
      keys.push_back(static_cast<uint64_t>(rows[n]) << kRowShift | static_cast<uint64_t>(n));
    }
  }
  std::vector<uint64_t> spare(keys.size());
  const int64_t num_keys = static_cast<int64_t>(keys.size());
  const int num_bits = bits_of(static_cast<uint64_t>(std::max<int64_t>(num_rows - 1, 0)));
  const uint64_t* const sorted = sort_by_radix(keys.data(), spare.data(), num_keys, kRowShift, num_bits);
  int64_t found = 0;
  for (int64_t n = 0; n < num_keys; ++n) {
    const uint64_t key = sorted[n];
    const int64_t row = static_cast<int64_t>(key >> kRowShift);
    if (!found || distinct[found - 1] != row) distinct[found++] = row;
    inverse[static_cast<uint32_t>(key)] = found - 1;
  }
  return found;
}

// Writes the distinct ones of some rows, ascending, and returns their number. Overwrites the rows.
int64_t heterps_union(uint32_t* rows, int64_t count, uint32_t* distinct) {
  const uint32_t largest = count ? *std::max_element(rows, rows + count) : 0;
  uint32_t* const sorted = sort_by_radix(rows, distinct, count, 0, bits_of(largest));
  if (sorted == distinct) return std::unique(distinct, distinct + count) - distinct;
  return std::unique_copy(sorted, sorted + count, distinct) - distinct;
}

// Counts the ascending rows without a bit, by part of the table; sets their bits where `adds`.
void heterps_count_new(uint8_t* bits, const uint32_t* rows, int64_t count, const int64_t* parts, int64_t adds,
                       int64_t* counts) {
  for (int64_t n = 0, part = 0; n < count; ++n) {
    if (n + kAhead < count) __builtin_prefetch(bits + (rows[n + kAhead] >> 3), 1);
    while (rows[n] >= parts[part + 1]) ++part;
    const uint8_t bit = static_cast<uint8_t>(1u << (rows[n] & 7));
    uint8_t& place = bits[rows[n] >> 3];
    counts[part] += !(place & bit);
    if (adds) place |= bit;
  }
}

// Writes the values at the places of some rows in an ascending list that has them all. Fast where they ascend.
// Returns whether it has them.
int64_t heterps_look_up(const uint32_t* list, const int32_t* values, int64_t length, const int64_t* rows,
                        int64_t count, int64_t* found) {
  int64_t place = 0;
  for (int64_t n = 0; n < count; ++n) {
    const int64_t row = rows[n];
    if (n && row < rows[n - 1]) place = 0;
    int64_t step = 1;
    while (place + step < length && list[place + step] < row) step *= 2;
    const uint32_t* first = list + place + step / 2;
    const uint32_t* last = list + std::min(place + step + 1, length);
    place = std::lower_bound(first, last, row) - list;
    if (place >= length || list[place] != row) return 0;
    found[n] = values[place];
  }
  return 1;
}

// Some rows of windows: lists that ascend, relative to the first row of the shard.
struct Lists {
  const uint32_t* const* rows;
  const int64_t* lengths;
  int64_t count;
};

// Divides the rows of a block that are in memory, ascending and with a slot each, into those that a window has, which
// stay, and others, which leave; writes the rows that windows have and memory has not, and the three numbers. Rows are
// relative to the block, but `first` is relative to the shard.
void heterps_change_block(const int32_t* rows, const int32_t* slots, int64_t count, const Lists* windows, int64_t first,
                          int64_t num_rows, int32_t* staying, int32_t* staying_slots, int32_t* leaving,
                          int32_t* leaving_slots, int32_t* coming, int64_t* counts) {
  constexpr int kBits = 64;
  std::vector<uint64_t> missing(num_rows / kBits + 1, 0);
  for (int64_t list = 0; list < windows->count; ++list) {
    const uint32_t* const own = windows->rows[list];
    for (int64_t n = 0; n < windows->lengths[list]; ++n) {
      const int64_t row = own[n] - first;
      missing[row / kBits] |= uint64_t{1} << (row % kBits);
    }
  }
  int64_t num_staying = 0, num_leaving = 0, num_coming = 0;
  for (int64_t n = 0; n < count; ++n) {
    uint64_t& word = missing[rows[n] / kBits];
    const uint64_t bit = uint64_t{1} << (rows[n] % kBits);
    const bool stays = word & bit;
    word &= ~bit;
    // Both are written, as a branch would be guessed wrong about as often as right.
    staying[num_staying] = leaving[num_leaving] = rows[n];
    staying_slots[num_staying] = leaving_slots[num_leaving] = slots[n];
    num_staying += stays;
    num_leaving += !stays;
  }
  for (size_t word = 0; word < missing.size(); ++word) {
    for (uint64_t bits = missing[word]; bits; bits &= bits - 1) {
      coming[num_coming++] = static_cast<int32_t>(word * kBits + __builtin_ctzll(bits));
    }
  }
  counts[0] = num_staying;
  counts[1] = num_leaving;
  counts[2] = num_coming;
}

// Writes the slot of each row of windows in a block, all of which are among some rows in memory.
void heterps_slots_in_block(const int32_t* rows, const int32_t* slots, int64_t count, const Lists* windows,
                            int64_t first, int64_t num_rows, int32_t* const* found) {
  thread_local std::vector<int32_t> slot_of_row;
  if (static_cast<int64_t>(slot_of_row.size()) < num_rows) slot_of_row.resize(num_rows);
  for (int64_t n = 0; n < count; ++n) slot_of_row[rows[n]] = slots[n];
  for (int64_t list = 0; list < windows->count; ++list) {
    const uint32_t* const own = windows->rows[list];
    for (int64_t n = 0; n < windows->lengths[list]; ++n) found[list][n] = slot_of_row[own[n] - first];
  }
}

// Moves the marks of some slots that have changed to bits of their rows in a block, the highest bit of a byte first.
void heterps_move_marks(uint8_t* is_changed, const int32_t* rows, const int32_t* slots, int64_t count, uint8_t* bits) {
  for (int64_t n = 0; n < count; ++n) {
    if (n + kAhead < count) __builtin_prefetch(is_changed + slots[n + kAhead], 1);
    uint8_t& mark = is_changed[slots[n]];
    bits[rows[n] >> 3] |= static_cast<uint8_t>((mark ? 0x80 : 0) >> (rows[n] & 7));
    mark = 0;
  }
}

// A tensor of rows in memory, each `width` numbers.
struct Column {
  float* values;
  int64_t width;
};

// Copies rows from their slots in memory to their places in a block of records, or from there into memory.
void heterps_copy_records(const Column* columns, int64_t num_columns, const int32_t* slots, const int32_t* places,
                          int64_t count, float* block, int64_t record_width, int64_t to_block) {
  int64_t first = 0;
  for (int64_t c = 0; c < num_columns; ++c) {
    const Column column = columns[c];
    const size_t num_bytes = static_cast<size_t>(column.width) * sizeof(float);
    for (int64_t n = 0; n < count; ++n) {
      if (n + kAhead < count) {
        __builtin_prefetch(column.values + slots[n + kAhead] * column.width, 1);
        __builtin_prefetch(block + places[n + kAhead] * record_width + first, 1);
      }
      float* in_memory = column.values + slots[n] * column.width;
      float* in_block = block + places[n] * record_width + first;
      if (to_block) {
        std::memcpy(in_block, in_memory, num_bytes);
      } else {
        std::memcpy(in_memory, in_block, num_bytes);
      }
    }
    first += column.width;
  }
}
}
