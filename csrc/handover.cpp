#include "handover.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/syscall.h>
#endif

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <utility>

namespace tpkernels {
namespace {

constexpr int AGAIN_MS = 100;        // torch may wait once for each of the other ranks
constexpr double LONGEST_S = 2.0e6;  // poll counts milliseconds in an int
constexpr size_t MOST_PROCESSES = 4096;

int milliseconds(double seconds) {
  TORCH_CHECK_VALUE(seconds >= 0, "Handover: expected seconds of 0 or more, got ", seconds);
  return static_cast<int>(1000 * std::min(seconds, LONGEST_S));
}

int descriptor_of(int64_t process) {
#ifdef SYS_pidfd_open
  return static_cast<int>(syscall(SYS_pidfd_open, static_cast<pid_t>(process), 0));
#else
  errno = 0;
  return -1;  // the limit of time is left
#endif
}

}  // namespace

Handover::Handover(std::string socket, std::vector<int64_t> processes, double seconds)
    : process_(getpid()), socket_(std::move(socket)), milliseconds_(milliseconds(seconds)) {
  TORCH_CHECK_VALUE(socket_.size() < sizeof(sockaddr_un::sun_path), "Handover: expected a socket's name of ",
                    sizeof(sockaddr_un::sun_path) - 1, " bytes at most, got ", socket_.size());
  TORCH_CHECK_VALUE(processes.size() <= MOST_PROCESSES, "Handover: expected at most ", MOST_PROCESSES,
                    " processes, got ", processes.size());
  for (const int64_t process : processes)
    TORCH_CHECK_VALUE(process > 0 && process <= INT_MAX, "Handover: expected numbers of processes, got ",
                      process);
  TORCH_CHECK(pipe(stop_) == 0, "Handover: the system has no pipe left: ", std::strerror(errno));
  for (const int descriptor : stop_) fcntl(descriptor, F_SETFD, FD_CLOEXEC);
  for (size_t i = 0; i < processes.size(); ++i) {
    ended_.push_back(descriptor_of(processes[i]));
    if (ended_.back() < 0 && errno == ESRCH) cause_ = static_cast<int64_t>(i);  // gone already
  }
  thread_ = std::thread([this] { watch(); });
}

int64_t Handover::end() {
  const std::lock_guard<std::mutex> lock(ending_);
  if (thread_.joinable() && getpid() != process_) thread_.detach();  // a fork has no threads
  if (thread_.joinable()) {
    (void)!write(stop_[1], "", 1);  // a fork may hold that end, too
    thread_.join();
    for (const int descriptor : stop_) close(descriptor);
    for (const int descriptor : ended_)
      if (descriptor >= 0) close(descriptor);
  }
  return cause_;
}

void Handover::watch() {
  std::vector<pollfd> awaited{{stop_[0], POLLIN, 0}};
  for (const int descriptor : ended_) awaited.push_back({descriptor, POLLIN, 0});  // below zero: ignored
  if (cause_ < 0) {
    int ready;
    do ready = poll(awaited.data(), awaited.size(), milliseconds_);
    while (ready < 0 && errno == EINTR);
    if (awaited[0].revents) return;
    size_t first = 0;
    while (first < ended_.size() && !awaited[first + 1].revents) ++first;
    cause_ = static_cast<int64_t>(first);
  }
  do wake();
  while (poll(awaited.data(), 1, AGAIN_MS) <= 0);
}

void Handover::wake() const {
  const int from = socket(AF_UNIX, SOCK_DGRAM, 0);
  if (from < 0) return;
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, socket_.data(), socket_.size());
  // not there, or full: torch does not wait
  sendto(from, "", 1, MSG_DONTWAIT, reinterpret_cast<const sockaddr*>(&address), sizeof address);
  close(from);
}

}  // namespace tpkernels
