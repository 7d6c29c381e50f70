// Tensor maps and the copies of their boxes (TMA): the driver's encoder with what it refuses, and boxes that land in
// shared memory as late as they may, when no thread can go on without one. Rank 4 at the copy, halves, the
// 128-byte swizzle, zeros outside of the tensor.
#include <cuda.h>

#include <algorithm>
#include <array>
#include <deque>

#include "blocks.h"
#include "hopper.h"
#include "ptx_sm90.h"

namespace cuda_emulation {
namespace {

struct Map {  // in the 128 bytes
  uint64_t magic;
  const unsigned char* data;
  uint32_t last[4];     // index
  uint64_t strides[4];  // bytes
  uint16_t box[4];
  uint8_t steps[4], element;
};
static_assert(sizeof(Map) <= sizeof(CUtensorMap));
constexpr uint64_t magic = 0x7467785f74656e73;

Map read(const CUtensorMap& map) {
  Map m;
  std::memcpy(&m, &map, sizeof(m));
  if (m.magic != magic) report("copy_box: no map of rank 4");
  return m;
}

struct Extent {  // of a box as it lands
  int size[4];
  size_t row_bytes, bytes;
};

Extent extent_of(const Map& m) {
  Extent e{};
  e.size[0] = m.box[0];
  for (int i = 1; i < 4; ++i) e.size[i] = (m.box[i] + m.steps[i] - 1) / m.steps[i];
  e.row_bytes = size_t(e.size[0]) * m.element;
  e.bytes = e.row_bytes * size_t(e.size[1]) * size_t(e.size[2]) * size_t(e.size[3]);
  return e;
}

struct Copy {
  unsigned char* to;
  Map map;
  std::array<int, 4> at;
  Counted counted;
};
std::vector<std::deque<Copy>> under_way;  // by block

// f(row of the box, its inner bytes in memory or null if outside, first and last valid byte)
template <class F>
void each_row(const Copy& c, const F& f) {
  const Map& m = c.map;
  const Extent e = extent_of(m);
  const int64_t first = std::max<int64_t>(0, -int64_t(c.at[0]));
  const int64_t end = std::min<int64_t>(e.size[0], int64_t(m.last[0]) + 1 - c.at[0]);
  size_t row = 0;
  for (int k = 0; k < e.size[3]; ++k)
    for (int j = 0; j < e.size[2]; ++j)
      for (int i = 0; i < e.size[1]; ++i, ++row) {
        const int64_t x[4] = {c.at[0], c.at[1] + int64_t(i) * m.steps[1], c.at[2] + int64_t(j) * m.steps[2],
                              c.at[3] + int64_t(k) * m.steps[3]};
        bool inside = first < end;
        for (int d = 1; d < 4; ++d) inside &= x[d] >= 0 && x[d] <= int64_t(m.last[d]);
        if (!inside) {
          f(row, nullptr, 0, 0);
          continue;
        }
        const int64_t offset = x[1] * int64_t(m.strides[1]) + x[2] * int64_t(m.strides[2]) +
                               x[3] * int64_t(m.strides[3]) + x[0] * m.element;
        f(row, m.data + offset, size_t(first) * m.element, size_t(end) * m.element);
      }
}

CUresult refuse(const char* why) {
  report("cuTensorMapEncodeTiled: %s", why);
  return CUDA_ERROR_INVALID_VALUE;
}

CUresult encode(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address, const cuuint64_t* sizes,
                const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t* steps,
                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                CUtensorMapFloatOOBfill fill) {
  Map m{};
  m.element = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT16 || type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 ? 2 : 0;
  if (rank != 4 || !m.element || interleave != CU_TENSOR_MAP_INTERLEAVE_NONE || swizzle != CU_TENSOR_MAP_SWIZZLE_128B ||
      fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)
    return refuse("only rank 4, halves, the 128-byte swizzle and zeros outside are emulated");
  if (uintptr_t(map) % 64) return refuse("the map is not aligned to 64 bytes");
  if (!address || uintptr_t(address) % 16) return refuse("the address is not aligned to 16 bytes");
  for (cuuint32_t d = 0; d < rank; ++d) {
    if (!sizes[d] || sizes[d] > cuuint64_t(1) << 32) return refuse("a size of zero or above 2^32");
    if (!box[d] || box[d] > 256) return refuse("a box of zero or above 256");
    if (!steps[d] || steps[d] > 8) return refuse("an element stride of zero or above 8");
    if (d && (strides[d - 1] % 16 || strides[d - 1] >= cuuint64_t(1) << 40))
      return refuse("a stride that is no multiple of 16 bytes, or 2^40 and more");
    m.last[d] = uint32_t(sizes[d] - 1), m.box[d] = uint16_t(box[d]), m.steps[d] = uint8_t(steps[d]);
    m.strides[d] = d ? strides[d - 1] : m.element;
  }
  if (box[0] * m.element % 16) return refuse("the box's rows are no multiple of 16 bytes");
  if (box[0] * m.element > 128) return refuse("the box's rows are longer than the swizzle's 128 bytes");
  m.magic = magic, m.data = static_cast<const unsigned char*>(address);
  std::memset(map, 0, sizeof(*map));
  std::memcpy(map, &m, sizeof(m));
  return CUDA_SUCCESS;
}

}  // namespace

void copy_box(void* shared, const CUtensorMap& map, uint64_t* barrier, const int (&at)[4], bool to_all, Site site) {
  const Doing doing(site);
  if (!checker::is_shared(shared)) report("copy_box: the destination %p is not shared memory", shared);
  if (checker::offset_of_shared(shared) % 1024)
    report("copy_box: the destination %u is not aligned to 1024 bytes, as its swizzle wants",
           checker::offset_of_shared(shared));
  Copy copy{nullptr, read(map), {at[0], at[1], at[2], at[3]}, {}};
  each_row(copy, [&](size_t, const unsigned char* row, size_t first, size_t end) {
    if (row) checker::check(row + first, end - first, false);
  });
  const uint32_t place = checker::offset_of_shared(shared), of_barrier = checker::offset_of_shared(barrier);
  const auto begin = [&] {
    copy.to = checker::shared_at(place);
    copy.counted = begin_counted_copy(reinterpret_cast<uint64_t*>(checker::shared_at(of_barrier)));
    checker::begin_copy(copy.to, extent_of(copy.map).bytes, copy.counted.unit, copy.counted.phase);
    under_way[size_t(running.at)].push_back(copy);
  };
  if (!to_all) return begin();
  for (int rank = 0; rank < int(cluster_size()); ++rank) {
    const Elsewhere there(rank);
    begin();
  }
}

bool land_a_copy(size_t slot) {
  auto& copies = under_way[slot];
  if (copies.empty()) return false;
  const auto it = copies.begin() + std::ptrdiff_t(choose(copies.size()));
  const Copy copy = *it;
  copies.erase(it);
  const Extent e = extent_of(copy.map);
  each_row(copy, [&](size_t row, const unsigned char* from, size_t first, size_t end) {
    unsigned char bytes[128] = {};
    if (from) std::memcpy(bytes + first, from + first, end - first);
    for (size_t piece = 0; piece < e.row_bytes; piece += 16) {
      const size_t at = row * e.row_bytes + piece;  // by address: the box begins at a multiple of 1024
      std::memcpy(copy.to + (at ^ (at >> 7 & 7) << 4), bytes + piece, 16);
    }
  });
  checker::end_copy(copy.to, e.bytes);
  if (const std::string wrong = end_counted_copy(copy.counted, e.bytes); !wrong.empty())
    fail(wrong + " [block " + place_of(current().at) + "]");
  return true;
}

void begin_copies(size_t slot) {
  if (under_way.size() <= slot) under_way.resize(slot + 1);
  under_way[slot].clear();
}

void end_hopper_block() {
  if (const size_t left = under_way[size_t(running.slot)].size())
    fail("block " + place_of(current().at) + " ends while " + std::to_string(left) + " copies of boxes are under way");
}

}  // namespace cuda_emulation

extern "C" cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned,
                                                        unsigned long long, cudaDriverEntryPointQueryResult* result) {
  const bool found = !std::strcmp(symbol, "cuTensorMapEncodeTiled");
  *function = found ? reinterpret_cast<void*>(cuda_emulation::encode) : nullptr;
  if (result) *result = found ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
