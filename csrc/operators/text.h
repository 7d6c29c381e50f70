// Error texts without iostream. A Python whose build flags link libstdc++ statically (python-build-standalone, which uv
// installs) gives the extension a second copy of the streams, and any std::ostringstream then crashes or stops before
// its first number. TORCH_CHECK and c10::str join their arguments with a stream. Use TORCHGRADX_CHECK in place of
// TORCH_CHECK, and text() in place of c10::str. setup.py keeps streams out of torch's own inline functions, and
// tests/test_packaging.py reads the symbols of what was built.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Layout.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>

#include <iterator>
#include <string>
#include <type_traits>

namespace torchgradx {
namespace joined {

inline void append(std::string& to, const char* part) {
  to += part;
}

inline void append(std::string& to, const std::string& part) {
  to += part;
}

template <class Integer, std::enable_if_t<std::is_integral_v<Integer>, bool> = true>
void append(std::string& to, Integer value) {
  to += std::to_string(value);
}

inline void append(std::string& to, c10::ArrayRef<int64_t> sizes) {
  to += '[';
  for (size_t i = 0; i < sizes.size(); ++i) to += (i ? ", " : "") + std::to_string(sizes[i]);
  to += ']';
}

inline void append(std::string& to, c10::ScalarType dtype) {
  to += c10::toString(dtype);
}

inline void append(std::string& to, const c10::Device& device) {
  to += device.str();
}

inline void append(std::string& to, c10::Layout layout) {
  constexpr const char* kNames[] = {"Strided",   "Sparse",    "SparseCsr", "Mkldnn",
                                    "SparseCsc", "SparseBsr", "SparseBsc", "Jagged"};
  static_assert(std::size(kNames) == size_t(c10::kJagged) + 1, "a name for each layout, in c10::Layout's order");
  to += size_t(layout) < std::size(kNames) ? kNames[size_t(layout)] : "unknown";
}

}  // namespace joined

// Join strings, integers, sizes, dtypes, devices and layouts, each written as torch writes it.
template <class... Parts>
std::string text(const Parts&... parts) {
  std::string whole;
  (joined::append(whole, parts), ...);
  return whole;
}

}  // namespace torchgradx

// Between the key and the fields of a refusal, as in torchgradx/refusals.py, which makes the sentence.
constexpr char kField[] = "\x1f";

// Throw c10::Error (RuntimeError in Python) with text(...) unless `condition` holds. The parts are evaluated only then.
#define TORCHGRADX_CHECK(condition, ...)                                               \
  if (C10_UNLIKELY(!(condition))) {                                                    \
    ::c10::detail::torchCheckFail(__func__, __FILE__, static_cast<uint32_t>(__LINE__), \
                                  ::torchgradx::text(__VA_ARGS__));                    \
  }
