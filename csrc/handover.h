// Ends a wait of torch's that has no limit: where ranks hand each other GPU memory, each waits for the others
// in a socket of its own, and holds Python's lock meanwhile. A rank that has died by then sends nothing.
#pragma once

#include <sys/types.h>
#include <torch/custom_class.h>

#include <atomic>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace tpkernels {

// While it lives, a thread looks after the other ranks' processes. If one ends, or time runs out, it sends
// bytes to the socket, which torch takes for a message without memory, and fails.
class Handover : public torch::CustomClassHolder {
 public:
  Handover(std::string socket, std::vector<int64_t> processes, double seconds);
  ~Handover() override { end(); }

  // Stops the thread. The place of the process that ended first; their number if it became too late; -1 if
  // neither came to pass.
  int64_t end();

 private:
  void watch();
  void wake() const;

  const pid_t process_;
  const std::string socket_;
  const int milliseconds_;
  std::vector<int> ended_;  // descriptors, readable once the process has ended; -1 where the system has none
  int stop_[2];             // a pipe, from which something can be read once `end` was called
  std::atomic<int64_t> cause_{-1};
  std::mutex ending_;
  std::thread thread_;
};

}  // namespace tpkernels
