// What runs on the device: one block takes one tile of tokens of one job in one layer, all operations on it.
#ifndef PDH_DEVICE_CUH
#define PDH_DEVICE_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "pdh_rows.h"

namespace pdh {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kUnroll = 4;  // loads of one thread that are under way at a time
// Blocks of a multiprocessor that registers have to suffice for.
constexpr int kPagedBlocks = 8;
constexpr int kCopyBlocks = 8;
constexpr int kConvertBlocks = 6;
constexpr int kGeneralBlocks = 4;
constexpr int kLaunchJobs = 8;
constexpr int kLaunchOps = 24;
constexpr int kDigestSlots = 64;  // partial sums, so that blocks do not wait for one address

// The jobs of one launch. It travels as a parameter: constant memory is at hand when a block starts.
struct Launch {
  Job jobs[kLaunchJobs];
  Op ops[kLaunchOps];
  int32_t job_count;
  int32_t convert_warps;  // warps that have scratch memory for kConvert
  int32_t scratch_elements;
  int32_t reserved;
  uint64_t *digest;  // kDigestSlots sums
};

struct Warp {
  int lane;
  static constexpr int lanes = 32;
  __device__ __forceinline__ void sync() const { __syncwarp(); }
  __device__ __forceinline__ float largest(float value) const {
    for (int offset = 16; offset > 0; offset /= 2) value = fmaxf(value, __shfl_xor_sync(0xFFFFFFFFu, value, offset));
    return value;
  }
};

// The block's tile. Addresses of every operation's rows lie in shared memory, 0 for tokens that are not moved.
struct Tile {
  const Job &job;
  const Op *ops;
  int layer;
  int token;  // of row 0; tokens before the job's first have address 0
  int log_tokens;
  int roles;  // 2: source, destination; 4: their scales too
  uint64_t *addresses;  // [op][role][token]
  uint64_t *keys;       // [token], where the job has one head
  float *scratch;       // [warp][2][element]

  __device__ __forceinline__ uint64_t at(int op, int role, int row) const {
    return addresses[((op * roles + role) << log_tokens) + row];
  }
};

__device__ __forceinline__ uint4 load_once(const void *from) {
  uint4 value;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(from));
  return value;
}

__device__ __forceinline__ uint2 load_once8(const void *from) {
  uint2 value;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "l"(from));
  return value;
}

