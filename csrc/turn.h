// One call of an object at a time.
#pragma once

#include <c10/util/Exception.h>

#include <atomic>
#include <mutex>
#include <thread>

namespace tpkernels {

// Waits for the turns of other threads. A thread that has the turn already (Python ran in the midst of a
// call: a dispatch mode, say) would wait for itself, and is refused.
class Turn {
 public:
  class Order {
    friend class Turn;
    std::mutex mutex_;
    std::atomic<std::thread::id> holder_{};
  };

  explicit Turn(Order& order) : order_(order) {
    TORCH_CHECK(order_.holder_.load() != std::this_thread::get_id(),
                "GradientBuckets: called from within a call of their own; expected one call at a time");
    order_.mutex_.lock();
    order_.holder_ = std::this_thread::get_id();
  }
  ~Turn() {
    order_.holder_ = std::thread::id();
    order_.mutex_.unlock();
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  Order& order_;
};

}  // namespace tpkernels
