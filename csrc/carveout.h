// Processors of a GPU that collectives in flight occupy. Products launched meanwhile leave them free:
// cuBLASLt and our own kernels read torch's setting when they are launched (tpkernels/comm/carveout.py says
// why).
#pragma once

#include <ATen/Context.h>

#include <optional>

namespace tpkernels {

// While it lives, so many more are left free.
class Carveout {
 public:
  explicit Carveout(int32_t processors) : processors_(processors) { add(processors_); }
  ~Carveout() { add(-processors_); }
  Carveout(const Carveout&) = delete;
  Carveout& operator=(const Carveout&) = delete;

 private:
  static void add(int32_t processors) {
    const int32_t total = at::globalContext()._SMCarveout_EXPERIMENTAL().value_or(0) + processors;
    at::globalContext()._setSMCarveout_EXPERIMENTAL(total > 0 ? std::make_optional(total) : std::nullopt);
  }

  const int32_t processors_;
};

}  // namespace tpkernels
