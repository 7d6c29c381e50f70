// Views without history that no operator makes: an operator's call costs more than a small layer's kernel. Writes into
// either are counted in both.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <optional>

namespace torchgradx {

// Whether nothing else than memory stands behind a tensor.
inline bool plain(const at::Tensor& t) {
  using Key = c10::DispatchKey;
  constexpr c10::DispatchKeySet kOthers({Key::Python, Key::PythonTLSSnapshot, Key::Functionalize, Key::FuncTorchBatched,
                                         Key::Batched, Key::FuncTorchGradWrapper, Key::Conjugate, Key::Negative,
                                         Key::ZeroTensor});
  return t.layout() == at::kStrided && t.has_storage() && !t.key_set().has_any(kOthers);
}

inline at::Tensor viewed(const at::Tensor& t, at::IntArrayRef sizes, at::IntArrayRef strides) {
  if (!plain(t)) return t.as_strided(sizes, strides);
  auto view =
      at::detail::make_tensor<at::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(t.storage()), t.key_set(), t.dtype());
  view.unsafeGetTensorImpl()->set_storage_offset(t.storage_offset());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  view.unsafeGetTensorImpl()->set_version_counter(t.unsafeGetTensorImpl()->version_counter());
  return view;
}

// [N, *] of a contiguous tensor, in other sizes.
inline at::Tensor viewed(const at::Tensor& t, at::IntArrayRef sizes) {
  if (t.sizes() == sizes) return t;
  if (!t.is_contiguous() || !plain(t)) return t.reshape(sizes);
  at::DimVector strides(sizes.size());
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= std::max<int64_t>(sizes[d], 1);
  }
  return viewed(t, sizes, strides);
}

// The step along the dimensions from `first` on as one, if they are that.
inline std::optional<int64_t> joint_stride(const at::Tensor& t, int64_t first) {
  std::optional<int64_t> step;
  int64_t next = 0;
  for (int64_t d = t.dim(); d-- > first;) {
    if (t.size(d) == 1) continue;
    if (t.size(d) == 0 || (step && t.stride(d) != next)) return std::nullopt;
    if (!step) step = t.stride(d);
    next = t.stride(d) * t.size(d);
  }
  return step.value_or(1);
}

}  // namespace torchgradx
