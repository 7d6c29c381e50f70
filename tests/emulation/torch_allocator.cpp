// While an emulated operator runs, every CPU tensor that torch allocates is a buffer of the emulated device:
// registered, filled with NaN as a GPU's memory may be, and a stretch of memory that no kernel may touch after it.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <cstring>
#include <unordered_map>
#include <utility>

extern "C" {
void cuda_emulation_register(const void* base, size_t bytes, int writable);
void cuda_emulation_forget(const void* base);
}

namespace {

constexpr size_t guard_bytes = 512;
size_t allocated_bytes = 0;

// What is allocated by its address, which is its own context, as libraries that ask for raw memory expect.
std::unordered_map<void*, c10::DataPtr>& allocations() {
  static std::unordered_map<void*, c10::DataPtr> all;
  return all;
}

void release(void* base) {
  cuda_emulation_forget(base);
  allocations().erase(base);
}

class DeviceAllocator final : public c10::Allocator {
 public:
  explicit DeviceAllocator(c10::Allocator* plain) : plain_(plain) {}

  c10::DataPtr allocate(size_t bytes) override {
    if (!bytes) return plain_->allocate(bytes);
    c10::DataPtr owner = plain_->allocate(bytes + guard_bytes);
    void* const base = owner.get();
    std::memset(base, 0xff, bytes + guard_bytes);
    cuda_emulation_register(base, bytes, true);
    allocated_bytes += bytes;
    allocations()[base] = std::move(owner);
    return {base, base, release, c10::Device(c10::kCPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return release;
  }

  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  c10::Allocator* plain_;
};

}  // namespace

extern "C" {
void cuda_emulation_record(int on) {
  static c10::Allocator* const plain = c10::GetCPUAllocator();
  static DeviceAllocator device(plain);
  c10::SetCPUAllocator(on ? &device : plain, 100);
  if (on) allocated_bytes = 0;
}
size_t cuda_emulation_allocated() {  // since recording began
  return allocated_bytes;
}
}
