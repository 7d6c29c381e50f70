// The PTX instructions behind ptx.h. A cp.async copies nothing before it is waited for, and its destination is poison
// until then; so a wait or barrier too few reads NaN, and says so.
#include "ptx.h"

#include "checker.h"

#include <vector>

namespace cuda_emulation {
namespace {

struct Copy {
  void* to;
  const void* from;
  size_t bytes, valid;
};

struct Copies {  // of one thread
  std::vector<Copy> open;
  std::vector<std::vector<Copy>> groups;  // committed, not waited for
};
std::vector<std::vector<Copies>> copies;  // of the blocks that run, by thread

Copies& mine() {
  return copies[size_t(running.slot)][size_t(running.thread)];
}

void perform(const Copy& c) {
  checker::check(c.to, c.bytes, true);
  std::memcpy(c.to, c.from, c.valid);
  std::memset(static_cast<char*>(c.to) + c.valid, 0, c.bytes - c.valid);
}

uint32_t word(const unsigned char* in, int lane, int index) {
  uint32_t value;
  std::memcpy(&value, in + size_t(lane) * slot + size_t(index) * 4, 4);
  return value;
}

// D of lane l: rows l / 4 and l / 4 + 8, columns 2 (l % 4) and the next.
void deal(const float (&product)[16][8], unsigned char* out) {
  for (int lane = 0; lane < 32; ++lane) {
    float d[4];
    for (int i = 0; i < 4; ++i) d[i] = product[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
    std::memcpy(out + size_t(lane) * slot, d, sizeof(d));
  }
}

template <int K>
void multiply(const float (&a)[16][K], const float (&b)[K][8], unsigned char* out) {
  float product[16][8] = {};
  for (int row = 0; row < 16; ++row)
    for (int k = 0; k < K; ++k)
      for (int column = 0; column < 8; ++column) product[row][column] += a[row][k] * b[k][column];
  deal(product, out);
}

}  // namespace

float decode_bfloat16(uint32_t bits) {
  return __uint_as_float(bits << 16);
}

float decode_float16(uint32_t bits) {
  static const std::vector<float> table = [] {
    std::vector<float> values(1 << 16);
    for (uint32_t i = 0; i < values.size(); ++i) {
      __half_raw raw;
      raw.x = static_cast<unsigned short>(i);
      values[i] = __half2float(raw);
    }
    return values;
  }();
  return table[bits & 0xffff];
}

namespace {

// Words 0..3 of a lane are its part of A, 4 and 5 its part of B.
template <float (*decode)(uint32_t)>
void multiply_halves(const unsigned char* in, unsigned char* out) {
  float a[16][16], b[16][8];
  for (int row = 0; row < 16; ++row)
    for (int k = 0; k < 16; ++k)
      a[row][k] = decode(word(in, row % 8 * 4 + k % 8 / 2, row / 8 + k / 8 * 2) >> 16 * (k % 2) & 0xffff);
  for (int k = 0; k < 16; ++k)
    for (int column = 0; column < 8; ++column)
      b[k][column] = decode(word(in, column * 4 + k % 8 / 2, 4 + k / 8) >> 16 * (k % 2) & 0xffff);
  multiply(a, b, out);
}

void multiply_tf32(const unsigned char* in, unsigned char* out) {
  float a[16][8], b[8][8];
  for (int row = 0; row < 16; ++row)
    for (int k = 0; k < 8; ++k) a[row][k] = __uint_as_float(word(in, row % 8 * 4 + k % 4, row / 8 + k / 4 * 2));
  for (int k = 0; k < 8; ++k)
    for (int column = 0; column < 8; ++column) b[k][column] = __uint_as_float(word(in, column * 4 + k % 4, 4 + k / 4));
  multiply(a, b, out);
}

void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Site site, Combine combine) {
  const uint32_t mine[6] = {a[0], a[1], a[2], a[3], b[0], b[1]};
  const unsigned char* const out = warp_exchange(mine, sizeof(mine), site, combine);
  float sums[4];
  std::memcpy(sums, out + lane() * slot, sizeof(sums));
  for (int i = 0; i < 4; ++i) d[i] += sums[i];
}

template <bool transposed>
void deal_matrices(const unsigned char* in, unsigned char* out) {
  for (int lane = 0; lane < 32; ++lane)
    for (int matrix = 0; matrix < 4; ++matrix)
      for (int half = 0; half < 2; ++half) {
        const int inner = lane % 4 * 2 + half, outer = lane / 4;
        const int row = transposed ? inner : outer, column = transposed ? outer : inner;
        std::memcpy(out + size_t(lane) * slot + size_t(matrix * 4 + half * 2),
                    in + size_t(matrix * 8 + row) * slot + size_t(column) * 2, 2);
      }
}

}  // namespace

void copy_async(void* shared, const void* global, size_t bytes, int valid_bytes) {
  if (valid_bytes < 0 || size_t(valid_bytes) > bytes) report("cp.async: %d valid bytes of %zu", valid_bytes, bytes);
  if (uintptr_t(shared) % bytes || uintptr_t(global) % bytes)
    report("misaligned cp.async of %zu bytes from %p to %p", bytes, global, shared);
  if (!checker::is_shared(shared)) report("cp.async: the destination %p is not shared memory", shared);
  if (checker::is_shared(global)) report("cp.async: the source %p is shared memory", global);
  checker::check(global, size_t(valid_bytes), false);
  checker::check(shared, bytes, true);  // the hardware may write from here on
  checker::poison_shared(shared, bytes);
  mine().open.push_back({shared, global, bytes, size_t(valid_bytes)});
}

void cp_async_commit() {
  mine().groups.push_back(std::move(mine().open));
  mine().open.clear();
}

void copy_async_wait(size_t left) {
  auto& groups = mine().groups;
  while (groups.size() > left) {
    for (const Copy& c : groups.front()) perform(c);
    groups.erase(groups.begin());
  }
}

void require_no_copies_left() {
  size_t left = mine().open.size();
  for (const auto& group : mine().groups) left += group.size();
  if (left) report("the thread ended with %zu asynchronous copies it never waited for", left);
}

void forget_copies(size_t slot, size_t threads) {
  if (copies.size() <= slot) copies.resize(slot + 1);
  copies[slot].assign(threads, {});
}

void load_matrices(uint32_t (&r)[4], const void* row, bool transposed, Site site) {
  if (uintptr_t(row) % 16) report("misaligned ldmatrix row at %p", row);
  if (!checker::is_shared(row)) report("ldmatrix: the row at %p is not shared memory", row);
  checker::check(row, 16, false);
  const unsigned char* const out =
      warp_exchange(row, 16, site, transposed ? deal_matrices<true> : deal_matrices<false>);
  std::memcpy(r, out + lane() * slot, sizeof(r));
}

void mma_bfloat16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Site site) {
  mma(d, a, b, site, multiply_halves<decode_bfloat16>);
}

void mma_float16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Site site) {
  mma(d, a, b, site, multiply_halves<decode_float16>);
}

void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Site site) {
  for (const uint32_t bits : {a[0], a[1], a[2], a[3], b[0], b[1]})
    if (bits & 0x1fffu && (bits & 0x7f800000u) != 0x7f800000u)
      report("mma of tf32: %a did not go through to_tf32", double(__uint_as_float(bits)));
  mma(d, a, b, site, multiply_tf32);
}

}  // namespace cuda_emulation