// Up to 16 bytes of a row, by loads of `width` bytes; what lies past `bytes` is 0.
__device__ __forceinline__ uint4 load_item(const uint8_t *from, int bytes, int width) {
  if (width == 16) return load_once(from);
  uint32_t words[4] = {0, 0, 0, 0};
  for (int i = 0; i < 4; i++) {
    int left = bytes - 4 * i;
    if (left <= 0) break;
    if (width >= 4) {
      words[i] = *reinterpret_cast<const uint32_t *>(from + 4 * i);
    } else {
      words[i] = load_bytes(from + 4 * i, left < 4 ? left : 4);
    }
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ __forceinline__ void store_item(uint8_t *to, uint4 value, int bytes, int width) {
  if (width == 16) {
    *reinterpret_cast<uint4 *>(to) = value;
    return;
  }
  uint32_t words[4] = {value.x, value.y, value.z, value.w};
  for (int i = 0; i < 4; i++) {
    int left = bytes - 4 * i;
    if (left <= 0) break;
    if (width >= 4) {
      *reinterpret_cast<uint32_t *>(to + 4 * i) = words[i];
    } else {
      store_bytes(to + 4 * i, words[i], left < 4 ? left : 4);
    }
  }
}

__device__ __forceinline__ uint64_t hash_item(uint4 value, int bytes, uint64_t key, int word) {
  uint64_t low = static_cast<uint64_t>(value.y) << 32 | value.x, high = static_cast<uint64_t>(value.w) << 32 | value.z;
  uint64_t sum = hash_word(low, key, static_cast<uint64_t>(word));
  if (bytes > 8) sum += hash_word(high, key, static_cast<uint64_t>(word) + 1);
  return sum;
}

// Item `index` of an operation: which row, which part of it.
struct Place {
  int row;  // token in the tile
  int head;
  int unit;
};

__device__ __forceinline__ Place place(const Tile &tile, const Op &op, uint32_t index) {
  uint32_t line = divide(index, op.magic, op.shift);
  int unit = static_cast<int>(index - line * static_cast<uint32_t>(op.items));
  if (tile.job.heads == 1) return {static_cast<int>(line), 0, unit};
  if (op.source.token_stride < op.source.head_stride) {
    return {static_cast<int>(line & ((1u << tile.log_tokens) - 1u)), static_cast<int>(line >> tile.log_tokens), unit};
  }
  uint32_t row = line / static_cast<uint32_t>(tile.job.heads);
  return {static_cast<int>(row), static_cast<int>(line - row * static_cast<uint32_t>(tile.job.heads)), unit};
}

__device__ __forceinline__ uint64_t key_of(const Tile &tile, const Place &at) {
  if (tile.job.heads == 1) return tile.keys[at.row];
  return row_key(tile.job.head_keys[static_cast<int64_t>(tile.layer) * tile.job.heads + at.head],
                 static_cast<uint64_t>(tile.token + at.row));
}

__device__ __forceinline__ uint32_t item_count(const Tile &tile, const Op &op) {
  return static_cast<uint32_t>(op.items * tile.job.heads) << tile.log_tokens;
}

// kCopy and kHash where every item is one access of 16 bytes. Several loads are under way before the first is used.
template <bool kHashing, bool kStoring>
__device__ __forceinline__ uint64_t copy_wide(const Tile &tile, const Op &op, int number) {
  uint64_t sum = 0;
  uint32_t count = item_count(tile, op);
  for (uint32_t first = threadIdx.x; first < count; first += kThreads * kUnroll) {
    uint4 value[kUnroll];
    uint64_t to[kUnroll];
    Place at[kUnroll];
#pragma unroll
    for (int k = 0; k < kUnroll; k++) {
      uint32_t index = first + k * kThreads;
      to[k] = 0;
      if (index >= count) continue;
      at[k] = place(tile, op, index);
      uint64_t from = tile.at(number, 0, at[k].row);
      to[k] = kStoring ? tile.at(number, 1, at[k].row) : from;
      if (from == 0) to[k] = 0;
      if (to[k] == 0) continue;
      from += at[k].head * op.source.head_stride + at[k].unit * kItemBytes;
      if (kStoring) to[k] += at[k].head * op.destination.head_stride + at[k].unit * kItemBytes;
      value[k] = load_once(reinterpret_cast<const void *>(from));
    }
#pragma unroll
    for (int k = 0; k < kUnroll; k++) {
      if (to[k] == 0) continue;
      if (kStoring) *reinterpret_cast<uint4 *>(to[k]) = value[k];
      if (kHashing && op.hash) sum += hash_item(value[k], kItemBytes, key_of(tile, at[k]), op.word + 2 * at[k].unit);
    }
  }
  return sum;
}

// The same for rows that are aligned to less.
template <bool kHashing, bool kStoring>
__device__ __forceinline__ uint64_t copy_narrow(const Tile &tile, const Op &op, int number) {
  uint64_t sum = 0;
  uint32_t count = item_count(tile, op);
  for (uint32_t index = threadIdx.x; index < count; index += kThreads) {
    Place at = place(tile, op, index);
    uint64_t from = tile.at(number, 0, at.row), to = kStoring ? tile.at(number, 1, at.row) : from;
    if (from == 0 || to == 0) continue;
    int skip = at.unit * kItemBytes, left = op.bytes - skip;
    from += at.head * op.source.head_stride + skip;
    uint4 value = load_item(reinterpret_cast<const uint8_t *>(from), left, op.width);
    if (kStoring) {
      to += at.head * op.destination.head_stride + skip;
      store_item(reinterpret_cast<uint8_t *>(to), value, left, op.width);
    }
    if (kHashing && op.hash) sum += hash_item(value, left, key_of(tile, at), op.word + 2 * at.unit);
  }
  return sum;
}

template <bool kHashing, bool kStoring>
__device__ __forceinline__ uint64_t copy_rows(const Tile &tile, const Op &op, int number) {
  if (op.width == kItemBytes) return copy_wide<kHashing, kStoring>(tile, op, number);
  return copy_narrow<kHashing, kStoring>(tile, op, number);
}

__device__ __forceinline__ void zero_rows(const Tile &tile, const Op &op, int number) {
  uint32_t count = item_count(tile, op);
  for (uint32_t index = threadIdx.x; index < count; index += kThreads) {
    Place at = place(tile, op, index);
    uint64_t to = tile.at(number, 1, at.row);
    if (to == 0) continue;
    to += at.head * op.destination.head_stride;
    if (op.kind == kZero) {
      int skip = at.unit * kItemBytes;
      store_item(reinterpret_cast<uint8_t *>(to + skip), make_uint4(0, 0, 0, 0), op.bytes - skip, op.width);
    } else {
      store_bytes(reinterpret_cast<uint8_t *>(to + at.unit * op.destination.element_stride), 0, op.bytes);
    }
  }
}

__device__ __forceinline__ float2 two_e4m3(uint32_t codes) {
  __half2_raw halves = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes), __NV_E4M3);
  return __half22float2(__half2(halves));
}

