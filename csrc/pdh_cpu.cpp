// The interface of pdh_layout.h on CPU memory. Everything is done when a call returns.
#include <algorithm>
#include <exception>
#include <new>
#include <vector>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "pdh_plan.h"

namespace pdh {
namespace {

constexpr int kMostTileTokens = 256;

// Loops that gain from wider registers are compiled for several generations of processors; the loader picks one.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__linux__)
#define PDH_VECTORS __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define PDH_VECTORS
#endif

// `decode_e4m3` and `encode_bf16` without branches, so that loops over them become vector code.
inline float straight_e4m3(uint32_t code) {
  uint32_t size = (code & 0x7Fu) << 20;
  uint32_t normal = size + 0x3C000000u;
  uint32_t subnormal = to_bits(from_bits(size + 0x3C800000u) - 0x1p-6f);
  uint32_t bits = size < 0x800000u ? subnormal : normal;
  bits = size == 0x7F00000u ? kNan : bits;
  return from_bits(bits | (code & 0x80u) << 24);
}

inline uint16_t straight_bf16(float value) {
  uint32_t bits = to_bits(value);
  uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>((bits & 0x7FFFFFFFu) > kInfinity ? 0x7FFFu : rounded);
}

const uint8_t *bytes_at(uint64_t address) { return reinterpret_cast<const uint8_t *>(address); }
uint8_t *mutable_at(uint64_t address) { return reinterpret_cast<uint8_t *>(address); }

// Tokens of one tile in one layer, those on null pages left out.
struct Tile {
  int count = 0;
  int token[kMostTileTokens];
  int64_t source_page[kMostTileTokens];
  int64_t destination_page[kMostTileTokens];
  int source_slot[kMostTileTokens];
  int destination_slot[kMostTileTokens];

  void fill(const Job &job, int start, int stop, bool tail) {
    count = 0;
    for (int t = start; t < stop; t++) {
      token[count] = t;
      bool here = tail || locate(job.source, t, &source_page[count], &source_slot[count]);
      bool there = locate(job.destination, t, &destination_page[count], &destination_slot[count]);
      if (here && there) count++;
    }
  }
};

constexpr size_t kStreamedBytes = 16384;

// Long runs go past the caches, where the processor can do that: nobody reads them here, and a transfer engine wants the
// caches for its own buffers. Runs may overlap.
void copy_bytes(uint8_t *to, const uint8_t *from, size_t bytes) {
#ifdef __SSE2__
  bool apart = to + bytes <= from || from + bytes <= to;
  if (bytes >= kStreamedBytes && apart) {
    size_t done = (16 - reinterpret_cast<uintptr_t>(to) % 16) % 16;
    std::memcpy(to, from, done);
    for (; done + 64 <= bytes; done += 64) {
      _mm_prefetch(reinterpret_cast<const char *>(from + done + 512), _MM_HINT_NTA);
      for (size_t part = 0; part < 64; part += 16) {
        __m128i value = _mm_loadu_si128(reinterpret_cast<const __m128i *>(from + done + part));
        _mm_stream_si128(reinterpret_cast<__m128i *>(to + done + part), value);
      }
    }
    _mm_sfence();
    std::memcpy(to + done, from + done, bytes - done);
    return;
  }
#endif
  std::memmove(to, from, bytes);
}

PDH_VECTORS uint64_t hash_segment(const uint8_t *from, int bytes, uint64_t key, int word) {
  uint64_t sum = 0;
  int whole = bytes / 8;
  for (int j = 0; j < whole; j++) {
    uint64_t value;
    std::memcpy(&value, from + 8 * j, 8);
    sum += hash_word(value, key, static_cast<uint64_t>(word + j));
  }
  if (bytes % 8 != 0) {
    uint64_t value = 0;
    std::memcpy(&value, from + 8 * whole, static_cast<size_t>(bytes % 8));
    sum += hash_word(value, key, static_cast<uint64_t>(word + whole));
  }
  return sum;
}

PDH_VECTORS void fp8_to_bf16(const uint8_t *codes, const uint8_t *scales, int elements, int group, int64_t scale_step,
                             uint8_t *to) {
  for (int start = 0; start < elements; start += group) {
    float scale = load_element(scales + start / group * scale_step, PDH_F32);
    for (int e = start; e < start + group; e++) {
      uint16_t value = straight_bf16(straight_e4m3(codes[e]) * scale);
      std::memcpy(to + 2 * e, &value, 2);
    }
  }
}

PDH_VECTORS void fp8_to_hadamard(const uint8_t *codes, const uint8_t *scales, uint8_t *to) {
  float x[128], y[128];
  float scale = load_element(scales, PDH_F32);
  for (int e = 0; e < 128; e++) x[e] = straight_e4m3(codes[e]) * scale;
  for (int width = 1; width < 128; width *= 2) {
    for (int start = 0; start < 128; start += 2 * width) {
      for (int e = start; e < start + width; e++) {
        y[e] = x[e] + x[e + width];
        y[e + width] = x[e] - x[e + width];
      }
    }
    std::memcpy(x, y, sizeof x);
  }
  for (int e = 0; e < 128; e++) {
    uint16_t value = straight_bf16(x[e] * kHadamardScale);
    std::memcpy(to + 2 * e, &value, 2);
  }
}

// One job in one layer.
class Worker {
 public:
  Worker(const Job &job, std::vector<float> *scratch) : job_(job), scratch_(scratch) {}

