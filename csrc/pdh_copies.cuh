// Plain copies on the device.
#ifndef PDH_COPIES_CUH
#define PDH_COPIES_CUH

#include "pdh_device.cuh"

namespace pdh {

// Plain copies: one block does one entry of one layer, all its repetitions.
struct Copies {
  const int64_t *source_bases;
  const int64_t *destination_bases;
  const int64_t *source;
  const int64_t *destination;
  const int64_t *length;
  int64_t copies;
  int64_t count;
  int64_t source_step;
  int64_t destination_step;
};

__global__ void __launch_bounds__(kThreads) run_copies(const __grid_constant__ Copies copies) {
  int64_t layer = blockIdx.x / copies.copies, entry = blockIdx.x % copies.copies;
  const uint8_t *from = reinterpret_cast<const uint8_t *>(copies.source_bases[layer] + copies.source[entry]);
  uint8_t *to = reinterpret_cast<uint8_t *>(copies.destination_bases[layer] + copies.destination[entry]);
  int64_t length = copies.length[entry];
  uint64_t all = reinterpret_cast<uint64_t>(from) | reinterpret_cast<uint64_t>(to) | static_cast<uint64_t>(length) |
                 static_cast<uint64_t>(copies.source_step) | static_cast<uint64_t>(copies.destination_step);
  int64_t width = all % 16 == 0 ? 16 : 1, items = length / width;
  for (int64_t i = threadIdx.x; i < items * copies.count; i += kThreads) {
    int64_t turn = i / items, skip = i % items * width;
    const uint8_t *a = from + turn * copies.source_step + skip;
    uint8_t *b = to + turn * copies.destination_step + skip;
    if (width == 16) {
      *reinterpret_cast<uint4 *>(b) = load_once(a);
    } else {
      *b = *a;
    }
  }
}

}  // namespace pdh

#endif