__device__ __forceinline__ uint32_t two_bf16(float low, float high) {
  __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<uint32_t *>(&pair);
}

__device__ __forceinline__ uint4 eight_bf16(uint2 codes, float scale) {
  float2 a = two_e4m3(codes.x & 0xFFFFu), b = two_e4m3(codes.x >> 16);
  float2 c = two_e4m3(codes.y & 0xFFFFu), d = two_e4m3(codes.y >> 16);
  return make_uint4(two_bf16(a.x * scale, a.y * scale), two_bf16(b.x * scale, b.y * scale),
                    two_bf16(c.x * scale, c.y * scale), two_bf16(d.x * scale, d.y * scale));
}

__device__ __forceinline__ uint64_t word_of(uint2 codes) { return static_cast<uint64_t>(codes.y) << 32 | codes.x; }

// kFp8ToBf16: a thread turns 8 codes into 16 bytes.
template <bool kHashing>
__device__ __forceinline__ uint64_t fp8_rows(const Tile &tile, const Op &op, int number) {
  uint64_t sum = 0;
  uint32_t count = item_count(tile, op);
  int log_group = 31 - __clz(op.source_group);
  for (uint32_t first = threadIdx.x; first < count; first += kThreads * kUnroll) {
    uint2 codes[kUnroll];
    float scale[kUnroll];
    uint64_t to[kUnroll];
    Place at[kUnroll];
#pragma unroll
    for (int k = 0; k < kUnroll; k++) {
      uint32_t index = first + k * kThreads;
      to[k] = 0;
      if (index >= count) continue;
      at[k] = place(tile, op, index);
      uint64_t from = tile.at(number, 0, at[k].row);
      to[k] = tile.at(number, 1, at[k].row);
      if (from == 0) to[k] = 0;
      if (to[k] == 0) continue;
      int element = at[k].unit * 8;
      uint64_t scales = tile.at(number, 2, at[k].row) + at[k].head * op.source_scale.head_stride +
                        (element >> log_group) * op.source_scale.element_stride;
      codes[k] = load_once8(reinterpret_cast<const void *>(from + at[k].head * op.source.head_stride + element));
      scale[k] = __ldg(reinterpret_cast<const float *>(scales));
      to[k] += at[k].head * op.destination.head_stride + 2 * element;
    }
#pragma unroll
    for (int k = 0; k < kUnroll; k++) {
      if (to[k] == 0) continue;
      *reinterpret_cast<uint4 *>(to[k]) = eight_bf16(codes[k], scale[k]);
      if (kHashing && op.hash) {
        sum += hash_word(word_of(codes[k]), key_of(tile, at[k]), static_cast<uint64_t>(op.word + at[k].unit));
      }
    }
  }
  return sum;
}

