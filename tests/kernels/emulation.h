// TEST ONLY. Runs __global__ functions on the CPU: a fibre for each CUDA thread, one block after the other.
//
// Barriers and warp shuffles are meeting points of fibres. A barrier that not all threads of the block reach, and a
// shuffle whose mask names a lane that does not come, are reported. Shared memory is full of NaN when a block starts. The
// order of threads is random, and warps stall at random for long: a missing barrier shows as a wrong value.
//
// What this cannot show: races inside one step, missing fences, alignment, out-of-bounds accesses, the hardware's own
// rounding and its limits of registers, shared memory and grids, and speed.
#pragma once
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <vector>

using __half = c10::Half;
using __nv_bfloat16 = c10::BFloat16;
using cudaError_t = int;
inline int cudaGetLastError() { return 0; }
inline const char* cudaGetErrorString(int) { return "emulated"; }

#define __global__
#define __device__
#define __host__

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

namespace emulation {

enum class State { ready, at_barrier, at_shuffle, served, done };

struct Thread {
  ucontext_t context;
  std::vector<char> stack;
  dim3 index;
  State state;
  unsigned mask;  // of the shuffle that it waits at
  int source;     // lane that it reads
  float given, taken;
};

struct Shared {
  void* memory;
  uint64_t block;
};

struct Machine {
  std::vector<Thread> threads;
  std::vector<Shared> shared;
  const std::function<void()>* body = nullptr;
  ucontext_t scheduler;
  int current = 0, size = 0;
  dim3 block_size, grid_size, block_index;
  uint64_t random = 1, block = 0;
};
inline Machine machine;
inline Thread& self() { return machine.threads[machine.current]; }

inline uint64_t random_bits() {
  machine.random = machine.random * 6364136223846793005ull + 1442695040888963407ull;
  return machine.random >> 33;
}

// Storage of a __shared__ array; the first thread of a block that touches it fills it with NaN.
inline void* shared(void* memory, size_t bytes) {
  for (Shared& known : machine.shared) {
    if (known.memory != memory) continue;
    if (known.block != machine.block) std::memset(memory, 0xff, bytes);
    known.block = machine.block;
    return memory;
  }
  machine.shared.push_back({memory, machine.block});
  return std::memset(memory, 0xff, bytes);
}

inline void wait(State state) {
  self().state = state;
  swapcontext(&self().context, &machine.scheduler);
}

inline void enter() {
  (*machine.body)();
  wait(State::done);
}

inline void start_threads() {
  const dim3 size = machine.block_size;
  for (int i = 0; i < machine.size; ++i) {
    Thread& thread = machine.threads[i];
    thread.stack.resize(65536);
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.data();
    thread.context.uc_stack.ss_size = thread.stack.size();
    thread.context.uc_link = nullptr;
    makecontext(&thread.context, enter, 0);
    thread.index = dim3(i % size.x, i / size.x % size.y, i / (size.x * size.y));
    thread.state = State::ready;
  }
}

// Runs every ready thread whose warp isn't stalled, in random order; returns whether any ran, and whether any was held.
inline std::pair<bool, bool> run_ready(uint64_t stalled) {
  std::vector<int> order(machine.size);
  for (int i = 0; i < machine.size; ++i) order[i] = i;
  for (int i = machine.size - 1; i > 0; --i) std::swap(order[i], order[random_bits() % (i + 1)]);
  bool ran = false, held = false;
  for (int i : order) {
    if (machine.threads[i].state != State::ready) continue;
    if (stalled >> (i / 32) & 1) {
      held = true;
      continue;
    }
    machine.current = i;
    ran = true;
    swapcontext(&machine.scheduler, &machine.threads[i].context);
  }
  return {ran, held};
}

// Serves the shuffles of a warp whose named lanes have all come.
inline bool serve_shuffles(int first) {
  const int last = std::min(machine.size, first + 32);
  unsigned waiting = 0;
  for (int i = first; i < last; ++i) {
    if (machine.threads[i].state == State::at_shuffle) waiting |= 1u << (i - first);
  }
  bool served = false;
  for (int i = first; i < last; ++i) {
    Thread& thread = machine.threads[i];
    if (thread.state != State::at_shuffle || (thread.mask & waiting) != thread.mask) continue;
    const int source = first + thread.source;
    const bool is_there = source < last && (thread.mask >> thread.source & 1);
    thread.taken = is_there ? machine.threads[source].given : std::nanf("");
    thread.state = State::served;
    served = true;
  }
  for (int i = first; i < last; ++i) {
    if (machine.threads[i].state == State::served) machine.threads[i].state = State::ready;
  }
  return served;
}

inline int count(State state) {
  int number = 0;
  for (int i = 0; i < machine.size; ++i) number += machine.threads[i].state == state;
  return number;
}

inline void run_block() {
  ++machine.block;
  start_threads();
  uint64_t stalled = 0;
  bool is_stuck = true;
  while (count(State::done) < machine.size) {
    if (is_stuck || random_bits() % 32 == 0) stalled = random_bits() & random_bits();
    const auto [ran, held] = run_ready(stalled);
    is_stuck = !ran;
    bool moved = false;
    for (int first = 0; first < machine.size; first += 32) moved |= serve_shuffles(first);
    if (moved || held) continue;
    const int done = count(State::done), waiting = count(State::at_barrier);
    if (waiting > 0 && waiting + done == machine.size) {
      if (done > 0) throw std::runtime_error("emulation: some threads returned and others wait at a barrier");
      for (int i = 0; i < machine.size; ++i) machine.threads[i].state = State::ready;
    } else if (!ran) {
      throw std::runtime_error("emulation: threads wait at different places, or for a lane that does not come");
    }
  }
}

inline void launch(dim3 grid, dim3 block, std::function<void()> body) {
  machine.size = static_cast<int>(block.x * block.y * block.z);
  if (static_cast<int>(machine.threads.size()) < machine.size) machine.threads.resize(machine.size);
  machine.body = &body;
  machine.block_size = block;
  machine.grid_size = grid;
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; ++x) {
        machine.block_index = dim3(x, y, z);
        run_block();
      }
    }
  }
}

inline float shuffle(unsigned mask, float value, int source) {
  const int lane = machine.current % 32;
  if (!(mask >> lane & 1)) throw std::runtime_error("emulation: a shuffle's mask leaves out its own lane");
  Thread& thread = self();
  thread.mask = mask;
  thread.given = value;
  thread.source = source;
  wait(State::at_shuffle);
  return thread.taken;
}

}  // namespace emulation

#define threadIdx (emulation::self().index)
#define blockIdx (emulation::machine.block_index)
#define blockDim (emulation::machine.block_size)
#define gridDim (emulation::machine.grid_size)
inline void __syncthreads() { emulation::wait(emulation::State::at_barrier); }
inline float __shfl_xor_sync(unsigned mask, float value, int lanes) {
  return emulation::shuffle(mask, value, (emulation::machine.current % 32) ^ lanes);
}

#define PTDP_SHARED(T, name, n) \
  static T name##_storage[n];   \
  T* name = static_cast<T*>(emulation::shared(name##_storage, sizeof(name##_storage)))
#define PTDP_LAUNCH(kernel, grid, threads, stream, ...) \
  (static_cast<void>(stream), emulation::launch(dim3(grid), dim3(threads), [&] { kernel(__VA_ARGS__); }))
#define PTDP_MAX_THREADS 64  // two warps, so that rows of 65 take several turns
