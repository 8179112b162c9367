// From the jobs of the C interface to operations on rows. Runs on the host, for both libraries.
#ifndef PDH_PLAN_H
#define PDH_PLAN_H

#include <algorithm>
#include <climits>
#include <cstdio>
#include <string>
#include <vector>

#include "pdh_rows.h"

namespace pdh {

struct Failure {
  int32_t status;
  std::string reason;
};

inline thread_local std::string last_error;

inline int32_t fail(const Failure &failure) {
  last_error = failure.reason;
  return failure.status;
}

inline uint64_t abi_sizes() {
  return static_cast<uint64_t>(sizeof(pdh_job)) << 48 | static_cast<uint64_t>(sizeof(pdh_part)) << 32 |
         static_cast<uint64_t>(sizeof(pdh_plane)) << 16 | static_cast<uint64_t>(sizeof(pdh_copy_block));
}

// Jobs as they are executed. `ops` and `rows` hold what the jobs point to.
struct Plan {
  std::vector<Job> jobs;
  std::vector<std::vector<Op>> ops;  // of each job
  std::vector<int32_t> origin;       // number of the job of the interface that each was made from
  bool hashes = false;               // some operation contributes to the digest
  bool converts = false;             // some operation is kFp8ToBf16 or kFp8ToHadamard
  bool paged = true;                 // all jobs are
  bool hash_only = false;            // some operation is kHash
  bool general = false;              // some operation is none of those, kCopy, kHash or kZero
  int scratch_elements = 0;          // floats that the widest kConvert needs for one row
};

inline Rows rows_of(const pdh_plane &plane) {
  return {plane.offset,         plane.page_stride, plane.token_stride, plane.head_stride,
          plane.element_stride, plane.region,      plane.element};
}

inline int row_bytes(const pdh_plane &plane) { return plane.elements * element_bytes(plane.element); }

inline bool dense(const pdh_plane &plane) {
  return plane.elements == 1 || plane.element_stride == element_bytes(plane.element);
}

// The largest power of two up to 16 that divides every address of these rows.
inline int alignment(const pdh_job &job, const pdh_side &side, const Rows &rows) {
  uint64_t all = static_cast<uint64_t>(rows.offset) | static_cast<uint64_t>(rows.page_stride) |
                 static_cast<uint64_t>(rows.token_stride) | kItemBytes;
  if (job.heads > 1 || side.head_start > 0) all |= static_cast<uint64_t>(rows.head_stride);
  for (int layer = 0; layer < job.layers; layer++) all |= side.bases[static_cast<int64_t>(rows.region) * job.layers + layer];
  return static_cast<int>(all & (~all + 1));
}

inline int lowest_bit(int64_t number) { return static_cast<int>(std::min<int64_t>(number & -number, kItemBytes)); }

inline void set_items(Op *op, int64_t items, const pdh_job &job, int tile_tokens) {
  if (items * job.heads * tile_tokens >= INT32_MAX) throw Failure{PDH_UNSUPPORTED, "a row is too long"};
  op->items = static_cast<int32_t>(items);
  uint32_t divisor = static_cast<uint32_t>(items);
  int log = 0;
  while ((1ull << log) < divisor) log++;
  if ((1ull << log) == divisor) {
    op->magic = 0;
    op->shift = static_cast<uint32_t>(log);
  } else {  // exact for numbers below 2 ** 31
    op->magic = static_cast<uint32_t>(((1ull << (31 + log)) + divisor - 1) / divisor);
    op->shift = static_cast<uint32_t>(log - 1);
  }
}

// A run of bytes in each row: planes that are neighbours on both sides.
struct Segment {
  Rows source;
  Rows destination;
  int64_t bytes;
  int64_t row_offset;
};

inline bool same_place(const Rows &first, int64_t bytes, const Rows &next, int heads) {
  return first.region == next.region && first.page_stride == next.page_stride && first.token_stride == next.token_stride &&
         (heads == 1 || first.head_stride == next.head_stride) && first.offset + bytes == next.offset;
}

// Joins neighbours. `two_sided`: the destination has to agree too.
inline std::vector<Segment> joined(std::vector<Segment> segments, int heads, bool two_sided) {
  std::sort(segments.begin(), segments.end(),
            [](const Segment &a, const Segment &b) { return a.row_offset < b.row_offset; });
  std::vector<Segment> result;
  for (const Segment &next : segments) {
    if (!result.empty()) {
      Segment &last = result.back();
      if (last.row_offset + last.bytes == next.row_offset && same_place(last.source, last.bytes, next.source, heads) &&
          (!two_sided || same_place(last.destination, last.bytes, next.destination, heads))) {
        last.bytes += next.bytes;
        continue;
      }
    }
    result.push_back(next);
  }
  return result;
}

// Whether every word of the row lies in one segment, which starts at a word.
inline bool words_are_whole(const std::vector<Segment> &segments, int64_t total) {
  for (const Segment &segment : segments) {
    if (segment.row_offset % 8 != 0) return false;
    if (segment.bytes % 8 != 0 && segment.row_offset + segment.bytes != total) return false;
  }
  return true;
}

class Lowering {
 public:
  Lowering(const pdh_job &job, int32_t number) : job_(job), number_(number) { tile_tokens_ = pick_tile(); }