__device__ __forceinline__ void decode_eight(uint2 codes, float scale, float *x) {
  float2 a = two_e4m3(codes.x & 0xFFFFu), b = two_e4m3(codes.x >> 16);
  float2 c = two_e4m3(codes.y & 0xFFFFu), d = two_e4m3(codes.y >> 16);
  x[0] = a.x * scale, x[1] = a.y * scale, x[2] = b.x * scale, x[3] = b.y * scale;
  x[4] = c.x * scale, x[5] = c.y * scale, x[6] = d.x * scale, x[7] = d.y * scale;
}

// Butterflies of widths 1, 2, 4 over eight values of one thread.
__device__ __forceinline__ void rotate_eight(float *x) {
#pragma unroll
  for (int width = 1; width < 8; width *= 2) {
#pragma unroll
    for (int e = 0; e < 8; e++) {
      if (e & width) continue;
      float a = x[e], b = x[e + width];
      x[e] = a + b;
      x[e + width] = a - b;
    }
  }
}

__device__ __forceinline__ uint4 encode_eight(const float *x) {
  return make_uint4(two_bf16(x[0] * kHadamardScale, x[1] * kHadamardScale),
                    two_bf16(x[2] * kHadamardScale, x[3] * kHadamardScale),
                    two_bf16(x[4] * kHadamardScale, x[5] * kHadamardScale),
                    two_bf16(x[6] * kHadamardScale, x[7] * kHadamardScale));
}

// The rotation of one row by eight lanes: lane l holds elements 8 l .. 8 l + 7 and 64 + 8 l .. 64 + 8 l + 7, so that loads and
// stores of the lanes touch. The stages run in the order of the reference: widths 1 to 4 in a lane, 8 to 32 between lanes, 64
// in a lane again.
__device__ __forceinline__ void rotate_row(float *x, int unit) {
  rotate_eight(x);
  rotate_eight(x + 8);
#pragma unroll
  for (int lane = 1; lane < 8; lane *= 2) {
    bool upper = (unit & lane) != 0;
#pragma unroll
    for (int e = 0; e < 16; e++) {
      float other = __shfl_xor_sync(0xFFFFFFFFu, x[e], lane);
      x[e] = upper ? other - x[e] : x[e] + other;
    }
  }
#pragma unroll
  for (int e = 0; e < 8; e++) {
    float a = x[e], b = x[e + 8];
    x[e] = a + b;
    x[e + 8] = a - b;
  }
}

// kFp8ToHadamard.
template <bool kHashing>
__device__ __forceinline__ uint64_t hadamard_rows(const Tile &tile, const Op &op, int number) {
  uint64_t sum = 0;
  uint32_t count = item_count(tile, op);  // a multiple of kThreads / 4: warps are whole
  for (uint32_t index = threadIdx.x; index < count; index += kThreads) {
    Place at = place(tile, op, index);
    uint64_t from = tile.at(number, 0, at.row), to = tile.at(number, 1, at.row);
    bool real = from != 0 && to != 0;
    float x[16];
    if (real) {
      from += at.head * op.source.head_stride + 8 * at.unit;
      uint64_t scales = tile.at(number, 2, at.row) + at.head * op.source_scale.head_stride;
      float scale = __ldg(reinterpret_cast<const float *>(scales));
      uint2 low = load_once8(reinterpret_cast<const void *>(from));
      uint2 high = load_once8(reinterpret_cast<const void *>(from + 64));
      decode_eight(low, scale, x);
      decode_eight(high, scale, x + 8);
      if (kHashing && op.hash) {
        uint64_t key = key_of(tile, at), word = static_cast<uint64_t>(op.word + at.unit);
        sum += hash_word(word_of(low), key, word) + hash_word(word_of(high), key, word + 8);
      }
    } else {
#pragma unroll
      for (int e = 0; e < 16; e++) x[e] = 0.0f;
    }
    rotate_row(x, at.unit);
    if (!real) continue;
    to += at.head * op.destination.head_stride + 16 * at.unit;
    *reinterpret_cast<uint4 *>(to) = encode_eight(x);
    *reinterpret_cast<uint4 *>(to + 128) = encode_eight(x + 8);
  }
  return sum;
}

