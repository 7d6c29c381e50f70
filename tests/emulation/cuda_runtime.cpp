// The functions of the CUDA runtime that launchers and the binding call, on a device that is this process: an Ampere
// processor, or where cuda_emulation_sm90 is set a Hopper one.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

extern "C" {
bool cuda_emulation_sm90 = false;
}

namespace cuda_emulation {

extern std::string message;

namespace {
// Few, so that the small problems of tests are split over blocks as large ones are on a GPU.
int multiprocessors = 5;
std::map<const void*, size_t> asked;  // by kernel
}  // namespace

size_t most_shared_bytes() {
  return (cuda_emulation_sm90 ? 227 : 163) * 1024;
}

size_t dynamic_shared_bytes(const void* kernel, size_t static_bytes) {
  return asked.count(kernel) ? asked[kernel] : 48 * 1024 - static_bytes;
}

int64_t resident_blocks(size_t threads, size_t shared_bytes) {
  const size_t by_memory = (most_shared_bytes() + 1024) / (shared_bytes + 1024);
  return int64_t(multiprocessors) * int64_t(std::min(by_memory, 2048 / threads));
}

}  // namespace cuda_emulation

using cuda_emulation::multiprocessors;

extern "C" {

void cuda_emulation_multiprocessors(int count) {
  multiprocessors = count;
}
const char* cuda_emulation_message() {
  return cuda_emulation::message.c_str();
}
void cuda_emulation_clear() {
  cuda_emulation::message.clear();
}

// launch() returns its error, so none is left behind.
cudaError_t cudaGetLastError() {
  return cudaSuccess;
}
cudaError_t cudaPeekAtLastError() {
  return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : cuda_emulation::message.c_str();
}
const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaSuccess ? "cudaSuccess" : "an error of the emulation";
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  const int shared = int(cuda_emulation::most_shared_bytes());
  const std::map<cudaDeviceAttr, int> values = {
      {cudaDevAttrMultiProcessorCount, multiprocessors},
      {cudaDevAttrMaxSharedMemoryPerBlockOptin, shared},
      {cudaDevAttrMaxSharedMemoryPerMultiprocessor, shared + 1024},
      {cudaDevAttrComputeCapabilityMajor, cuda_emulation_sm90 ? 9 : 8},
      {cudaDevAttrComputeCapabilityMinor, 0},
  };
  const auto found = values.find(attribute);
  if (found == values.end()) return cudaErrorInvalidValue;
  *value = found->second;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute, int bytes) {
  cuda_emulation::asked[kernel] = size_t(bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  std::memset(to, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  std::memmove(to, from, bytes);
  return cudaSuccess;
}
}