  void run(Plan *plan) {
    check();
    hash_rows();
    for (int p = 0; p < job_.part_count; p++) part(job_.parts[p]);
    copies();
    size_t main_ops = ops_.size();
    for (int p = 0; p < job_.zero_count; p++) zero(job_.zero[p]);
    emit(plan, main_ops);
  }

 private:
  static constexpr int kMostOps = 8;
  static constexpr int kMostStaged = 96 << 10;  // bytes of shared memory: two blocks fit

  void check() const {
    if (job_.layers < 0 || job_.heads < 1 || job_.token_start < 0 || job_.token_stop > INT32_MAX / 2 ||
        job_.zero_stop > INT32_MAX / 2) {
      throw Failure{PDH_ARGUMENT, "layers, heads or tokens are out of range"};
    }
    check_side(job_.source, job_.token_start, job_.token_stop, "source");
    bool writes = job_.part_count > 0 || job_.zero_count > 0;
    if (writes) check_side(job_.destination, job_.token_start, std::max(job_.token_stop, job_.zero_stop), "destination");
  }

  void check_side(const pdh_side &side, int64_t start, int64_t stop, const char *name) const {
    if (start >= stop || job_.layers == 0) return;
    if (side.page_tokens < 1 || side.page_tokens > INT32_MAX || side.first_token < 0 || start < side.first_token ||
        stop > side.first_token + side.page_count * side.page_tokens) {
      throw Failure{PDH_ARGUMENT, std::string("the page table of the ") + name + " does not hold the tokens"};
    }
    for (int64_t i = 0; i < static_cast<int64_t>(side.regions) * job_.layers; i++) {
      if (side.bases[i] == 0) throw Failure{PDH_ARGUMENT, std::string("a base address of the ") + name + " is null"};
    }
  }

  // Tokens of one tile: about as many bytes as a 64-token page of fp8 latent rows, so that small rows fill a block too.
  int pick_tile() const {
    int64_t bytes = 0;
    for (int p = 0; p < job_.part_count; p++) bytes += row_bytes(job_.parts[p].source);
    for (int p = 0; p < job_.row_count && job_.part_count == 0; p++) bytes += row_bytes(job_.row[p]);
    int few = job_.part_count + job_.row_count + job_.zero_count;
    return bytes * job_.heads <= 256 && few <= 4 && !pages_hold(64) ? 256 : 64;
  }

  // Whether no tile of so many tokens crosses a page.
  bool pages_hold(int tokens) const {
    auto holds = [tokens](const pdh_side &side) {
      return side.first_token % tokens == 0 && (side.page_tokens % tokens == 0 || side.page_count == 1);
    };
    return holds(job_.source) && (destination_unused() || holds(job_.destination));
  }

  bool destination_unused() const { return job_.part_count == 0 && job_.zero_count == 0; }

  // Whether one block can find an operation's rows by 32-bit offsets from the first row of its tile.
  bool simple(const Op &op) const {
    for (const Rows *rows : {&op.source, &op.destination, &op.source_scale}) {
      if (rows->token_stride * (tile_tokens_ + 1) >= INT32_MAX) return false;
    }
    switch (op.kind) {
      case kCopy:
      case kHash:
      case kZero:
        return op.width == kItemBytes || (op.width == 4 && op.bytes == 4);
      case kFp8ToBf16:
      case kFp8ToHadamard:
        return true;
      default:
        return false;
    }
  }

  bool hashed_as_job(const Op &op) const { return op.kind == kZero || (op.hash != 0) == (job_.head_keys != nullptr); }

  // Layers that fill a block about as well as one layer of fp8 latent rows does.
  int block_layers() const {
    int64_t bytes = 1;
    for (int p = 0; p < job_.part_count; p++) bytes += row_bytes(job_.parts[p].source);
    for (int p = 0; p < job_.row_count && job_.part_count == 0; p++) bytes += row_bytes(job_.row[p]);
    return static_cast<int>(std::clamp<int64_t>(512 / bytes, 1, 8));
  }