// kHashWords, kCopyElements and kScales: a thread does one word or element.
__device__ inline uint64_t element_rows(const Tile &tile, const Op &op, int number) {
  uint64_t sum = 0;
  uint32_t count = item_count(tile, op);
  for (uint32_t index = threadIdx.x; index < count; index += kThreads) {
    Place at = place(tile, op, index);
    uint64_t from = tile.at(number, 0, at.row), to = tile.at(number, 1, at.row);
    if (from == 0 || (to == 0 && tile.job.destination.page_tokens != 0)) continue;
    if (op.kind == kHashWords) {
      int64_t page = 0;
      int slot = 0;
      locate(tile.job.source, tile.token + at.row, &page, &slot);
      uint64_t word = gathered_word(tile.job, tile.layer, page, slot, at.head, at.unit);
      sum += hash_word(word, key_of(tile, at), static_cast<uint64_t>(at.unit));
      continue;
    }
    const uint8_t *a =
        reinterpret_cast<const uint8_t *>(from + at.head * op.source.head_stride + at.unit * op.source.element_stride);
    uint8_t *b =
        reinterpret_cast<uint8_t *>(to + at.head * op.destination.head_stride + at.unit * op.destination.element_stride);
    if (op.kind == kScales) {
      store_element(b, op.destination.element, load_element(a, op.source.element));
    } else {
      store_bytes(b, load_bytes(a, op.bytes), op.bytes);
    }
  }
  return sum;
}

// kConvert: a warp does one row, in shared memory.
__device__ inline void convert_rows(const Tile &tile, const Op &op, int number, const Launch &launch) {
  int warp = static_cast<int>(threadIdx.x) / 32;
  if (warp >= launch.convert_warps) return;
  Warp team{static_cast<int>(threadIdx.x) % 32};
  float *scratch = tile.scratch + static_cast<int64_t>(warp) * 2 * launch.scratch_elements;
  uint32_t count = item_count(tile, op);
  for (uint32_t index = static_cast<uint32_t>(warp); index < count; index += static_cast<uint32_t>(launch.convert_warps)) {
    Place at = place(tile, op, index);
    uint64_t from = tile.at(number, 0, at.row), to = tile.at(number, 1, at.row);
    if (from == 0 || to == 0) continue;
    convert_row(team, op, reinterpret_cast<const uint8_t *>(from + at.head * op.source.head_stride),
                reinterpret_cast<const uint8_t *>(tile.at(number, 2, at.row) + at.head * op.source_scale.head_stride),
                reinterpret_cast<uint8_t *>(to + at.head * op.destination.head_stride),
                reinterpret_cast<uint8_t *>(tile.at(number, 3, at.row) + at.head * op.destination_scale.head_stride), scratch);
  }
}

// Fill the tile's addresses and keys. `begin`, `end`: the tokens to move.
template <bool kHashing>
__device__ __forceinline__ void prepare(const Tile &tile, int op_count, int begin, int end, bool tail) {
  int tokens = 1 << tile.log_tokens;
  const Job &job = tile.job;
  for (int i = threadIdx.x; i < op_count * tile.roles * tokens; i += kThreads) {
    int row = i & (tokens - 1), role = (i >> tile.log_tokens) % tile.roles, number = (i >> tile.log_tokens) / tile.roles;
    int token = tile.token + row;
    bool on_source = role == 0 || role == 2;
    const Side &side = on_source ? job.source : job.destination;
    const Op &op = tile.ops[number];
    const Rows &rows = role == 0 ? op.source : role == 1 ? op.destination : role == 2 ? op.source_scale : op.destination_scale;
    bool used = side.page_tokens != 0 && !(tail && on_source);
    if (role == 2) used = used && op.source_group != 0;
    if (role == 3) used = used && op.destination_group != 0;
    uint64_t address = 0;
    int64_t page;
    int slot;
    if (used && token >= begin && token < end && locate(side, token, &page, &slot)) {
      address = row_address(rows, rows_base(job, side, rows, tile.layer), page, slot);
    }
    tile.addresses[i] = address;
  }
  if (kHashing && job.head_keys != nullptr && job.heads == 1) {
    for (int row = threadIdx.x; row < tokens; row += kThreads) {
      tile.keys[row] = row_key(job.head_keys[tile.layer], static_cast<uint64_t>(tile.token + row));
    }
  }
}

