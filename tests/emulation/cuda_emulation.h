// What csrc/cuda/*.cu see in place of CUDA when g++ compiles them for tests (-DCUDA_EMULATION). Types, vector types and
// half conversions are NVIDIA's own host versions. Each thread of a block is a fiber that runs until its next
// synchronisation; blocks run one after another, or together where they wait for each other. What is checked on the
// way: checker.h. Nothing here models time.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <tuple>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>
#include <vector_functions.h>

namespace cuda_emulation {

// Constant as far as one fiber can tell, which spares the kernels most of these calls.
__attribute__((const)) uint3 thread_index();
__attribute__((const)) uint3 block_index();
__attribute__((const)) dim3 block_size();
__attribute__((const)) dim3 grid_size();
__attribute__((const)) unsigned lane();

// Ends the launch; in a launcher, outside of kernels, only leaves the message.
void report(const char* format, ...) __attribute__((format(printf, 1, 2)));

struct Site {  // of a synchronisation in the kernel's source
  const char* file;
  int line;
  static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
  bool operator==(const Site& other) const {  // one header's name may have an address in each file
    return line == other.line && (file == other.file || !std::strcmp(file, other.file));
  }
};

void barrier(Site site);
void grid_barrier(Site site = Site::here());
void warp_barrier(unsigned mask, Site site);

// A rendezvous of the whole warp: every lane hands in `bytes` bytes, the last to arrive runs `combine`, if any, over
// the 32 slots, and every lane gets the slots back, `slot` bytes apart.
constexpr size_t slot = 64;
using Combine = void (*)(const unsigned char* in, unsigned char* out);
const unsigned char* warp_exchange(const void* value, size_t bytes, Site site, Combine combine = nullptr,
                                   unsigned mask = 0xffffffffu);

void* dynamic_shared();
void* static_shared(const void* site, size_t bytes);  // one for each site and block

// cluster: of so many blocks, all of which run together; 0: one block after another.
cudaError_t run(const void* kernel, dim3 grid, dim3 block, size_t shared_bytes, void (*thread)(const void*),
                const void* arguments, size_t argument_bytes, unsigned cluster);

// Of the device that cuda_runtime.cpp describes.
size_t most_shared_bytes();
size_t dynamic_shared_bytes(const void* kernel, size_t static_bytes);  // at most, as it was asked for
int64_t resident_blocks(size_t threads, size_t shared_bytes);

void check_constant(const void* address, size_t bytes);  // by __ldg, which may miss what this launch has written

void shuffle_bytes(void* value, size_t bytes, unsigned source, unsigned mask, Site site);

template <class T>
T shuffle(unsigned mask, T value, unsigned source, Site site) {
  static_assert(sizeof(T) <= slot);
  shuffle_bytes(&value, sizeof(T), source, mask, site);
  return value;
}

unsigned ballot(unsigned mask, bool predicate, Site site);

}  // namespace cuda_emulation

#define DYNAMIC_SHARED(type, name) type* const name = static_cast<type*>(cuda_emulation::dynamic_shared())
#define STATIC_SHARED(type, name, dims) \
  static const char name##_site = 0;    \
  using name##_type = type dims;        \
  name##_type& name = *static_cast<name##_type*>(cuda_emulation::static_shared(&name##_site, sizeof(name##_type)))

#undef __shared__
#define __shared__ static_assert(false, "shared memory is declared by DYNAMIC_SHARED or STATIC_SHARED");
#undef __launch_bounds__
#define __launch_bounds__(...)
#define threadIdx (cuda_emulation::thread_index())
#define blockIdx (cuda_emulation::block_index())
#define blockDim (cuda_emulation::block_size())
#define gridDim (cuda_emulation::grid_size())

#define __syncthreads() cuda_emulation::barrier(cuda_emulation::Site::here())
#define __shfl_sync(mask, value, source) \
  cuda_emulation::shuffle(mask, value, unsigned(source) % 32, cuda_emulation::Site::here())
#define __shfl_xor_sync(mask, value, lanes) \
  cuda_emulation::shuffle(mask, value, cuda_emulation::lane() ^ unsigned(lanes), cuda_emulation::Site::here())
#define __shfl_down_sync(mask, value, lanes) \
  cuda_emulation::shuffle(mask, value, cuda_emulation::lane() + unsigned(lanes), cuda_emulation::Site::here())
#define __shfl_up_sync(mask, value, lanes) \
  cuda_emulation::shuffle(mask, value, cuda_emulation::lane() - unsigned(lanes), cuda_emulation::Site::here())
#define __ballot_sync(mask, predicate) cuda_emulation::ballot(mask, predicate, cuda_emulation::Site::here())
#define __any_sync(mask, predicate) (__ballot_sync(mask, predicate) != 0)
#define __all_sync(mask, predicate) (__ballot_sync(mask, predicate) == 0xffffffffu)

inline void __syncwarp(unsigned mask = 0xffffffffu, cuda_emulation::Site site = cuda_emulation::Site::here()) {
  cuda_emulation::warp_barrier(mask, site);
}

// CUDA's own names for what C++ spells std::.
template <class T>
constexpr T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
constexpr T max(T a, T b) {
  return a < b ? b : a;
}
template <class T>
T __ldg(const T* address) {
  cuda_emulation::check_constant(address, sizeof(T));
  return *address;
}
template <class T>
T __ldcg(const T* address) {
  return *address;
}
inline uint32_t __float_as_uint(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}
inline float __uint_as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

#include "ptx.h"

namespace torchgradx::cuda {

inline cudaError_t allow_shared(const void* kernel, size_t bytes);  // device.cuh

template <class... Parameters, class... Arguments>
cudaError_t launch_emulated(unsigned cluster, void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
                            const Arguments&... arguments) {
  struct Call {
    void (*kernel)(Parameters...);
    std::tuple<Parameters...> parameters;
  } const call{kernel, std::tuple<Parameters...>(arguments...)};
  if (const cudaError_t error = allow_shared(reinterpret_cast<const void*>(kernel), shared_bytes)) return error;
  const auto thread = [](const void* pointer) {
    const auto& call = *static_cast<const Call*>(pointer);
    std::apply(call.kernel, call.parameters);
  };
  return cuda_emulation::run(reinterpret_cast<const void*>(kernel), grid, block, shared_bytes, thread, &call,
                             sizeof(call), cluster);
}

template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t,
                   const Arguments&... arguments) {
  return launch_emulated(0, kernel, grid, block, shared_bytes, arguments...);
}

}  // namespace torchgradx::cuda