  Op op_of(OpKind kind) const {
    Op op{};
    op.kind = kind;
    op.width = 1;
    return op;
  }

  // Decides how rows are hashed: every plane by the operation that reads it anyway, or else by one of its own.
  void hash_rows() {
    if (job_.head_keys == nullptr || job_.row_count == 0) return;
    std::vector<Segment> planes;
    bool apart = false;
    for (int p = 0; p < job_.row_count; p++) {
      const pdh_plane &plane = job_.row[p];
      total_ += row_bytes(plane);
      apart = apart || !dense(plane);
      planes.push_back({rows_of(plane), rows_of(plane), row_bytes(plane), plane.row_offset});
    }
    std::vector<Segment> whole = joined(planes, job_.heads, false);
    if (apart || !words_are_whole(whole, total_) || !words_are_whole(joined(copied(), job_.heads, true), total_)) {
      Op op = op_of(kHashWords);
      op.source = rows_of(job_.row[0]);
      set_items(&op, (total_ + 7) / 8, job_, tile_tokens_);
      ops_.push_back(op);
      return;
    }
    fused_ = true;
    std::vector<Segment> alone;
    for (const Segment &plane : planes) {
      if (!read_anyway(plane.row_offset)) alone.push_back(plane);
    }
    alone = joined(alone, job_.heads, false);
    if (!words_are_whole(alone, total_)) {  // planes that share a word are hashed together, and by nobody else
      fused_ = false;
      alone = whole;
    }
    for (const Segment &segment : alone) dense_op(kHash, segment, true);
  }

  // Whether an operation that hashes reads the plane that starts there.
  bool read_anyway(int64_t row_offset) const {
    for (int p = 0; p < job_.part_count; p++) {
      const pdh_part &part = job_.parts[p];
      if (part.source.row_offset != row_offset) continue;
      if (part.kind == PDH_COPY) return dense(part.source) && dense(part.destination);
      if (part.kind != PDH_CONVERT) return false;
      Op op = conversion(part);
      return op.kind != kConvert;
    }
    return false;
  }

  // Dense parts that are copied.
  std::vector<Segment> copied() const {
    std::vector<Segment> segments;
    for (int p = 0; p < job_.part_count; p++) {
      const pdh_part &part = job_.parts[p];
      if (part.kind != PDH_COPY || !dense(part.source) || !dense(part.destination)) continue;
      segments.push_back(
          {rows_of(part.source), rows_of(part.destination), row_bytes(part.source), part.source.row_offset});
    }
    return segments;
  }

  void copies() {
    for (const Segment &segment : joined(copied(), job_.heads, true)) dense_op(kCopy, segment, fused_);
  }

  void dense_op(OpKind kind, const Segment &segment, bool hash) {
    Op op = op_of(kind);
    op.source = segment.source;
    op.destination = segment.destination;
    op.bytes = static_cast<int32_t>(segment.bytes);
    op.hash = hash ? 1 : 0;
    op.word = static_cast<int32_t>(segment.row_offset / 8);
    op.linear = segment.source.token_stride == segment.bytes && (kind == kHash || segment.destination.token_stride == segment.bytes);
    int width = lowest_bit(segment.bytes);
    if (kind != kZero) width = std::min(width, alignment(job_, job_.source, segment.source));
    if (kind == kCopy || kind == kZero) width = std::min(width, alignment(job_, job_.destination, segment.destination));
    op.width = width;
    set_items(&op, (segment.bytes + kItemBytes - 1) / kItemBytes, job_, tile_tokens_);
    ops_.push_back(op);
  }

  void zero(const pdh_plane &plane) {
    if (dense(plane)) {
      dense_op(kZero, {rows_of(plane), rows_of(plane), row_bytes(plane), 0}, false);
      return;
    }
    Op op = op_of(kZeroElements);
    op.destination = rows_of(plane);
    op.bytes = element_bytes(plane.element);
    set_items(&op, plane.elements, job_, tile_tokens_);
    ops_.push_back(op);
  }

  void part(const pdh_part &part) {
    if (part.kind == PDH_CONVERT) {
      ops_.push_back(conversion(part));
      return;
    }
    if (part.kind == PDH_COPY && dense(part.source) && dense(part.destination)) return;  // see copies
    Op op = op_of(part.kind == PDH_COPY ? kCopyElements : kScales);
    op.source = rows_of(part.source);
    op.destination = rows_of(part.destination);
    op.bytes = element_bytes(part.source.element);
    op.elements = part.source.elements;
    set_items(&op, part.source.elements, job_, tile_tokens_);
    ops_.push_back(op);
  }