__device__ __forceinline__ void add_digest(uint64_t sum, uint64_t *digest) {
  __shared__ uint64_t parts[kWarps];
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, offset);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int warp = 1; warp < kWarps; warp++) sum += parts[warp];
  atomicAdd(reinterpret_cast<unsigned long long *>(digest + blockIdx.x % kDigestSlots), static_cast<unsigned long long>(sum));
}

// Variants leave out what a launch does not need, because unused code costs registers.
template <bool kHashing, bool kFp8, bool kGeneral>
__global__ void __launch_bounds__(kThreads, kGeneral             ? kGeneralBlocks
                                                      : kHashing || kFp8 ? kConvertBlocks
                                                                         : kCopyBlocks)
    run_jobs(const __grid_constant__ Launch launch) {
  extern __shared__ uint64_t shared[];
  int number = 0;
  while (number + 1 < launch.job_count && launch.jobs[number + 1].first_block <= blockIdx.x) number++;
  const Job &job = launch.jobs[number];
  uint32_t block = blockIdx.x - job.first_block;
  uint32_t tiles = static_cast<uint32_t>(job.main_tiles + job.tail_tiles);
  int layer = static_cast<int>(block / tiles), position = static_cast<int>(block % tiles);
  bool tail = position >= job.main_tiles;
  int begin = tail ? job.token_stop : job.token_start, end = tail ? job.zero_stop : job.token_stop;
  int first = begin / job.tile_tokens + (tail ? position - job.main_tiles : position);
  int roles = kFp8 || kGeneral ? 4 : 2;
  int op_count = tail ? job.tail_ops : job.main_ops;
  uint64_t *keys = shared + static_cast<int64_t>(op_count) * roles * job.tile_tokens;
  Tile tile{job,
            launch.ops + job.first_op + (tail ? job.main_ops : 0),
            layer,
            first * job.tile_tokens,
            31 - __clz(job.tile_tokens),
            roles,
            shared,
            keys,
            reinterpret_cast<float *>(keys + (kHashing ? job.tile_tokens : 0))};
  prepare<kHashing>(tile, op_count, begin, end, tail);
  __syncthreads();
  uint64_t sum = 0;
  for (int i = 0; i < op_count; i++) {
    const Op &op = tile.ops[i];
    if (op.kind == kCopy) {
      sum += copy_rows<kHashing, true>(tile, op, i);
    } else if (op.kind == kZero) {
      zero_rows(tile, op, i);
    } else if (kHashing && op.kind == kHash) {
      sum += copy_rows<true, false>(tile, op, i);
    } else if (kFp8 && op.kind == kFp8ToBf16) {
      sum += fp8_rows<kHashing>(tile, op, i);
    } else if (kFp8 && op.kind == kFp8ToHadamard) {
      sum += hadamard_rows<kHashing>(tile, op, i);
    } else if (kGeneral && op.kind == kConvert) {
      convert_rows(tile, op, i, launch);
    } else if (kGeneral && op.kind == kZeroElements) {
      zero_rows(tile, op, i);
    } else if (kGeneral) {
      sum += element_rows(tile, op, i);
    }
  }
  if (kHashing) add_digest(sum, launch.digest);
}

}  // namespace pdh

#endif
