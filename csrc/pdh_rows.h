// What both libraries execute: jobs lowered to operations on rows, and the row code that they share.
#ifndef PDH_ROWS_H
#define PDH_ROWS_H

#include "pdh_math.h"

namespace pdh {

enum OpKind : int32_t {
  kCopy,          // dense rows, items of up to 16 bytes; hashed on the way where op.hash says so
  kCopyElements,  // rows whose elements lie apart
  kZero,          // dense rows of the destination
  kZeroElements,
  kHash,       // dense rows of the source
  kHashWords,  // rows of which a word spans planes, or whose elements lie apart
  kScales,
  kFp8ToBf16,      // block-scaled e4m3 to bf16
  kFp8ToHadamard,  // 128 e4m3 values under one scale, rotated, to bf16
  kConvert         // any other pair
};

constexpr int kItemBytes = 16;

// One plane, or several that are neighbours in each row, on one side.
struct Rows {
  int64_t offset;
  int64_t page_stride;
  int64_t token_stride;
  int64_t head_stride;
  int64_t element_stride;
  int32_t region;
  int32_t element;
};

struct Op {
  Rows source;
  Rows source_scale;
  Rows destination;
  Rows destination_scale;
  int32_t kind;
  int32_t width;  // bytes that one load or store may move
  int32_t bytes;  // of one row
  int32_t items;  // of one row: what one thread does at a time
  uint32_t magic;  // items as a divisor, see `divide`
  uint32_t shift;
  int32_t hash;
  int32_t word;    // number of its first word in the row
  int32_t linear;  // rows follow each other without gaps, on both sides
  int32_t stage;   // that holds its source rows, and where they start in a row of the stage
  int32_t skip;
  int32_t scale_stage;
  int32_t scale_skip;
  int32_t elements;
  int32_t source_group;
  int32_t destination_group;
  int32_t steps;
  pdh_step step[4];
};

// Whole rows that follow each other in a page: what a block of the device fetches of it in one go.
struct Stage {
  Rows rows;
  int32_t bytes;  // of one row, its token stride
  int32_t place;  // where the first row of a full tile goes, in the shared memory of one layer
};

constexpr int kStages = 2;

struct Side {
  const uint64_t *bases;
  const int64_t *pages;
  int64_t null_page;
  int32_t first_token;
  int32_t page_tokens;  // 0: the job has nothing on this side
  int32_t head_start;
  int32_t reserved;
};

struct Job {
  Side source;
  Side destination;
  const Op *ops;  // `main_ops` for rows, then `tail_ops` for the rows to zero; on the CPU
  int32_t first_op;  // the same, as a number into the launch's; on devices
  int32_t reserved;
  const pdh_plane *row;
  const uint64_t *head_keys;
  int32_t main_ops;
  int32_t tail_ops;
  int32_t row_planes;
  int32_t layers;
  int32_t heads;
  int32_t token_start;
  int32_t token_stop;
  int32_t zero_stop;
  int32_t tile_tokens;  // a power of two; tiles start at multiples of it
  int32_t main_tiles;
  int32_t tail_tiles;
  int32_t paged;         // no tile crosses a page on either side, and all operations are simple: see pdh_paged.cuh
  int32_t block_layers;  // layers that one block of such a job does
  int32_t tiles_inside;  // the next block does the next tile, not the next layers: as the destination lies in memory
  int32_t stage_count;
  int32_t stage_bytes;  // shared memory of one layer
  Stage stage[kStages];
  uint32_t first_block;
};

// number / items, for numbers below 2 ** 31.
PDH_BOTH uint32_t divide(uint32_t number, uint32_t magic, uint32_t shift) {
  return magic == 0 ? number >> shift : static_cast<uint32_t>((static_cast<uint64_t>(number) * magic) >> 32) >> shift;
}

// Address of the first row of `rows` in a layer: page 0, slot 0, the job's first head.
PDH_BOTH uint64_t rows_base(const Job &job, const Side &side, const Rows &rows, int layer) {
  return side.bases[static_cast<int64_t>(rows.region) * job.layers + layer] + rows.offset + side.head_start * rows.head_stride;
}

// Page id and slot of a token. False on a null page; true where there is nothing on this side.
PDH_BOTH bool locate(const Side &side, int token, int64_t *page, int *slot) {
  if (side.page_tokens == 0) return true;
  uint32_t position = static_cast<uint32_t>(token - side.first_token) / static_cast<uint32_t>(side.page_tokens);
  *page = side.pages[position];
  *slot = token - side.first_token - static_cast<int>(position) * side.page_tokens;
  return *page != side.null_page;
}

PDH_BOTH uint64_t row_address(const Rows &rows, uint64_t base, int64_t page, int64_t slot) {
  return base + page * rows.page_stride + slot * rows.token_stride;
}

// Word `index` of a row, byte by byte, wherever its planes lie.
PDH_BOTH uint64_t gathered_word(const Job &job, int layer, int64_t page, int64_t slot, int head, int index) {
  uint64_t word = 0;
  for (int byte = 0; byte < 8; byte++) {
    int at = 8 * index + byte;
    for (int p = 0; p < job.row_planes; p++) {
      const pdh_plane &plane = job.row[p];
      int size = element_bytes(plane.element);
      int inside = at - plane.row_offset;
      if (inside < 0 || inside >= plane.elements * size) continue;
      uint64_t address = job.source.bases[static_cast<int64_t>(plane.region) * job.layers + layer] + plane.offset +
                         page * plane.page_stride + slot * plane.token_stride +
                         (job.source.head_start + head) * plane.head_stride + inside / size * plane.element_stride +
                         inside % size;
      word |= static_cast<uint64_t>(*reinterpret_cast<const uint8_t *>(address)) << (8 * byte);
    }
  }
  return word;
}

// The team that works on one row: a single thread of the CPU, or the 32 lanes of a warp.
struct Alone {
  static constexpr int lane = 0;
  static constexpr int lanes = 1;
  PDH_BOTH static void sync() {}
  PDH_BOTH static float largest(float value) { return value; }
};

template <class Team>
PDH_BOTH void rotate(const Team &team, float *x) {
  for (int width = 1; width < 128; width *= 2) {
    for (int pair = team.lane; pair < 64; pair += team.lanes) {
      int low = pair / width * 2 * width + pair % width;
      float a = x[low], b = x[low + width];
      x[low] = a + b;
      x[low + width] = a - b;
    }
    team.sync();
  }
  for (int e = team.lane; e < 128; e += team.lanes) x[e] *= kHadamardScale;
  team.sync();
}

template <class Team>
PDH_BOTH void reorder(const Team &team, const Op &op, const pdh_step &step, const float *from, float *to) {
  int half = step.rope / 2;
  for (int e = team.lane; e < op.elements; e += team.lanes) {
    int origin = e;
    if (e < step.rope) origin = step.kind == PDH_INTERLEAVED ? (e & 1) * half + e / 2 : e % half * 2 + e / half;
    to[e] = from[origin];
  }
  team.sync();
}

template <class Team>
PDH_BOTH void encode_row(const Team &team, const Op &op, const float *x, uint8_t *to, uint8_t *scale_to) {
  const Rows &rows = op.destination;
  int group = op.destination_group == 0 ? op.elements : op.destination_group;
  for (int start = 0; start < op.elements; start += group) {
    float scale = 1.0f;
    if (op.destination_group != 0) {
      float amax = 0.0f;
      for (int e = start + team.lane; e < start + group; e += team.lanes) {
        float size = magnitude(x[e]);
        amax = size > amax ? size : amax;
      }
      scale = block_scale(team.largest(amax), op.destination_scale.element != PDH_F32);
      if (team.lane == 0) {
        store_element(scale_to + start / group * op.destination_scale.element_stride, op.destination_scale.element, scale);
      }
    }
    for (int e = start + team.lane; e < start + group; e += team.lanes) {
      float value = op.destination_group == 0 ? x[e] : saturated(x[e] / scale);
      store_element(to + e * rows.element_stride, rows.element, value);
    }
  }
  team.sync();
}

// Decode, steps, encode. `scratch` holds 2 x op.elements floats.
template <class Team>
PDH_BOTH void convert_row(const Team &team, const Op &op, const uint8_t *from, const uint8_t *scale_from, uint8_t *to,
                          uint8_t *scale_to, float *scratch) {
  float *x = scratch, *other = scratch + op.elements;
  for (int e = team.lane; e < op.elements; e += team.lanes) {
    float value = load_element(from + e * op.source.element_stride, op.source.element);
    if (op.source_group != 0) {
      value *= load_element(scale_from + e / op.source_group * op.source_scale.element_stride, op.source_scale.element);
    }
    x[e] = value;
  }
  team.sync();
  for (int s = 0; s < op.steps; s++) {
    if (op.step[s].kind == PDH_HADAMARD128) {
      rotate(team, x);
    } else {
      reorder(team, op, op.step[s], x, other);
      float *swap = x;
      x = other;
      other = swap;
    }
  }
  encode_row(team, op, x, to, scale_to);
}

}  // namespace pdh

#endif
