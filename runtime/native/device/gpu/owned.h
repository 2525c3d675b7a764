// Owned: owner of one handle that a driver has made.
#pragma once
#include <memory>
#include <utility>

namespace llmc {

// Free is called with the machine and the handle; a default handle is none.
template <class Machine, class Handle, class Free>
class Owned {
 public:
  Owned() = default;
  Owned(std::shared_ptr<const Machine> machine, Handle handle) : machine_(std::move(machine)), handle_(handle) {}
  Owned(Owned&& other) noexcept
      : machine_(std::move(other.machine_)), handle_(std::exchange(other.handle_, Handle{})) {}
  Owned& operator=(Owned&& other) noexcept {
    std::swap(machine_, other.machine_);
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Owned() {
    if (handle_ != Handle{}) Free()(*machine_, handle_);
  }

  Handle get() const { return handle_; }

 private:
  std::shared_ptr<const Machine> machine_;
  Handle handle_ = Handle{};
};

}  // namespace llmc
