// The interface of pdh_layout.h on CUDA devices: jobs are lowered on the host, go up in one copy, and run in one launch.
#include <cuda_runtime.h>

#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <thread>

#include "pdh_copies.cuh"
#include "pdh_device.cuh"
#include "pdh_paged.cuh"
#include "pdh_plan.h"

namespace pdh {
namespace {

constexpr size_t kDigestBytes = kDigestSlots * sizeof(uint64_t);
constexpr int kMostScratch = 160 << 10;  // bytes of shared memory for kConvert
constexpr size_t kSmallestBuffer = 64 << 10;

void check(cudaError_t result, const char *what) {
  if (result == cudaSuccess) return;
  cudaGetLastError();  // not again at the next call
  int32_t status = result == cudaErrorMemoryAllocation ? PDH_MEMORY : PDH_DEVICE;
  throw Failure{status, std::string(what) + ": " + cudaGetErrorString(result)};
}

// Makes a device current, and the former one when it goes.
class Current {
 public:
  explicit Current(int device) {
    check(cudaGetDevice(&former_), "asking for the current device");
    if (device != former_) check(cudaSetDevice(device), "choosing a device");
  }
  ~Current() { cudaSetDevice(former_); }
  Current(const Current &) = delete;
  Current &operator=(const Current &) = delete;

 private:
  int former_ = 0;
};

// Memory for the description of one launch, on both sides, and the event that says when it is free again.
struct Slot {
  int device = 0;
  size_t capacity = 0;
  uint8_t *host = nullptr;
  uint8_t *there = nullptr;
  cudaEvent_t done = nullptr;
  bool free = true;
  bool abandoned = false;
  bool hashes = false;
  size_t digest_at = 0;
};

// Slots are kept: allocating in the middle of a forward pass would stall it.
class Slots {
 public:
  Slot *take(int device, size_t bytes) {
    std::lock_guard<std::mutex> guard(mutex_);
    for (auto &slot : slots_) {
      if (slot->abandoned && cudaEventQuery(slot->done) == cudaSuccess) {
        slot->abandoned = false;
        slot->free = true;
      }
    }
    for (auto &slot : slots_) {
      if (slot->free && slot->device == device && slot->capacity >= bytes) {
        slot->free = false;
        return slot.get();
      }
    }
    auto made = std::make_unique<Slot>();
    made->device = device;
    made->capacity = kSmallestBuffer;
    while (made->capacity < bytes) made->capacity *= 2;
    check(cudaMallocHost(reinterpret_cast<void **>(&made->host), made->capacity), "allocating pinned memory");
    check(cudaMalloc(reinterpret_cast<void **>(&made->there), made->capacity), "allocating device memory");
    check(cudaEventCreateWithFlags(&made->done, cudaEventDisableTiming), "creating an event");
    made->free = false;
    slots_.push_back(std::move(made));
    return slots_.back().get();
  }

  void give_back(Slot *slot) {
    std::lock_guard<std::mutex> guard(mutex_);
    slot->free = true;
  }

  void abandon(Slot *slot) {
    std::lock_guard<std::mutex> guard(mutex_);
    slot->abandoned = true;
  }

  cudaStream_t stream(int device) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto found = streams_.find(device);
    if (found != streams_.end()) return found->second;
    cudaStream_t stream;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "creating a stream");
    return streams_[device] = stream;
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Slot>> slots_;
  std::map<int, cudaStream_t> streams_;
};

Slots &slots() {  // never destroyed: the driver may be gone when static objects are
  static Slots *all = new Slots;
  return *all;
}

// The device that holds an address; -1 for pinned host memory.
int device_of(uint64_t address) {
  cudaPointerAttributes attributes;
  check(cudaPointerGetAttributes(&attributes, reinterpret_cast<const void *>(address)), "asking whose memory it is");
  if (attributes.type == cudaMemoryTypeDevice || attributes.type == cudaMemoryTypeManaged) return attributes.device;
  if (attributes.type == cudaMemoryTypeHost) return -1;
  char text[96];
  std::snprintf(text, sizeof text, "address %#llx is CPU memory that no device reaches: ",
                static_cast<unsigned long long>(address));
  throw Failure{PDH_ARGUMENT, std::string(text) + "use the cpu kernels for it, or pin it (cudaHostRegister)"};
}

void reach(int device, int other) {
  if (other < 0 || other == device) return;
  int possible = 0;
  check(cudaDeviceCanAccessPeer(&possible, device, other), "asking for peer access");
  if (!possible) {
    throw Failure{PDH_ARGUMENT, "device " + std::to_string(device) + " cannot reach the memory of device " +
                                    std::to_string(other) + ": land the rows on the device that converts them"};
  }
  Current current(device);
  cudaError_t result = cudaDeviceEnablePeerAccess(other, 0);
  if (result == cudaErrorPeerAccessAlreadyEnabled) {
    cudaGetLastError();
  } else {
    check(result, "enabling peer access");
  }
}

// Where to run: where the destination is, or else the source. Other devices involved become reachable from there.
int choose_device(const pdh_job *jobs, int32_t count) {
  std::vector<int> involved;
  for (int turn = 0; turn < 2; turn++) {
    for (int32_t i = 0; i < count; i++) {
      const pdh_side &side = turn == 0 ? jobs[i].destination : jobs[i].source;
      for (int region = 0; jobs[i].layers > 0 && side.bases != nullptr && region < side.regions; region++) {
        involved.push_back(device_of(side.bases[static_cast<int64_t>(region) * jobs[i].layers]));
      }
    }
  }
  int device = -1;
  for (int each : involved) device = device < 0 ? each : device;
  if (device < 0) check(cudaGetDevice(&device), "asking for the current device");
  for (int each : involved) reach(device, each);
  return device;
}

// Lays arrays out in a slot; first without one, to learn the size.
class Writer {
 public:
  explicit Writer(const Slot *slot) : slot_(slot) {}

