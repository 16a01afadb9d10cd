// The emulated device's scheduler; see cuda_runtime.h.
#include "cuda_runtime.h"

#include <algorithm>
#include <map>

namespace emulation {
namespace {

constexpr size_t kStackBytes = 64 * 1024;
constexpr int kSharedAlwaysAllowed = 48 * 1024;
constexpr unsigned kGridMaxY = 65535;

std::map<const void*, int> shared_allowed;  // by kernel

int shared_limit(const void* kernel) {
  const auto found = shared_allowed.find(kernel);
  return found == shared_allowed.end() ? kSharedAlwaysAllowed : std::max(kSharedAlwaysAllowed, found->second);
}

struct Launch {
  ThreadBlock* block = nullptr;
  uint3 block_index, grid_size;
};
Launch active;

// Of thread i of whichever thread block runs: fresh ones for each block would cost more than the kernels.
unsigned char* stack_of(int thread) {
  static std::vector<std::unique_ptr<unsigned char[]>> stacks;
  while (stacks.size() <= static_cast<size_t>(thread)) stacks.emplace_back(new unsigned char[kStackBytes]);
  return stacks[static_cast<size_t>(thread)].get();
}

void prepare(Fiber& fiber, void (*enter)()) {
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = stack_of(fiber.index);
  fiber.context.uc_stack.ss_size = kStackBytes;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, enter, 0);
}

}  // namespace

Device& device() {
  static Device instance;
  return instance;
}

ThreadBlock& block() { return *active.block; }
uint3 thread_index() { return {static_cast<unsigned>(block().current().index), 0, 0}; }
uint3 block_index() { return active.block_index; }
uint3 grid_size() { return active.grid_size; }

ThreadBlock::ThreadBlock(int threads, size_t shared_bytes, const std::function<void()>& kernel,
                         std::mt19937& random)
    : shared_memory_(new unsigned char[shared_bytes + 16]),
      combine_(static_cast<size_t>((threads + kLanes - 1) / kLanes)),
      kernel_(kernel),
      random_(random) {
  const auto address = reinterpret_cast<uintptr_t>(shared_memory_.get());
  shared_.reset(shared_memory_.get() + (16 - address % 16) % 16);
  std::memset(shared_.get(), 0xff, shared_bytes);
  for (int i = 0; i < threads; ++i) {
    auto fiber = std::make_unique<Fiber>();
    fiber->index = i;
    fiber->groups.emplace_back();
    prepare(*fiber, &ThreadBlock::enter);
    fibers_.push_back(std::move(fiber));
  }
}

void ThreadBlock::enter() {
  block().kernel_();
  block().current().state = State::kDone;
  _longjmp(block().scheduler_, 1);
}

// A fiber begins by its context, and goes on by a jump: swapping contexts would ask the system for signal masks.
void ThreadBlock::wait(State state) {
  Fiber& fiber = current();
  fiber.state = state;
  if (_setjmp(fiber.jump) == 0) _longjmp(scheduler_, 1);
}

void ThreadBlock::resume(int index) {
  current_ = index;
  Fiber& fiber = *fibers_[static_cast<size_t>(index)];
  fiber.state = State::kReady;
  if (_setjmp(scheduler_) != 0) return;
  if (fiber.has_begun) _longjmp(fiber.jump, 1);
  fiber.has_begun = true;
  setcontext(&fiber.context);
}

bool ThreadBlock::release_warps() {
  bool released = false;
  for (size_t first = 0; first + kLanes <= fibers_.size(); first += kLanes) {
    Fiber* lanes[kLanes];
    for (size_t lane = 0; lane < kLanes; ++lane) lanes[lane] = fibers_[first + lane].get();
    const auto in_warp = [](const Fiber* lane) { return lane->state == State::kInWarp; };
    const auto waiting = std::count_if(lanes, lanes + kLanes, in_warp);
    if (waiting == 0) continue;
    if (waiting != kLanes) fail("a warp operation that not all lanes reach");
    combine_[first / kLanes](lanes);
    for (Fiber* lane : lanes) lane->state = State::kReady;
    released = true;
  }
  return released;
}

void ThreadBlock::run() {
  std::vector<size_t> warps((fibers_.size() + kLanes - 1) / kLanes);
  for (size_t i = 0; i < warps.size(); ++i) warps[i] = i;
  for (;;) {
    bool ran = false;
    std::shuffle(warps.begin(), warps.end(), random_);
    for (const size_t warp : warps) {
      // A warp that is ahead may go on before others have moved at all.
      if (random_() % 3 == 0 && warps.size() > 1) continue;
      for (size_t i = warp * kLanes; i < std::min(fibers_.size(), (warp + 1) * kLanes); ++i) {
        if (fibers_[i]->state != State::kReady) continue;
        resume(static_cast<int>(i));
        ran = true;
      }
      release_warps();
    }
    if (ran) continue;
    const auto count = [&](State state) {
      return std::count_if(fibers_.begin(), fibers_.end(), [&](const auto& f) { return f->state == state; });
    };
    if (count(State::kReady) > 0) continue;
    const auto size = static_cast<std::ptrdiff_t>(fibers_.size());
    if (count(State::kDone) == size) return;
    if (count(State::kAtBarrier) != size) fail("a barrier that not all threads reach");
    for (auto& fiber : fibers_) fiber->state = State::kReady;
  }
}

cudaError_t launch(const void* kernel, dim3 grid, int threads, size_t shared_bytes,
                   const std::function<void()>& body) {
  std::mt19937 random(device().seed++);
  if (static_cast<int>(shared_bytes) > shared_limit(kernel)) return cudaErrorInvalidValue;
  if (grid.x == 0 || grid.y == 0 || grid.z != 1 || grid.y > kGridMaxY) return cudaErrorInvalidConfiguration;
  if (static_cast<int>(shared_bytes) > device().shared_per_block) fail("more shared memory than the device has");
  for (unsigned y = 0; y < grid.y; ++y) {
    for (unsigned x = 0; x < grid.x; ++x) {
      ThreadBlock thread_block(threads, shared_bytes, body, random);
      active = {&thread_block, {x, y, 0}, {grid.x, grid.y, 1}};
      thread_block.run();
    }
  }
  active = {};
  return cudaSuccess;
}

}  // namespace emulation

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidValue; }

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  const emulation::Device& device = emulation::device();
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = device.processors; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = device.shared_per_block; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = device.shared_per_processor; break;
    case cudaDevAttrReservedSharedMemoryPerBlock: *value = device.shared_reserved; break;
  }
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  if (value > emulation::device().shared_per_block) return cudaErrorInvalidValue;
  emulation::shared_allowed[kernel] = value;
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel) {
  attributes->maxDynamicSharedSizeBytes = emulation::shared_limit(kernel);
  return cudaSuccess;
}

const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorInvalidValue ? "invalid argument" : "invalid configuration argument";
}

// Other devices' limits, and the order in which warps run.
extern "C" void emulation_configure(int processors, int shared_per_block, int shared_per_processor,
                                    unsigned seed) {
  emulation::Device& device = emulation::device();
  device.processors = processors;
  device.shared_per_block = shared_per_block;
  device.shared_per_processor = shared_per_processor;
  device.seed = seed;
}
