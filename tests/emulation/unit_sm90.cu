// Kernels on Hopper's instructions that are right, and the same kernels with one fault each: what
// test_emulation_sm90.py wants computed and reported. `fault` is a template parameter, so that the right kernel is
// free of the faulty one's code.
#include "device_sm90.cuh"

extern "C" bool cuda_emulation_sm90;

namespace torchgradx::cuda {
namespace {

// clang-format off
enum Fault {
    none, no_wait, one_waits, waits_elsewhere, wrong_parity, expects_less, expects_more, releases_early, no_empty,
    uninitialised, no_init_fence, no_barrier, initialised_twice, arrives_twice, touches_barrier, misaligned,
    reads_registers, writes_registers, no_fence, never_waited, divergent, disagrees, leaves_memory, leaves_variable,
    no_swizzle, reserved, misaligned_descriptor, overwrites, no_shared_fence, late_fence, misses, constant,
    too_greedy, not_less, not_whole, no_cluster_barrier, own_readers, one_releases, one_copies, ends_early,
    no_such_block
};
// clang-format on

// Product of a warpgroup: thread 0 of the first copies 16 positions after the other into a ring of two stages, which
// the second multiplies. A [positions, 64], B [positions, columns], D [64, columns].
constexpr int kStages = 2, kRounds = 4, kBoxBytes = 16 * 128;

template <class half_t, int columns, Fault fault>
__global__ void product_kernel(const GRID_CONSTANT TensorMap map_a, const GRID_CONSTANT TensorMap map_b, float* out) {
  constexpr int kBoxes = 1 + columns / 64, kStageBytes = kBoxes * kBoxBytes;
  DYNAMIC_SHARED(unsigned char, shared);
  STATIC_SHARED(uint64_t, barriers, [2][kStages]);
  uint64_t *const full = barriers[0], *const empty = barriers[1];
  const uint32_t address = shared_address(shared), aligned = (address + 1023) & ~1023u;
  unsigned char* const stages = shared + (aligned - address);
  const int thread = int(threadIdx.x);
  if (thread == 0) {
    for (int s = 0; s < kStages && fault != uninitialised; ++s) barrier_init(full + s, 1), barrier_init(empty + s, 4);
    if (fault == initialised_twice) barrier_init(full, 1);
    if (fault != no_init_fence) barrier_init_fence();
    if (fault == touches_barrier) full[1] = 0;
  }
  if (fault != no_barrier) __syncthreads();
  if (thread == 0) {
    for (int round = 0; round < kRounds; ++round) {
      const int s = round % kStages;
      if (fault != no_empty) barrier_wait(empty + s, (round / kStages & 1) ^ 1);
      const int bytes = fault == expects_less ? kStageBytes - kBoxBytes : kStageBytes;
      barrier_expect(full + s, bytes + (fault == expects_more ? 16 : 0));
      if (fault == arrives_twice) barrier_arrive(full + s);
      unsigned char* const stage = stages + s * kStageBytes + (fault == misaligned ? 512 : 0);
      copy_box(stage, map_a, full + s, 0, round * 16, 0, 0);
      for (int j = 0; j < columns / 64; ++j)
        copy_box(stage + (j + 1) * kBoxBytes, map_b, full + s, j * 64, round * 16, 0, 0);
    }
  }
  if (thread < 128) return;
  const Descriptor of_a(aligned, kBoxBytes, 1024), of_b(aligned + kBoxBytes, kBoxBytes, 1024);
  float d[columns / 2];
  for (float& x : d) x = 0;
  int before = -1;
  for (int round = 0; round < kRounds; ++round) {
    const int s = round % kStages;
    if (fault == one_waits ? thread == 128 : fault != no_wait)
      barrier_wait(full + (fault == waits_elsewhere ? 1 : s), (round / kStages & 1) ^ (fault == wrong_parity ? 1 : 0));
    keep(d);
    if (fault != no_fence) wgmma_fence();
    uint64_t a = of_a.at(s * kStageBytes), b = of_b.at(s * kStageBytes);
    if (fault == disagrees && thread == 200) a += 8;
    if (fault == leaves_variable) b += 2 << 10;
    if (fault == leaves_memory) b |= 0x3f80;
    if (fault == no_swizzle) b &= ~(uint64_t(3) << 62);
    if (fault == reserved) b |= uint64_t(1) << 30;
    if (fault == misaligned_descriptor) b += 2;
    if (fault == reads_registers && round == 1) out[thread] = d[3];
    if (fault != divergent || thread < 224) wgmma<columns, half_t>(d, a, b, round > 0);
    if (fault == writes_registers) d[columns / 2 - 1] = 1;
    wgmma_commit();
    keep(d);
    if (fault == releases_early && thread % 32 == 0) barrier_arrive(empty + s);
    if (fault == never_waited) continue;
    if (before >= 0) {
      wgmma_wait<1>();
      if (fault != releases_early && thread % 32 == 0) barrier_arrive(empty + before);
    }
    before = s;
  }
  if (fault == never_waited) return;
  wgmma_wait<0>();
  keep(d);
  for (int i = 0; i < columns / 2; ++i) {
    const int row = thread % 128 / 32 * 16 + thread % 32 / 4 + i % 4 / 2 * 8;
    out[row * columns + i / 4 * 8 + thread % 4 * 2 + i % 2] = d[i];
  }
}

// The same product of one step, from shared memory that threads have written: `in` is its image of `bytes` bytes.
// numbers: bytes, start of A, between, group, start of B, between, group.
template <Fault fault>
__global__ void image_kernel(const uint32_t* in, const int* numbers, float* out) {
  DYNAMIC_SHARED(unsigned char, shared);
  const uint32_t address = shared_address(shared), aligned = (address + 1023) & ~1023u;
  uint32_t* const image = reinterpret_cast<uint32_t*>(shared + (aligned - address));
  const int thread = int(threadIdx.x), words = numbers[0] / 4;
  for (int i = thread; i < words; i += 128) image[i] = in[i];
  if (fault == none || fault == overwrites) fence_async_shared();
  if (fault != no_barrier) __syncthreads();
  if (fault == late_fence) fence_async_shared();
  float d[96];
  for (float& x : d) x = 0;
  const Descriptor a(aligned + uint32_t(numbers[1]), uint32_t(numbers[2]), uint32_t(numbers[3]));
  const Descriptor b(aligned + uint32_t(numbers[4]), uint32_t(numbers[5]), uint32_t(numbers[6]));
  wgmma_fence();
  wgmma<192, __half>(d, a.at(0), b.at(0), false);
  wgmma_commit();
  if (fault == overwrites) image[thread] = 0;
  wgmma_wait<0>();
  for (int i = 0; i < 96; ++i) {
    const int row = thread / 32 * 16 + thread % 32 / 4 + i % 4 / 2 * 8;
    out[row * 192 + i / 4 * 8 + thread % 4 * 2 + i % 2] = d[i];
  }
}

// A box as it lies in shared memory, twice: the second over the first. numbers: bytes, coordinates.
template <Fault fault>
__global__ void box_kernel(const GRID_CONSTANT TensorMap map, const int* numbers, uint32_t* out) {
  DYNAMIC_SHARED(unsigned char, shared);
  STATIC_SHARED(uint64_t, barriers, [2]);
  uint64_t *const full = barriers, *const empty = barriers + 1;
  const uint32_t address = shared_address(shared);
  uint32_t* const box = reinterpret_cast<uint32_t*>(shared + ((address + 1023) & ~1023u) - address);
  const int thread = int(threadIdx.x), words = numbers[0] / 4;
  if (thread == 0) {
    barrier_init(full, 1), barrier_init(empty, 4);
    barrier_init_fence();
  }
  if (fault == no_shared_fence) box[thread] = 0;
  __syncthreads();
  for (int round = 0; round < 2; ++round) {
    if (thread == 0) {
      if (fault != no_empty) barrier_wait(empty, round ^ 1);
      barrier_expect(full, numbers[0] - (fault == expects_less ? 16 : 0));
      copy_box(box, map, full, numbers[1], numbers[2], numbers[3], numbers[4]);
    }
    if (fault != one_waits || thread == 0) barrier_wait(full, round);
    if (fault == one_waits) __syncwarp();
    const uint32_t of_all = box[thread / 32 * 32];  // read by a whole warp
    for (int i = thread; i < words; i += 128) out[i] = of_all == 0xfefefefe ? of_all : box[i];
    if (fault != no_barrier) __syncwarp();
    if (thread % 32 == 0) barrier_arrive(empty);
  }
}

// Every block writes a number; all read all.
template <Fault fault>
__global__ void grid_kernel(const float* in, float* out) {
  const int block = int(blockIdx.x), thread = int(threadIdx.x);
  if (thread == 0) out[block] = in[block];
  if (fault == misses && block == 1) return;
  if (fault != no_barrier) grid_barrier();
  float sum = 0;
  for (int b = 0; b < int(gridDim.x); ++b) sum += fault == constant ? __ldg(out + b) : __ldcg(out + b);
  if (thread == 0) out[gridDim.x + block] = sum;
}

// Clusters of two blocks: of two boxes a round each block copies one, for both. All add up what they got.
template <Fault fault>
__global__ void cluster_kernel(const GRID_CONSTANT TensorMap map, uint32_t* out) {
  constexpr int kWords = 2 * kBoxBytes / 4;
  DYNAMIC_SHARED(unsigned char, shared);
  STATIC_SHARED(uint64_t, barriers, [2]);
  uint64_t *const full = barriers, *const empty = barriers + 1;
  const uint32_t address = shared_address(shared);
  unsigned char* const boxes = shared + (((address + 1023) & ~1023u) - address);
  const int thread = int(threadIdx.x), rank = int(blockIdx.x) % 2;
  if (thread == 0) {
    barrier_init(full, 1), barrier_init(empty, fault == own_readers ? 2 : 4);
    barrier_init_fence();
  }
  __syncthreads();
  if (fault != no_cluster_barrier) cluster_barrier();
  uint32_t sum = 0;
  for (int round = 0; round < kRounds; ++round) {
    if (thread == 0) {
      barrier_wait(empty, round & 1 ^ 1);
      barrier_expect(full, 2 * kBoxBytes);
      if (fault != one_copies || rank == 0)
        copy_box_to_both(boxes + rank * kBoxBytes, map, full, 0, (2 * round + rank) * 16, 0, 0);
    }
    __syncwarp();
    barrier_wait(full, round & 1);
    for (int i = thread; i < kWords; i += 64) sum += reinterpret_cast<const uint32_t*>(boxes)[i];
    __syncwarp();
    if (fault == ends_early && round == kRounds - 2 && rank == 1) break;
    if (fault == own_readers ? thread % 32 == 0 : thread % 32 < (fault == one_releases ? 1 : 2))
      barrier_arrive_at(empty, fault == own_readers ? rank : fault == no_such_block ? 2 : thread % 32);
  }
  out[blockIdx.x * 64 + thread] = sum;
  if (fault != ends_early) cluster_barrier();
}

template <Fault fault>
__global__ void registers_kernel(const float* in, float* out) {
  if (threadIdx.x < 128) {
    if (fault == not_less)
      give_registers<240>();
    else if (fault == divergent && threadIdx.x < 32)
      give_registers<32>();
    else if (fault != too_greedy)
      give_registers<40>();
  } else {
    take_registers<fault == too_greedy ? 248 : 232>();
  }
  out[threadIdx.x] = in[threadIdx.x];
}

// Launches

struct Given {
  const void *a, *b;
  const int* numbers;
  void* out;
};

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                            const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

Encode encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result;
  cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
  return reinterpret_cast<Encode>(function);
}

// numbers: sizes, strides in bytes, box, steps
CUresult encode(TensorMap& map, const void* data, const int* numbers, CUtensorMapDataType type) {
  cuuint64_t sizes[4], strides[3];
  cuuint32_t box[4], steps[4];
  for (int d = 0; d < 4; ++d)
    sizes[d] = cuuint64_t(numbers[d]), box[d] = cuuint32_t(numbers[7 + d]), steps[d] = cuuint32_t(numbers[11 + d]);
  for (int d = 0; d < 3; ++d) strides[d] = cuuint64_t(numbers[4 + d]);
  return encoder()(&map, type, 4, const_cast<void*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                   CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

TensorMap rows(const void* data, int positions, int columns, CUtensorMapDataType type) {
  const int row = 2 * columns,
            numbers[15] = {columns, positions, 1, 1, row, row * positions, row * positions, 64, 16, 1, 1, 1, 1, 1, 1};
  TensorMap map;
  encode(map, data, numbers, type);
  return map;
}

template <class half_t, int columns, Fault fault>
cudaError_t product(const Given& g) {
  const auto type = std::is_same_v<half_t, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const TensorMap a = rows(g.a, g.numbers[0], 64, type), b = rows(g.b, g.numbers[0], columns, type);
  const int bytes = 1024 + kStages * (1 + columns / 64) * kBoxBytes;
  return launch_together(product_kernel<half_t, columns, fault>, 1, 1, fault == not_whole ? 192 : 256, size_t(bytes),
                         nullptr, a, b, static_cast<float*>(g.out));
}

template <Fault fault>
cudaError_t image(const Given& g) {
  return launch(image_kernel<fault>, 1, 128, size_t(g.numbers[0]) + 1024, nullptr, static_cast<const uint32_t*>(g.a),
                static_cast<const int*>(g.b), static_cast<float*>(g.out));
}

template <Fault fault>
cudaError_t box(const Given& g) {
  TensorMap map;
  if (encode(map, g.a, g.numbers + 5, CU_TENSOR_MAP_DATA_TYPE_FLOAT16) != CUDA_SUCCESS) return cudaErrorInvalidValue;
  return launch(box_kernel<fault>, 1, 128, size_t(g.numbers[0]) + 1024, nullptr, map, static_cast<const int*>(g.b),
                static_cast<uint32_t*>(g.out));
}

template <Fault fault>
cudaError_t grid(const Given& g) {
  return launch_together(grid_kernel<fault>, 1, unsigned(g.numbers[0]), 64, 0, nullptr, static_cast<const float*>(g.a),
                         static_cast<float*>(g.out));
}

template <Fault fault>
cudaError_t cluster(const Given& g) {
  const TensorMap map = rows(g.a, 2 * kRounds * 16, 64, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16);
  return launch_together(cluster_kernel<fault>, 2, unsigned(g.numbers[0]), 64, 1024 + 2 * kBoxBytes, nullptr, map,
                         static_cast<uint32_t*>(g.out));
}

template <Fault fault>
cudaError_t registers(const Given& g) {
  return launch(registers_kernel<fault>, 1, 384, 0, nullptr, static_cast<const float*>(g.a),
                static_cast<float*>(g.out));
}

struct Case {
  const char* name;
  cudaError_t (*run)(const Given&);
};

#define CASE(kernel, fault) {#kernel "/" #fault, kernel<fault>}
#define PRODUCT(fault) {"product/" #fault, product<__nv_bfloat16, 192, fault>}
constexpr Case kCases[] = {
    {"product_bfloat16_128", product<__nv_bfloat16, 128, none>},
    {"product_bfloat16_192", product<__nv_bfloat16, 192, none>},
    {"product_float16_192", product<__half, 192, none>},
    {"product_float16_256", product<__half, 256, none>},
    // clang-format off
    PRODUCT(no_wait), PRODUCT(one_waits), PRODUCT(waits_elsewhere), PRODUCT(wrong_parity),
    PRODUCT(expects_less), PRODUCT(expects_more), PRODUCT(releases_early), PRODUCT(no_empty),
    PRODUCT(uninitialised), PRODUCT(no_init_fence), PRODUCT(no_barrier), PRODUCT(initialised_twice),
    PRODUCT(arrives_twice), PRODUCT(touches_barrier), PRODUCT(misaligned), PRODUCT(reads_registers),
    PRODUCT(writes_registers), PRODUCT(no_fence), PRODUCT(never_waited), PRODUCT(divergent),
    PRODUCT(disagrees), PRODUCT(leaves_memory), PRODUCT(leaves_variable), PRODUCT(no_swizzle),
    PRODUCT(reserved), PRODUCT(misaligned_descriptor), PRODUCT(not_whole), CASE(image, none),
    CASE(image, no_shared_fence), CASE(image, late_fence), CASE(image, overwrites), CASE(image, no_barrier),
    CASE(box, none), CASE(box, no_shared_fence), CASE(box, no_empty), CASE(box, one_waits),
    CASE(box, no_barrier), CASE(box, expects_less), CASE(grid, none), CASE(grid, misses),
    CASE(grid, no_barrier), CASE(grid, constant), CASE(cluster, none), CASE(cluster, no_cluster_barrier),
    CASE(cluster, own_readers), CASE(cluster, one_releases), CASE(cluster, one_copies),
    CASE(cluster, ends_early), CASE(cluster, no_such_block), CASE(registers, none),
    CASE(registers, too_greedy), CASE(registers, not_less), CASE(registers, divergent),
    // clang-format on
};

}  // namespace
}  // namespace torchgradx::cuda

extern "C" {

const char* unit_name(int which) {
  using torchgradx::cuda::kCases;
  return which < int(sizeof(kCases) / sizeof(kCases[0])) ? kCases[which].name : nullptr;
}

cudaError_t unit_launch(int which, const void* a, const void* b, const int* numbers, void* out) {
  cuda_emulation_sm90 = true;
  return torchgradx::cuda::kCases[which].run({a, b, numbers, out});
}
}
