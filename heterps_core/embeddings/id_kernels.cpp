// Finds the rows of dynamic ids: a hash table in which an id may have any row of one bucket.
//
// The bucket follows from the leading bits of an id's hash, so it stays with its shard; the last bits choose a group
// of eight rows in it, whose keys are one cache line, and from there groups are probed one after the other (linear
// probing). Nothing is removed while a table is in use, so a group with an empty place ends a search.

#include <cstdint>

#if defined(__AVX2__)
#include <immintrin.h>
#endif
#include <omp.h>

namespace {

// As in features.py and id_index.py.
constexpr int64_t kBucketRows = 512;
constexpr int64_t kGroupRows = 8;
constexpr int64_t kGroups = kBucketRows / kGroupRows;
constexpr int kBucketBits = 32;
constexpr int64_t kNone = -1;
constexpr int64_t kUnknown = -2;
constexpr int64_t kHasRow = int64_t{1} << 62;
constexpr int64_t kAllFound = -1;

// Keys between a prefetch and its use; see row_kernels.cpp.
constexpr int64_t kAhead = 16;
constexpr int64_t kIdsPerThread = 4096;

struct Index {
  int64_t* keys;  // 1 more than the id, and kHasRow where it may be read and trained; 0 where a row is free
  int64_t first_row;  // of this shard in the table
  int64_t num_rows;
  const int64_t* first_rows;   // of each slot in the table; -1 where the table does not have it
  const int64_t* num_buckets;  // of each slot
  int64_t num_slots;
  int64_t hash_bits;
};

// The first row of an id's bucket in this shard, or kUnknown where it is not in this shard.
inline int64_t bucket_of(const Index& index, int64_t id) {
  const int64_t slot = id >> index.hash_bits;
  if (slot < 0 || slot >= index.num_slots || index.first_rows[slot] < 0) return kUnknown;
  const int64_t hash = id & ((int64_t{1} << index.hash_bits) - 1);
  const int64_t bucket = (hash >> (index.hash_bits - kBucketBits)) * index.num_buckets[slot] >> kBucketBits;
  const int64_t row = index.first_rows[slot] + bucket * kBucketRows - index.first_row;
  return row < 0 || row >= index.num_rows ? kUnknown : row;
}

inline int64_t group_of(int64_t id) { return id & (kGroups - 1); }

// A bit for each place of a group, set where it holds a key.
inline uint32_t places_of(const int64_t* group, int64_t key) {
#if defined(__AVX512F__)
  return _mm512_cmpeq_epi64_mask(_mm512_loadu_si512(group), _mm512_set1_epi64(key));
#elif defined(__AVX2__)
  const __m256i wanted = _mm256_set1_epi64x(key);
  const auto half = [&](int64_t first) {
    const __m256i keys = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(group + first));
    return static_cast<uint32_t>(_mm256_movemask_pd(_mm256_castsi256_pd(_mm256_cmpeq_epi64(keys, wanted))));
  };
  return half(0) | half(4) << 4;
#else
  uint32_t places = 0;
  for (int64_t place = 0; place < kGroupRows; ++place) {
    places |= static_cast<uint32_t>(group[place] == key) << place;
  }
  return places;
#endif
}

// The row of an id that has one, else kUnknown.
inline int64_t find(const Index& index, int64_t bucket, int64_t id) {
  const int64_t key = (id + 1) | kHasRow;
  for (int64_t step = 0, number = group_of(id); step < kGroups; ++step, number = (number + 1) % kGroups) {
    const int64_t row = bucket + number * kGroupRows;
    const uint32_t places = places_of(index.keys + row, key);
    if (places) return row + __builtin_ctz(places);
    if (places_of(index.keys + row, 0)) break;
  }
  return kUnknown;
}

}  // namespace

extern "C" {

// Writes for each id its row in the shard, and for kNone kNone; for ids without a row of their own the first one of
// their bucket, or kUnknown where `tells_unknown`. Returns the place of an id that is not of this shard, or -1.
int64_t heterps_find_ids(const Index* described, const int64_t* ids, int64_t num_ids, int64_t tells_unknown,
                         int64_t* rows) {
  const Index index = *described;
  int64_t bad = kAllFound;
#pragma omp parallel if (num_ids > kIdsPerThread)
  {
    const int64_t num_threads = omp_get_num_threads(), thread = omp_get_thread_num();
    const int64_t first = num_ids * thread / num_threads, stop = num_ids * (thread + 1) / num_threads;
    int64_t buckets[kAhead];
    const auto begin = [&](int64_t place) {
      const int64_t bucket = ids[place] == kNone ? kUnknown : bucket_of(index, ids[place]);
      buckets[place % kAhead] = bucket;
      if (bucket != kUnknown) __builtin_prefetch(index.keys + bucket + group_of(ids[place]) * kGroupRows);
    };
    for (int64_t place = first; place < first + kAhead && place < stop; ++place) begin(place);
    for (int64_t place = first; place < stop; ++place) {
      const int64_t bucket = buckets[place % kAhead];
      if (place + kAhead < stop) begin(place + kAhead);
      if (bucket == kUnknown) {
        rows[place] = kNone;
        if (ids[place] != kNone) {
#pragma omp atomic write
          bad = place;
        }
        continue;
      }
      const int64_t row = find(index, bucket, ids[place]);
      rows[place] = row != kUnknown || tells_unknown ? row : bucket;
    }
  }
  return bad;
}

// Gives ids a place in their order, where they have none; writes the row of each in the shard, or kNone where its
// bucket is full. The ids are of this shard.
void heterps_insert_ids(const Index* described, const int64_t* ids, int64_t num_ids, int64_t* rows) {
  const Index index = *described;
  for (int64_t place = 0; place < num_ids; ++place) {
    const int64_t bucket = bucket_of(index, ids[place]), key = ids[place] + 1;
    rows[place] = kNone;
    for (int64_t step = 0, number = group_of(ids[place]); step < kGroups; ++step, number = (number + 1) % kGroups) {
      int64_t* const group = index.keys + bucket + number * kGroupRows;
      const uint32_t own = places_of(group, key) | places_of(group, key | kHasRow), free = places_of(group, 0);
      if (!own && !free) continue;
      rows[place] = group + __builtin_ctz(own ? own : free) - index.keys;
      if (!own) index.keys[rows[place]] = key;
      break;
    }
  }
}

}  // extern "C"