  uint64_t run(int layer) {
    layer_ = layer;
    sum_ = 0;
    for (int t = job_.token_start; job_.main_ops > 0 && t < job_.token_stop; t = next_) {
      next_tile(t, job_.token_stop, false);
      for (int i = 0; i < job_.main_ops; i++) run_op(job_.ops[i]);
    }
    for (int t = job_.token_stop; job_.tail_ops > 0 && t < job_.zero_stop; t = next_) {
      next_tile(t, job_.zero_stop, true);
      for (int i = 0; i < job_.tail_ops; i++) run_op(job_.ops[job_.main_ops + i]);
    }
    return sum_;
  }

 private:
  void next_tile(int start, int stop, bool tail) {
    next_ = std::min(stop, start / job_.tile_tokens * job_.tile_tokens + job_.tile_tokens);
    tile_.fill(job_, start, next_, tail);
  }

  uint64_t source(const Rows &rows, int i) const {
    return row_address(rows, rows_base(job_, job_.source, rows, layer_), tile_.source_page[i], tile_.source_slot[i]);
  }

  uint64_t destination(const Rows &rows, int i) const {
    return row_address(rows, rows_base(job_, job_.destination, rows, layer_), tile_.destination_page[i],
                       tile_.destination_slot[i]);
  }

  uint64_t key(int i, int head) const {
    return row_key(job_.head_keys[static_cast<int64_t>(layer_) * job_.heads + head], static_cast<uint64_t>(tile_.token[i]));
  }

  void run_op(const Op &op) {
    switch (op.kind) {
      case kCopy:
        copy_runs(op);
        if (op.hash) hash(op);
        break;
      case kHash:
        hash(op);
        break;
      default:
        for (int i = 0; i < tile_.count; i++) {
          for (int head = 0; head < job_.heads; head++) run_row(op, i, head);
        }
    }
  }

  // Rows that follow each other on both sides are one memcpy.
  void copy_runs(const Op &op) {
    bool tokens_inside = op.source.token_stride < op.source.head_stride;
    int outer = tokens_inside ? job_.heads : tile_.count, inner = tokens_inside ? tile_.count : job_.heads;
    uint64_t from = 0, to = 0, length = 0;
    for (int a = 0; a < outer; a++) {
      for (int b = 0; b < inner; b++) {
        int i = tokens_inside ? b : a, head = tokens_inside ? a : b;
        uint64_t next_from = source(op.source, i) + static_cast<uint64_t>(head * op.source.head_stride);
        uint64_t next_to = destination(op.destination, i) + static_cast<uint64_t>(head * op.destination.head_stride);
        if (length == 0 || next_from != from + length || next_to != to + length) {
          if (length != 0) copy_bytes(mutable_at(to), bytes_at(from), length);
          from = next_from;
          to = next_to;
          length = 0;
        }
        length += static_cast<uint64_t>(op.bytes);
      }
    }
    if (length != 0) copy_bytes(mutable_at(to), bytes_at(from), length);
  }

  void hash(const Op &op) {
    for (int i = 0; i < tile_.count; i++) {
      uint64_t from = source(op.source, i);
      for (int head = 0; head < job_.heads; head++) {
        sum_ += hash_segment(bytes_at(from + static_cast<uint64_t>(head * op.source.head_stride)), op.bytes, key(i, head), op.word);
      }
    }
  }