  Op conversion(const pdh_part &part) const {
    Op op = op_of(kConvert);
    op.source = rows_of(part.source);
    op.source_scale = rows_of(part.source_scale);
    op.destination = rows_of(part.destination);
    op.destination_scale = rows_of(part.destination_scale);
    op.elements = part.source.elements;
    op.source_group = part.source_group;
    op.destination_group = part.destination_group;
    op.steps = part.steps;
    std::copy(part.step, part.step + 4, op.step);
    set_items(&op, shape_conversion(part, &op), job_, tile_tokens_);
    op.hash = fused_ && op.kind != kConvert ? 1 : 0;
    op.word = part.source.row_offset / 8;
    return op;
  }

  // Which code converts a part, and how many items its row has.
  int64_t shape_conversion(const pdh_part &part, Op *op) const {
    int elements = part.source.elements;
    bool plain = part.source.row_offset % 8 == 0 && part.source.element == PDH_E4M3 && part.destination.element == PDH_BF16 && part.source_group != 0 &&
                 dense(part.source) && dense(part.destination) && alignment(job_, job_.source, op->source) >= 8 &&
                 alignment(job_, job_.destination, op->destination) >= 16 && part.source_scale.element == PDH_F32 &&
                 alignment(job_, job_.source, op->source_scale) >= 4 && part.source_scale.element_stride % 4 == 0;
    if (plain && part.steps == 0 && elements % 8 == 0 && part.source_group % 8 == 0 &&
        (part.source_group & (part.source_group - 1)) == 0) {
      op->kind = kFp8ToBf16;
      return elements / 8;
    }
    if (plain && part.steps == 1 && part.step[0].kind == PDH_HADAMARD128 && elements == 128 && part.source_group == 128) {
      op->kind = kFp8ToHadamard;
      return 8;
    }
    return 1;
  }

  void emit(Plan *plan, size_t main_ops) {
    for (size_t first = 0; first < ops_.size(); first += kMostOps) {
      std::vector<Op> some(ops_.begin() + first, ops_.begin() + std::min(first + kMostOps, ops_.size()));
      size_t main = first >= main_ops ? 0 : std::min(main_ops - first, some.size());
      add_job(plan, std::move(some), main);
    }
  }

  void add_job(Plan *plan, std::vector<Op> ops, size_t main_ops) {
    for (const Op &op : ops) {
      plan->hashes = plan->hashes || op.hash != 0 || op.kind == kHashWords;
      plan->hash_only = plan->hash_only || op.kind == kHash;
      plan->converts = plan->converts || op.kind == kFp8ToBf16 || op.kind == kFp8ToHadamard;
      plan->general = plan->general || op.kind == kConvert || op.kind == kScales || op.kind == kHashWords ||
                      op.kind == kCopyElements || op.kind == kZeroElements;
      if (op.kind == kConvert) plan->scratch_elements = std::max(plan->scratch_elements, op.elements);
    }
    Job job{};
    job.source = side_of(job_.source);
    if (job_.part_count > 0 || job_.zero_count > 0) job.destination = side_of(job_.destination);
    job.row = job_.row;
    job.head_keys = job_.head_keys;
    job.main_ops = static_cast<int32_t>(main_ops);
    job.tail_ops = static_cast<int32_t>(ops.size() - main_ops);
    job.row_planes = job_.row_count;
    job.layers = job_.layers;
    job.heads = job_.heads;
    job.token_start = static_cast<int32_t>(job_.token_start);
    job.token_stop = static_cast<int32_t>(std::max(job_.token_start, job_.token_stop));
    job.zero_stop = static_cast<int32_t>(std::max<int64_t>(job.token_stop, job_.zero_stop));
    job.tile_tokens = tile_tokens_;
    job.main_tiles = main_ops == 0 ? 0 : tiles(job.token_start, job.token_stop);
    job.tail_tiles = main_ops == ops.size() ? 0 : tiles(job.token_stop, job.zero_stop);
    job.paged = job_.heads == 1 && pages_hold(tile_tokens_) &&
                std::all_of(ops.begin(), ops.end(), [this](const Op &op) { return simple(op) && hashed_as_job(op); });
    job.block_layers = block_layers();
    job.tiles_inside = job.destination.page_tokens >= 4 * tile_tokens_;
    job.paged = job.paged && staged(&job, &ops, main_ops);
    if (job.layers == 0 || job.main_tiles + job.tail_tiles == 0) return;
    bool alike = plan->jobs.empty() || (plan->jobs[0].head_keys != nullptr) == (job.head_keys != nullptr);
    plan->paged = plan->paged && job.paged && alike;
    plan->jobs.push_back(job);
    plan->ops.push_back(std::move(ops));
    plan->origin.push_back(number_);
  }

