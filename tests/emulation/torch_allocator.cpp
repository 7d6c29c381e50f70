// While an emulated operator runs, every CPU tensor that torch allocates is a buffer of the emulated device:
// registered, filled with NaN as a GPU's memory may be, and a stretch of memory that no kernel may touch after it.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <cstring>
#include <memory>
#include <utility>

extern "C" {
void cuda_emulation_register(const void* base, size_t bytes, int writable);
void cuda_emulation_forget(const void* base);
}

namespace {

constexpr size_t guard_bytes = 512;
size_t allocated_bytes = 0;

struct Allocation {
  c10::DataPtr memory;
  explicit Allocation(c10::DataPtr given) : memory(std::move(given)) {}
  ~Allocation() {
    cuda_emulation_forget(memory.get());
  }
};

class DeviceAllocator final : public c10::Allocator {
 public:
  explicit DeviceAllocator(c10::Allocator* plain) : plain_(plain) {}

  c10::DataPtr allocate(size_t bytes) override {
    if (!bytes) return plain_->allocate(bytes);
    auto owner = std::make_unique<Allocation>(plain_->allocate(bytes + guard_bytes));
    void* const base = owner->memory.get();
    std::memset(base, 0xff, bytes + guard_bytes);
    cuda_emulation_register(base, bytes, true);
    allocated_bytes += bytes;
    const auto release = [](void* context) { delete static_cast<Allocation*>(context); };
    return {base, owner.release(), release, c10::Device(c10::kCPU)};
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