  void run_row(const Op &op, int i, int head) {
    if (op.kind == kZero || op.kind == kZeroElements) {
      uint8_t *to = mutable_at(destination(op.destination, i)) + head * op.destination.head_stride;
      if (op.kind == kZero) std::memset(to, 0, static_cast<size_t>(op.bytes));
      for (int e = 0; op.kind == kZeroElements && e < op.items; e++) store_bytes(to + e * op.destination.element_stride, 0, op.bytes);
      return;
    }
    if (op.kind == kHashWords) {
      for (int j = 0; j < op.items; j++) {
        uint64_t word = gathered_word(job_, layer_, tile_.source_page[i], tile_.source_slot[i], head, j);
        sum_ += hash_word(word, key(i, head), static_cast<uint64_t>(j));
      }
      return;
    }
    const uint8_t *from = bytes_at(source(op.source, i)) + head * op.source.head_stride;
    uint8_t *to = mutable_at(destination(op.destination, i)) + head * op.destination.head_stride;
    if (op.kind == kCopyElements || op.kind == kScales) {
      elements(op, from, to);
      return;
    }
    const uint8_t *scales =
        op.source_group == 0 ? nullptr : bytes_at(source(op.source_scale, i)) + head * op.source_scale.head_stride;
    if (op.hash) sum_ += hash_segment(from, op.elements, key(i, head), op.word);
    if (op.kind == kFp8ToBf16) {
      fp8_to_bf16(from, scales, op.elements, op.source_group, op.source_scale.element_stride, to);
    } else if (op.kind == kFp8ToHadamard) {
      fp8_to_hadamard(from, scales, to);
    } else {
      uint8_t *scale_to = op.destination_group == 0 ? nullptr
                                                    : mutable_at(destination(op.destination_scale, i)) +
                                                          head * op.destination_scale.head_stride;
      convert_row(Alone{}, op, from, scales, to, scale_to, scratch_->data());
    }
  }

  static void elements(const Op &op, const uint8_t *from, uint8_t *to) {
    for (int e = 0; e < op.items; e++) {
      const uint8_t *a = from + e * op.source.element_stride;
      uint8_t *b = to + e * op.destination.element_stride;
      if (op.kind == kScales) {
        store_element(b, op.destination.element, load_element(a, op.source.element));
      } else {
        std::memcpy(b, a, static_cast<size_t>(op.bytes));
      }
    }
  }

  const Job &job_;
  std::vector<float> *scratch_;
  Tile tile_;
  int layer_ = 0;
  int next_ = 0;
  uint64_t sum_ = 0;
};

uint64_t run(const Plan &plan) {
  std::vector<float> scratch(2 * static_cast<size_t>(plan.scratch_elements));
  uint64_t sum = 0;
  for (const Job &job : plan.jobs) {
    Worker worker(job, &scratch);
    for (int layer = 0; layer < job.layers; layer++) sum += worker.run(layer);
  }
  return sum;
}

void copy_block(const pdh_copy_block &block) {
  for (int64_t layer = 0; layer < block.layers; layer++) {
    for (int64_t i = 0; i < block.copies; i++) {
      int64_t from = block.source_bases[layer] + block.source[i];
      int64_t to = block.destination_bases[layer] + block.destination[i];
      for (int64_t k = 0; k < block.count; k++) {
        copy_bytes(reinterpret_cast<uint8_t *>(to), reinterpret_cast<const uint8_t *>(from), static_cast<size_t>(block.length[i]));
        from += block.source_step;
        to += block.destination_step;
      }
    }
  }
}

}  // namespace
}  // namespace pdh

extern "C" {

uint32_t pdh_abi_version(void) { return PDH_ABI_VERSION; }

uint64_t pdh_abi_sizes(void) { return pdh::abi_sizes(); }

const char *pdh_last_error(void) { return pdh::last_error.c_str(); }

int32_t pdh_devices(void) { return 1; }

int32_t pdh_submit(const pdh_job *jobs, int32_t count, uint64_t, int32_t, pdh_ticket *ticket) {
  try {
    *ticket = pdh_ticket{pdh::run(pdh::lower(jobs, count)), 0, 1, 0};
    return PDH_OK;
  } catch (const pdh::Failure &failure) {
    return pdh::fail(failure);
  } catch (const std::bad_alloc &) {
    return pdh::fail({PDH_MEMORY, "out of memory"});
  }
}

int32_t pdh_poll(pdh_ticket *) { return PDH_OK; }

int32_t pdh_wait(pdh_ticket *, int64_t) { return PDH_OK; }

void pdh_release(pdh_ticket *) {}

int32_t pdh_copy(const pdh_copy_block *blocks, int32_t count) {
  for (int32_t i = 0; i < count; i++) pdh::copy_block(blocks[i]);
  return PDH_OK;
}
}
