// The quick way for one-headed rows in pages that tiles do not cross. One block takes one tile in a few layers: the copy engine
// fetches the rows into shared memory while other blocks of the multiprocessor compute, and every row is found by an offset from
// the tile's first one. Rows that are only copied leave by the copy engine too.
#ifndef PDH_PAGED_CUH
#define PDH_PAGED_CUH

#include "pdh_device.cuh"

namespace pdh {

// First and last row of a tile that are moved, and the keys of its rows in one layer.
struct Span {
  int first;
  int stop;
  const uint64_t *keys;
};

// Where rows are read: shared memory, or global memory where a tile's ends do not suit the copy engine.
template <bool kStaged>
__device__ __forceinline__ uint4 read16(const uint8_t *from) {
  if (kStaged) return *reinterpret_cast<const uint4 *>(from);
  return load_once(from);
}

template <bool kStaged>
__device__ __forceinline__ uint2 read8(const uint8_t *from) {
  if (kStaged) return *reinterpret_cast<const uint2 *>(from);
  return load_once8(from);
}

template <bool kStaged>
__device__ __forceinline__ uint32_t read4(const uint8_t *from) {
  if (kStaged) return *reinterpret_cast<const uint32_t *>(from);
  return __ldg(reinterpret_cast<const uint32_t *>(from));
}

struct RowUnit {
  int row;
  int unit;
};

__device__ __forceinline__ RowUnit row_unit(const Op &op, uint32_t index) {
  int row = static_cast<int>(divide(index, op.magic, op.shift));
  return {row, static_cast<int>(index) - row * op.items};
}

__device__ __forceinline__ int row_offset(const Rows &rows, int row) { return row * static_cast<int>(rows.token_stride); }

template <bool kStaged, bool kHashing, bool kStoring>
__device__ __forceinline__ uint64_t copy_span(const Op &op, const uint8_t *from, uint8_t *to, const Span &span) {
  uint64_t sum = 0;
  uint32_t count = static_cast<uint32_t>(span.stop * op.items);
  for (uint32_t index = static_cast<uint32_t>(span.first * op.items) + threadIdx.x; index < count; index += kThreads) {
    RowUnit at = row_unit(op, index);
    uint4 value = read16<kStaged>(from + (row_offset(op.source, at.row) + at.unit * kItemBytes));
    if (kStoring) *reinterpret_cast<uint4 *>(to + (row_offset(op.destination, at.row) + at.unit * kItemBytes)) = value;
    if (kHashing) sum += hash_item(value, kItemBytes, span.keys[at.row], op.word + 2 * at.unit);
  }
  return sum;
}

// Rows of four bytes: the scales of index keys.
template <bool kStaged, bool kHashing, bool kStoring>
__device__ __forceinline__ uint64_t copy_words(const Op &op, const uint8_t *from, uint8_t *to, const Span &span) {
  uint64_t sum = 0;
  for (int row = span.first + static_cast<int>(threadIdx.x); row < span.stop; row += kThreads) {
    uint32_t value = read4<kStaged>(from + row_offset(op.source, row));
    if (kStoring) *reinterpret_cast<uint32_t *>(to + row_offset(op.destination, row)) = value;
    if (kHashing) sum += hash_word(value, span.keys[row], static_cast<uint64_t>(op.word));
  }
  return sum;
}

template <bool kStaged, bool kHashing, bool kStoring>
__device__ __forceinline__ uint64_t copy_any(const Op &op, const uint8_t *from, uint8_t *to, const Span &span) {
  if (op.width != kItemBytes) return copy_words<kStaged, kHashing, kStoring>(op, from, to, span);
  return copy_span<kStaged, kHashing, kStoring>(op, from, to, span);
}

__device__ __forceinline__ void zero_span(const Op &op, uint8_t *to, const Span &span) {
  uint32_t count = static_cast<uint32_t>(span.stop * op.items);
  for (uint32_t index = static_cast<uint32_t>(span.first * op.items) + threadIdx.x; index < count; index += kThreads) {
    RowUnit at = row_unit(op, index);
    store_item(to + (row_offset(op.destination, at.row) + at.unit * kItemBytes), make_uint4(0, 0, 0, 0), op.bytes, op.width);
  }
}

// A thread turns 8 codes into 16 bytes.
template <bool kStaged, bool kHashing>
__device__ __forceinline__ uint64_t fp8_span(const Op &op, const uint8_t *from, const uint8_t *scales, uint8_t *to,
                                             const Span &span) {
  uint64_t sum = 0;
  uint32_t count = static_cast<uint32_t>(span.stop * op.items);
  int log_units = 28 - __clz(op.source_group);  // of 8 elements, in a group
  int scale_step = static_cast<int>(op.source_scale.element_stride);
#pragma unroll 4
  for (uint32_t index = static_cast<uint32_t>(span.first * op.items) + threadIdx.x; index < count; index += kThreads) {
    RowUnit at = row_unit(op, index);
    uint2 codes = read8<kStaged>(from + (row_offset(op.source, at.row) + at.unit * 8));
    int skip = row_offset(op.source_scale, at.row) + (at.unit >> log_units) * scale_step;
    float scale = from_bits(read4<kStaged>(scales + skip));
    *reinterpret_cast<uint4 *>(to + (row_offset(op.destination, at.row) + at.unit * 16)) = eight_bf16(codes, scale);
    if (kHashing) sum += hash_word(word_of(codes), span.keys[at.row], static_cast<uint64_t>(op.word + at.unit));
  }
  return sum;
}

template <bool kStaged, bool kHashing>
__device__ __forceinline__ uint64_t hadamard_span(const Op &op, const uint8_t *from, const uint8_t *scales, uint8_t *to,
                                                  const Span &span) {
  uint64_t sum = 0;
  int unit = static_cast<int>(threadIdx.x) % 8;
  for (int row = static_cast<int>(threadIdx.x) / 8; row < (span.stop + 3) / 4 * 4; row += kThreads / 8) {  // warps stay whole
    bool real = row >= span.first && row < span.stop;
    uint2 low = make_uint2(0, 0), high = make_uint2(0, 0);
    float scale = 0.0f;
    if (real) {
      const uint8_t *at = from + (row_offset(op.source, row) + 8 * unit);
      low = read8<kStaged>(at);
      high = read8<kStaged>(at + 64);
      scale = from_bits(read4<kStaged>(scales + row_offset(op.source_scale, row)));
    }
    float x[16];
    decode_eight(low, scale, x);
    decode_eight(high, scale, x + 8);
    rotate_row(x, unit);
    if (!real) continue;
    uint8_t *there = to + (row_offset(op.destination, row) + 16 * unit);
    *reinterpret_cast<uint4 *>(there) = encode_eight(x);
    *reinterpret_cast<uint4 *>(there + 128) = encode_eight(x + 8);
    if (kHashing) {
      uint64_t word = static_cast<uint64_t>(op.word + unit);
      sum += hash_word(word_of(low), span.keys[row], word) + hash_word(word_of(high), span.keys[row], word + 8);
    }
  }
  return sum;
}

// Where the tile's row 0 lies: page and slot on both sides.
struct Position {
  int64_t source_page;
  int64_t destination_page;
  int source_slot;
  int destination_slot;
};

__device__ __forceinline__ uint32_t shared_address(const void *pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void fetch(void *to, uint64_t from, uint32_t bytes, uint64_t *barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

__device__ __forceinline__ void expect(uint64_t *barrier, uint32_t bytes) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}

__device__ __forceinline__ void wait_for(uint64_t *barrier) {
  uint32_t done = 0;
  while (!done) {
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(shared_address(barrier))
        : "memory");
  }
}

// Shared memory to global memory by the copy engine, which reads it until `sent`.
__device__ __forceinline__ void send(uint8_t *to, const uint8_t *from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void sent() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Whether the copy engine can fetch the tile: it moves multiples of 16 bytes to and from multiples of 16.
__device__ __forceinline__ bool fetchable(const Job &job, const Position &at, const Span &span) {
  bool fits = true;
  for (int i = 0; i < job.stage_count; i++) {
    int bytes = job.stage[i].bytes;
    fits = fits && (at.source_slot + span.first) * bytes % kItemBytes == 0 && (span.stop - span.first) * bytes % kItemBytes == 0;
  }
  return fits;
}

// One thread fetches the rows of all layers of the block.
__device__ __forceinline__ void fetch_tile(const Job &job, const Position &at, const Span &span, int first_layer, int layers,
                                           uint8_t *staged, uint64_t *barrier) {
  int rows = span.stop - span.first;
  uint32_t total = 0;
  for (int i = 0; i < job.stage_count; i++) total += static_cast<uint32_t>(rows * job.stage[i].bytes * layers);
  expect(barrier, total);
  for (int layer = 0; layer < layers; layer++) {
    for (int i = 0; i < job.stage_count; i++) {
      const Stage &stage = job.stage[i];
      uint64_t from = row_address(stage.rows, rows_base(job, job.source, stage.rows, first_layer + layer), at.source_page,
                                  at.source_slot + span.first);
      fetch(staged + layer * job.stage_bytes + stage.place, from, static_cast<uint32_t>(rows * stage.bytes), barrier);
    }
  }
}

// Where row 0 of an operation's source lies. `staged` holds the layer's rows from span.first on.
template <bool kStaged>
__device__ __forceinline__ const uint8_t *source_rows(const Job &job, const Rows &rows, int stage, int skip, int layer,
                                                      const Position &at, const Span &span, const uint8_t *staged) {
  if (kStaged) return staged + (job.stage[stage].place + skip - span.first * job.stage[stage].bytes);
  return reinterpret_cast<const uint8_t *>(
      row_address(rows, rows_base(job, job.source, rows, layer), at.source_page, at.source_slot));
}

template <bool kStaged, bool kHashing, bool kFp8>
__device__ __forceinline__ uint64_t run_op(const Job &job, const Op &op, int layer, const Position &at, const Span &span,
                                           const uint8_t *staged) {
  const uint8_t *from = source_rows<kStaged>(job, op.source, op.stage, op.skip, layer, at, span, staged);
  if (kHashing && kFp8 && op.kind == kHash) return copy_any<kStaged, true, false>(op, from, nullptr, span);
  uint8_t *to = reinterpret_cast<uint8_t *>(row_address(
      op.destination, rows_base(job, job.destination, op.destination, layer), at.destination_page, at.destination_slot));
  if (kFp8 && (op.kind == kFp8ToBf16 || op.kind == kFp8ToHadamard)) {
    const uint8_t *scales = source_rows<kStaged>(job, op.source_scale, op.scale_stage, op.scale_skip, layer, at, span, staged);
    if (op.kind == kFp8ToBf16) return fp8_span<kStaged, kHashing>(op, from, scales, to, span);
    return hadamard_span<kStaged, kHashing>(op, from, scales, to, span);
  }
  if (kStaged && op.linear) {
    int skip = span.first * op.bytes, bytes = (span.stop - span.first) * op.bytes;
    if (((reinterpret_cast<uint64_t>(to) + static_cast<uint64_t>(skip)) | static_cast<uint64_t>(bytes)) % kItemBytes == 0) {
      if (threadIdx.x == 0) send(to + skip, from + skip, static_cast<uint32_t>(bytes));
      return kHashing ? copy_any<kStaged, true, false>(op, from, nullptr, span) : 0;
    }
  }
  return copy_any<kStaged, kHashing, true>(op, from, to, span);
}

// The block's rows, from shared memory or from global memory.
template <bool kStaged, bool kHashing, bool kFp8>
__device__ __forceinline__ uint64_t run_layers(const Job &job, const Op *ops, int first_layer, int layers, const Position &at,
                                               Span span, const uint8_t *staged) {
  uint64_t sum = 0;
  for (int layer = 0; layer < layers; layer++) {
    for (int i = 0; i < job.main_ops; i++) {
      sum += run_op<kStaged, kHashing, kFp8>(job, ops[i], first_layer + layer, at, span, staged);
    }
    staged += job.stage_bytes;
    span.keys += job.tile_tokens;
  }
  return sum;
}

__device__ __forceinline__ void zero_layers(const Job &job, const Op *ops, int first_layer, int layers, const Position &at,
                                            const Span &span) {
  for (int layer = first_layer; layer < first_layer + layers; layer++) {
    for (int i = 0; i < job.tail_ops; i++) {
      const Rows &rows = ops[i].destination;
      uint64_t to = row_address(rows, rows_base(job, job.destination, rows, layer), at.destination_page, at.destination_slot);
      zero_span(ops[i], reinterpret_cast<uint8_t *>(to), span);
    }
  }
}

template <bool kHashing, bool kFp8>
__global__ void __launch_bounds__(kThreads, kPagedBlocks) run_paged(const __grid_constant__ Launch launch) {
  extern __shared__ __align__(128) uint8_t staged[];  // [layer][stage], then the keys [layer][token]
  __shared__ uint64_t barrier;
  int number = 0;
  while (number + 1 < launch.job_count && launch.jobs[number + 1].first_block <= blockIdx.x) number++;
  const Job &job = launch.jobs[number];
  uint32_t block = blockIdx.x - job.first_block;
  uint32_t groups = static_cast<uint32_t>((job.layers + job.block_layers - 1) / job.block_layers);
  uint32_t tiles = static_cast<uint32_t>(job.main_tiles + job.tail_tiles);
  int position = static_cast<int>(job.tiles_inside ? block % tiles : block / groups);
  int first_layer = static_cast<int>(job.tiles_inside ? block / tiles : block % groups) * job.block_layers;
  int layers = min(job.block_layers, job.layers - first_layer);
  bool tail = position >= job.main_tiles;
  int begin = tail ? job.token_stop : job.token_start, end = tail ? job.zero_stop : job.token_stop;
  int token = (begin / job.tile_tokens + (tail ? position - job.main_tiles : position)) * job.tile_tokens;
  uint64_t *keys = reinterpret_cast<uint64_t *>(staged + job.stage_bytes * job.block_layers);
  Span span{max(begin - token, 0), min(end - token, job.tile_tokens), keys};
  Position at{};
  bool here = tail || locate(job.source, token + span.first, &at.source_page, &at.source_slot);
  if (!here || !locate(job.destination, token + span.first, &at.destination_page, &at.destination_slot)) return;
  at.source_slot -= span.first;
  at.destination_slot -= span.first;
  const Op *ops = launch.ops + job.first_op;
  if (tail) {
    zero_layers(job, ops + job.main_ops, first_layer, layers, at, span);
    return;
  }
  bool fetched = fetchable(job, at, span);
  if (fetched && threadIdx.x == 0) fetch_tile(job, at, span, first_layer, layers, staged, &barrier);
  if (kHashing) {
    for (int i = threadIdx.x; i < layers * job.tile_tokens; i += kThreads) {
      int layer = first_layer + i / job.tile_tokens, row = i % job.tile_tokens;
      keys[i] = row_key(job.head_keys[layer], static_cast<uint64_t>(token + row));
    }
  }
  __syncthreads();  // the barrier and the keys are there
  uint64_t sum;
  if (fetched) {
    wait_for(&barrier);
    sum = run_layers<true, kHashing, kFp8>(job, ops, first_layer, layers, at, span, staged);
    if (threadIdx.x == 0) sent();
  } else {
    sum = run_layers<false, kHashing, kFp8>(job, ops, first_layer, layers, at, span, staged);
  }
  if (kHashing) add_digest(sum, launch.digest);
}

}  // namespace pdh

#endif