  // Finds the stages of a job. False where source rows are not packed, or not aligned for the device's bulk copies.
  bool staged(Job *job, std::vector<Op> *ops, size_t main_ops) const {
    std::vector<std::pair<Rows, int>> pieces;  // and the bytes of a row
    for (size_t i = 0; i < main_ops; i++) {
      const Op &op = (*ops)[i];
      bool values = op.kind == kFp8ToBf16 || op.kind == kFp8ToHadamard;
      pieces.push_back({op.source, values ? op.elements : op.bytes});
      if (values) pieces.push_back({op.source_scale, 4 * (op.elements / op.source_group)});
    }
    std::sort(pieces.begin(), pieces.end(), [](const auto &a, const auto &b) { return a.first.offset < b.first.offset; });
    for (const auto &[rows, bytes] : pieces) {
      if (!add_to_stage(job, rows, bytes)) return false;
    }
    for (int i = 0; i < job->stage_count; i++) {
      Stage &stage = job->stage[i];
      if (stage.bytes != stage.rows.token_stride || stage.bytes % 4 != 0) return false;
      Rows first = stage.rows;
      first.token_stride = kItemBytes;  // tiles that start elsewhere are looked at one by one
      if (alignment(job_, job_.source, first) < kItemBytes) return false;
      stage.place = job->stage_bytes;
      job->stage_bytes += (stage.bytes * tile_tokens_ + 127) / 128 * 128;
    }
    for (size_t i = 0; i < main_ops; i++) {
      Op &op = (*ops)[i];
      find_stage(*job, op.source, &op.stage, &op.skip);
      if (op.kind == kFp8ToBf16 || op.kind == kFp8ToHadamard) find_stage(*job, op.source_scale, &op.scale_stage, &op.scale_skip);
    }
    return job->stage_bytes * job->block_layers <= kMostStaged;
  }

  static bool same_stage(const Stage &stage, const Rows &rows) {
    return stage.rows.region == rows.region && stage.rows.page_stride == rows.page_stride &&
           stage.rows.token_stride == rows.token_stride && rows.offset >= stage.rows.offset &&
           rows.offset < stage.rows.offset + stage.rows.token_stride;
  }

  static bool add_to_stage(Job *job, const Rows &rows, int bytes) {
    for (int i = 0; i < job->stage_count; i++) {
      Stage &stage = job->stage[i];
      if (!same_stage(stage, rows)) continue;
      stage.bytes = std::max(stage.bytes, static_cast<int32_t>(rows.offset - stage.rows.offset) + bytes);
      return stage.bytes <= rows.token_stride;
    }
    if (job->stage_count == kStages) return false;
    job->stage[job->stage_count++] = {rows, bytes, 0};
    return true;
  }

  static void find_stage(const Job &job, const Rows &rows, int32_t *stage, int32_t *skip) {
    for (int i = 0; i < job.stage_count; i++) {
      if (!same_stage(job.stage[i], rows)) continue;
      *stage = i;
      *skip = static_cast<int32_t>(rows.offset - job.stage[i].rows.offset);
    }
  }

  int tiles(int start, int stop) const {
    return stop <= start ? 0 : (stop + tile_tokens_ - 1) / tile_tokens_ - start / tile_tokens_;
  }

  static Side side_of(const pdh_side &side) {
    return {side.bases,
            side.pages,
            side.null_page,
            static_cast<int32_t>(side.first_token),
            static_cast<int32_t>(side.page_tokens),
            side.head_start,
            0};
  }

  const pdh_job &job_;
  int32_t number_;
  std::vector<Op> ops_;
  int tile_tokens_ = 64;
  int64_t total_ = 0;
  bool fused_ = false;
};

// Throws Failure.
inline Plan lower(const pdh_job *jobs, int32_t count) {
  if (count < 0 || (count > 0 && jobs == nullptr)) throw Failure{PDH_ARGUMENT, "no jobs were given"};
  Plan plan;
  for (int32_t i = 0; i < count; i++) Lowering(jobs[i], i).run(&plan);
  for (size_t i = 0; i < plan.jobs.size(); i++) plan.jobs[i].ops = plan.ops[i].data();
  return plan;
}

}  // namespace pdh

#endif
