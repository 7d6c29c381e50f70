// Images from planes to channels last and back, by a copy that reads and writes side by side: the framework's own of a
// GPU has one side a sector a number.
#pragma once

#include "ops.h"
#include "views.h"

namespace torchgradx {

// True if turn.cu copies a t [N, R, C]: rows side by side, of 2, 4 or 8 bytes an element.
inline bool turns(const Tensor& t) {
  const auto bytes = t.element_size();
  return (bytes == 2 || bytes == 4 || bytes == 8) && plain(t) && t.stride(1) == 1 && t.size(1) > 1 && t.size(2) > 1 &&
         t.stride(2) >= t.size(1);
}

// t.contiguous(format), by turned(x) -> x as a contiguous [N, R, C] where that serves.
template <class Turned>
Tensor in_format(const Tensor& t, at::MemoryFormat format, const Turned& turned) {
  const bool last = format == at::MemoryFormat::ChannelsLast;
  const auto other = last ? at::MemoryFormat::Contiguous : at::MemoryFormat::ChannelsLast;
  if (t.dim() != 4 || t.is_contiguous(format) || !t.is_contiguous(other) || !plain(t)) return t.contiguous(format);
  const int64_t n = t.size(0), c = t.size(1), w = t.size(3), pixels = t.size(2) * w, image = c * pixels;
  const Tensor rows = last ? viewed(t, {n, pixels, c}, {image, 1, pixels}) : viewed(t, {n, c, pixels}, {image, 1, c});
  if (!turns(rows)) return t.contiguous(format);
  const Tensor made = turned(rows);
  return last ? viewed(made, t.sizes(), {image, 1, w * c, c}) : viewed(made, t.sizes());
}

}  // namespace torchgradx
