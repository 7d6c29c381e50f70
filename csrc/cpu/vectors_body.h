// Vectors, and how halves are read as float. Included by tile_body.h, under the rules of gates_body.h.

namespace torchgradx::cpu {
namespace {

template <class T, int L>
struct VectorOf {
  typedef T type __attribute__((vector_size(sizeof(T) * L)));
};
template <class T, int L>
using Vector = typename VectorOf<T, L>::type;

#define INLINE inline __attribute__((always_inline))

struct bfloat16_bits {
  uint16_t bits;
};
struct float16_bits {
  uint16_t bits;
};

template <class T, int L>
INLINE Vector<T, L> load(const T* p) {
  Vector<T, L> v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
template <class T, int L>
INLINE void store(T* p, Vector<T, L> v) {
  __builtin_memcpy(p, &v, sizeof v);
}
template <class T, int L>
INLINE Vector<uint32_t, L> load_bits(const T* p) {
  Vector<uint16_t, L> h;
  __builtin_memcpy(&h, p, sizeof h);
  return __builtin_convertvector(h, Vector<uint32_t, L>);
}
template <class T, int L>
INLINE Vector<float, L> load(const bfloat16_bits* p) {
  return (Vector<float, L>)(load_bits<bfloat16_bits, L>(p) << 16);
}
template <class T, int L>
INLINE Vector<float, L> load(const float16_bits* p) {
  // Exponent and mantissa moved to float's places are off by 2^112, subnormals too; infinities and NaN need their
  // exponent back.
  const Vector<uint32_t, L> h = load_bits<float16_bits, L>(p), shifted = (h & 0x7fffu) << 13;
  const Vector<uint32_t, L> finite = (Vector<uint32_t, L>)((Vector<float, L>)shifted * 0x1p112f);
  const Vector<uint32_t, L> special = (Vector<uint32_t, L>)(shifted >= 0x0f800000u) & 0x7f800000u;
  return (Vector<float, L>)(finite | special | (h & 0x8000u) << 16);
}
INLINE float value(float v) {
  return v;
}
INLINE double value(double v) {
  return v;
}
INLINE float value(bfloat16_bits v) {
  const uint32_t bits = uint32_t(v.bits) << 16;
  float f;
  __builtin_memcpy(&f, &bits, sizeof f);
  return f;
}
INLINE float value(float16_bits v) {
  const uint32_t shifted = (v.bits & 0x7fffu) << 13;
  float f;
  __builtin_memcpy(&f, &shifted, sizeof f);
  f *= 0x1p112f;
  uint32_t bits;
  __builtin_memcpy(&bits, &f, sizeof f);
  bits |= (shifted >= 0x0f800000u ? 0x7f800000u : 0u) | (v.bits & 0x8000u) << 16;
  __builtin_memcpy(&f, &bits, sizeof f);
  return f;
}

template <class T, int L>
INLINE T sum_lanes(Vector<T, L> v) {
  if constexpr (L == 2) {
    return v[0] + v[1];
  } else {
    Vector<T, L / 2> halves[2];
    __builtin_memcpy(halves, &v, sizeof v);
    return sum_lanes<T, L / 2>(halves[0] + halves[1]);
  }
}

}  // namespace
}  // namespace torchgradx::cpu