  template <class T>
  const T *put(const T *values, size_t count) {
    used_ = (used_ + 15) / 16 * 16;
    size_t at = used_;
    used_ += count * sizeof(T);
    if (slot_ == nullptr || count == 0) return nullptr;
    std::memcpy(slot_->host + at, values, count * sizeof(T));
    return reinterpret_cast<const T *>(slot_->there + at);
  }

  size_t used() const { return used_; }

 private:
  const Slot *slot_;
  size_t used_ = 0;
};

size_t side_bases(const pdh_side &side, int layers) { return static_cast<size_t>(side.regions) * static_cast<size_t>(layers); }

Side put_side(Writer *writer, Side side, const pdh_side &given, int layers) {
  if (side.page_tokens == 0) return side;
  side.bases = writer->put(given.bases, side_bases(given, layers));
  side.pages = writer->put(given.pages, static_cast<size_t>(given.page_count));
  return side;
}

// What the kernels read from global memory. The jobs themselves are parameters, and are told where it lies.
void put_arrays(Writer *writer, const Plan &plan, const pdh_job *given, std::vector<Job> *jobs) {
  *jobs = plan.jobs;
  for (size_t i = 0; i < jobs->size(); i++) {
    const pdh_job &from = given[plan.origin[i]];
    Job &job = (*jobs)[i];
    job.row = writer->put(from.row, static_cast<size_t>(from.row_count));
    size_t keys = from.head_keys == nullptr ? 0 : static_cast<size_t>(from.layers) * static_cast<size_t>(from.heads);
    job.head_keys = writer->put(from.head_keys, keys);
    job.source = put_side(writer, job.source, from.source, from.layers);
    job.destination = put_side(writer, job.destination, from.destination, from.layers);
  }
}

using Kernel = void (*)(Launch);

Kernel choose_kernel(const Plan &plan) {
  if (plan.paged) {
    if (plan.converts || plan.hash_only) return plan.hashes ? run_paged<true, true> : run_paged<false, true>;
    return plan.hashes ? run_paged<true, false> : run_paged<false, false>;
  }
  if (plan.general) return run_jobs<true, true, true>;
  if (plan.converts) return plan.hashes ? run_jobs<true, true, false> : run_jobs<false, true, false>;
  return plan.hashes ? run_jobs<true, false, false> : run_jobs<false, false, false>;
}

// Shared memory of one block.
size_t shared_bytes(const Plan &plan, Launch *launch) {
  size_t roles = plan.general || plan.converts ? 4 : 2, most = 0;
  for (const Job &job : plan.jobs) {
    size_t ops = static_cast<size_t>(std::max(job.main_ops, job.tail_ops));
    size_t entries = (ops * roles + (plan.hashes || plan.general ? 1 : 0)) * static_cast<size_t>(job.tile_tokens);
    if (plan.paged) entries = plan.hashes ? static_cast<size_t>(job.block_layers) * static_cast<size_t>(job.tile_tokens) : 0;
    size_t staged = plan.paged ? static_cast<size_t>(job.block_layers) * static_cast<size_t>(job.stage_bytes) : 0;
    most = std::max(most, entries * sizeof(uint64_t) + staged);
  }
  launch->scratch_elements = plan.scratch_elements;
  launch->convert_warps = kWarps;
  size_t one = 2 * sizeof(float) * static_cast<size_t>(plan.scratch_elements);
  if (one > kMostScratch) throw Failure{PDH_UNSUPPORTED, "a row is too long to be converted on the device"};
  if (one != 0) launch->convert_warps = static_cast<int32_t>(std::min<size_t>(kWarps, kMostScratch / one));
  return most + one * static_cast<size_t>(launch->convert_warps);
}

uint64_t blocks_of(const Plan &plan, const Job &job) {
  int layers = plan.paged ? (job.layers + job.block_layers - 1) / job.block_layers : job.layers;
  return static_cast<uint64_t>(layers) * static_cast<uint64_t>(job.main_tiles + job.tail_tiles);
}

// Launches as many of the jobs from `first` on as one launch takes. Returns the first that was left.
size_t launch_some(const Plan &plan, const std::vector<Job> &jobs, size_t first, Launch *launch, size_t shared,
                   cudaStream_t stream) {
  uint64_t blocks = 0;
  size_t next = first;
  int32_t ops = 0;
  for (launch->job_count = 0; next < jobs.size() && launch->job_count < kLaunchJobs; next++) {
    const std::vector<Op> &own = plan.ops[next];
    if (ops + own.size() > kLaunchOps || (next > first && blocks + blocks_of(plan, jobs[next]) > INT32_MAX)) break;
    Job &job = launch->jobs[launch->job_count++];
    job = jobs[next];
    job.first_op = ops;
    job.first_block = static_cast<uint32_t>(blocks);
    std::copy(own.begin(), own.end(), launch->ops + ops);
    ops += static_cast<int32_t>(own.size());
    blocks += blocks_of(plan, job);
  }
  if (blocks > INT32_MAX) throw Failure{PDH_UNSUPPORTED, "too many rows for one launch"};
  choose_kernel(plan)<<<static_cast<uint32_t>(blocks), kThreads, shared, stream>>>(*launch);
  check(cudaGetLastError(), "launching");
  return next;
}

void enqueue(const Plan &plan, const pdh_job *given, Slot *slot, cudaStream_t stream) {
  Writer writer(slot);
  std::vector<Job> jobs;
  put_arrays(&writer, plan, given, &jobs);
  Launch launch{};
  const uint64_t zeros[kDigestSlots] = {};
  launch.digest = const_cast<uint64_t *>(writer.put(zeros, kDigestSlots));
  slot->digest_at = writer.used() - kDigestBytes;
  slot->hashes = plan.hashes;
  size_t shared = shared_bytes(plan, &launch);
  if (shared > 48 << 10) {
    check(cudaFuncSetAttribute(reinterpret_cast<const void *>(choose_kernel(plan)), cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(shared)),
          "asking for shared memory");
  }
  check(cudaMemcpyAsync(slot->there, slot->host, writer.used(), cudaMemcpyHostToDevice, stream), "sending the jobs");
  for (size_t next = 0; next < jobs.size();) next = launch_some(plan, jobs, next, &launch, shared, stream);
  if (plan.hashes) {
    check(cudaMemcpyAsync(slot->host + slot->digest_at, slot->there + slot->digest_at, kDigestBytes, cudaMemcpyDeviceToHost,
                          stream),
          "fetching the digest");
  }
  check(cudaEventRecord(slot->done, stream), "recording an event");
}

void submit(const pdh_job *jobs, int32_t count, uint64_t stream_handle, bool own_stream, pdh_ticket *ticket) {
  *ticket = pdh_ticket{0, 0, 1, 0};
  Plan plan = lower(jobs, count);
  if (plan.jobs.empty()) return;
  int device = choose_device(jobs, count);
  Current current(device);
  cudaStream_t stream = own_stream ? slots().stream(device) : reinterpret_cast<cudaStream_t>(stream_handle);
  Writer size(nullptr);
  std::vector<Job> unused;
  put_arrays(&size, plan, jobs, &unused);
  Slot *slot = slots().take(device, size.used() + kDigestBytes + 64);
  enqueue(plan, jobs, slot, stream);  // where it throws, the slot may be in use: it is not taken again
  *ticket = pdh_ticket{0, reinterpret_cast<int64_t>(slot), 0, 0};
}

void poll(pdh_ticket *ticket) {
  if (ticket->done) return;
  Slot *slot = reinterpret_cast<Slot *>(ticket->handle);
  if (slot == nullptr) throw Failure{PDH_DEVICE, "this work has failed before"};
  cudaError_t result = cudaEventQuery(slot->done);
  if (result == cudaErrorNotReady) {
    cudaGetLastError();
    return;
  }
  ticket->handle = 0;
  check(result, "running the kernels");
  if (slot->hashes) {
    uint64_t sums[kDigestSlots];
    std::memcpy(sums, slot->host + slot->digest_at, kDigestBytes);
    for (uint64_t sum : sums) ticket->digest += sum;
  }
  ticket->done = 1;
  slots().give_back(slot);
}

void wait(pdh_ticket *ticket, int64_t timeout_ns) {
  using Clock = std::chrono::steady_clock;
  Clock::time_point start = Clock::now();
  for (;;) {
    poll(ticket);
    std::chrono::nanoseconds passed = Clock::now() - start;
    if (ticket->done || passed.count() >= timeout_ns) return;
    if (passed < std::chrono::milliseconds(5)) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
}

void copy(const pdh_copy_block &block) {
  if (block.layers == 0 || block.copies == 0 || block.count == 0) return;
  if (block.layers * block.copies > INT32_MAX) throw Failure{PDH_UNSUPPORTED, "too many copies for one launch"};
  int device = device_of(static_cast<uint64_t>(block.destination_bases[0]));
  int other = device_of(static_cast<uint64_t>(block.source_bases[0]));
  if (device < 0) device = other;
  if (device < 0) check(cudaGetDevice(&device), "asking for the current device");
  reach(device, other);
  Current current(device);
  cudaStream_t stream = slots().stream(device);
  size_t layers = static_cast<size_t>(block.layers), copies = static_cast<size_t>(block.copies);
  Slot *slot = slots().take(device, (2 * layers + 3 * copies) * sizeof(int64_t) + 128);
  Writer writer(slot);
  Copies there{};
  there.source_bases = writer.put(block.source_bases, layers);
  there.destination_bases = writer.put(block.destination_bases, layers);
  there.source = writer.put(block.source, copies);
  there.destination = writer.put(block.destination, copies);
  there.length = writer.put(block.length, copies);
  there.copies = block.copies;
  there.count = block.count;
  there.source_step = block.source_step;
  there.destination_step = block.destination_step;
  check(cudaMemcpyAsync(slot->there, slot->host, writer.used(), cudaMemcpyHostToDevice, stream), "sending the copies");
  run_copies<<<static_cast<uint32_t>(layers * copies), kThreads, 0, stream>>>(there);
  check(cudaGetLastError(), "launching");
  check(cudaEventRecord(slot->done, stream), "recording an event");
  slots().abandon(slot);
}

void copy_all(const pdh_copy_block *blocks, int32_t count) {
  for (int32_t i = 0; i < count; i++) copy(blocks[i]);
  for (int32_t i = 0; i < count; i++) {
    if (blocks[i].layers == 0) continue;
    int device = std::max(0, device_of(static_cast<uint64_t>(blocks[i].destination_bases[0])));
    Current current(device);
    check(cudaStreamSynchronize(slots().stream(device)), "copying");
  }
}

template <class Call>
int32_t guarded(Call call) {
  try {
    call();
    return PDH_OK;
  } catch (const Failure &failure) {
    return fail(failure);
  } catch (const std::bad_alloc &) {
    return fail({PDH_MEMORY, "out of memory"});
  }
}

}  // namespace
}  // namespace pdh

