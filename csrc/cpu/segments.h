// One sample's positions in the order of their ids: equal ids are a segment, whose rows belong to one row of the table.
// A radix sort by the bytes of the largest id: linear in T whatever the ids, and stable, so that sums have one order;
// of a few, by insertion.
#pragma once

#include "../operators/ops.h"
#include "../operators/text.h"

#include <array>
#include <utility>
#include <vector>

namespace torchgradx::cpu {

class Segments {
 public:
  struct Entry {
    int64_t id, position;
  };

  // of indices [N, T], int32 or int64; V: how many ids there are, if that is known
  void sort(const Tensor& indices, int64_t n, std::optional<int64_t> padding_idx, std::optional<int64_t> V = {}) {
    if (indices.scalar_type() == at::kInt)
      read(indices.const_data_ptr<int32_t>(), indices, n, padding_idx, V);
    else
      read(indices.const_data_ptr<int64_t>(), indices, n, padding_idx, V);
    if (entries_.size() <= 16) {
      insert();
    } else {
      sorted_.resize(entries_.size());
      for (int shift = 0; shift < 64 && largest_ >> shift; shift += 8) by_byte(shift);
    }
    begins_.clear();
    for (size_t k = 0; k < entries_.size(); ++k)
      if (k == 0 || entries_[k].id != entries_[k - 1].id) begins_.push_back(int64_t(k));
    begins_.push_back(int64_t(entries_.size()));
  }

  int64_t count() const {
    return int64_t(begins_.size()) - 1;
  }
  int64_t id(int64_t segment) const {
    return entries_[begins_[segment]].id;
  }
  int64_t size(int64_t segment) const {
    return begins_[segment + 1] - begins_[segment];
  }
  int64_t position(int64_t segment, int64_t k) const {
    return entries_[begins_[segment] + k].position;
  }

 private:
  template <class id_t>
  void read(const id_t* ids, const Tensor& indices, int64_t n, std::optional<int64_t> padding_idx,
            std::optional<int64_t> V) {
    entries_.clear(), largest_ = 0;
    ids += n * indices.stride(0);
    for (int64_t t = 0; t < indices.size(1); ++t) {
      const int64_t id = ids[t * indices.stride(1)];
      if (id < 0 || (V && id >= *V))
        C10_THROW_ERROR(IndexError, text("indices must be from 0 ", V ? text("to ", *V - 1) : "on", "; got ", id,
                                         " in sample ", n, ", position ", t));
      if (padding_idx && id == *padding_idx) continue;
      entries_.push_back({id, t});
      largest_ |= uint64_t(id);
    }
  }

  void insert() {  // of a few: counting bytes would take longer
    for (size_t k = 1; k < entries_.size(); ++k) {
      const Entry entry = entries_[k];
      size_t at = k;
      for (; at > 0 && entries_[at - 1].id > entry.id; --at) entries_[at] = entries_[at - 1];
      entries_[at] = entry;
    }
  }

  void by_byte(int shift) {
    std::array<int64_t, 257> begin{};
    const auto byte = [&](const Entry& e) { return uint64_t(e.id) >> shift & 255; };
    for (const Entry& e : entries_) ++begin[byte(e) + 1];
    for (size_t b = 1; b < 256; ++b) begin[b] += begin[b - 1];
    for (const Entry& e : entries_) sorted_[begin[byte(e)]++] = e;
    std::swap(entries_, sorted_);
  }

  std::vector<Entry> entries_, sorted_;
  std::vector<int64_t> begins_;  // of segments, and the end of the last
  uint64_t largest_ = 0;         // its bytes: the ids' bits together
};

}  // namespace torchgradx::cpu