extern "C" {

uint32_t pdh_abi_version(void) { return PDH_ABI_VERSION; }

uint64_t pdh_abi_sizes(void) { return pdh::abi_sizes(); }

const char *pdh_last_error(void) { return pdh::last_error.c_str(); }

int32_t pdh_devices(void) {
  int count = 0;
  int32_t status = pdh::guarded([&] { pdh::check(cudaGetDeviceCount(&count), "looking for CUDA devices"); });
  if (status != PDH_OK) return status;
  return count > 0 ? count : pdh::fail({PDH_DEVICE, "there is no CUDA device"});
}

int32_t pdh_submit(const pdh_job *jobs, int32_t count, uint64_t stream, int32_t own_stream, pdh_ticket *ticket) {
  return pdh::guarded([&] { pdh::submit(jobs, count, stream, own_stream != 0, ticket); });
}

int32_t pdh_poll(pdh_ticket *ticket) {
  return pdh::guarded([&] { pdh::poll(ticket); });
}

int32_t pdh_wait(pdh_ticket *ticket, int64_t timeout_ns) {
  return pdh::guarded([&] { pdh::wait(ticket, timeout_ns); });
}

void pdh_release(pdh_ticket *ticket) {
  if (ticket->handle != 0) pdh::slots().abandon(reinterpret_cast<pdh::Slot *>(ticket->handle));
  ticket->handle = 0;
}

int32_t pdh_copy(const pdh_copy_block *blocks, int32_t count) {
  return pdh::guarded([&] { pdh::copy_all(blocks, count); });
}
}
