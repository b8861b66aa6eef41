// How a rank that sleeps is woken by other processes of its machine: two words of memory that all of them
// see.
#pragma once

#include <time.h>

#include <climits>
#include <cstdint>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace tpkernels {

class Doorbell {
 public:
  static constexpr int64_t WORDS = 2;

  explicit Doorbell(int64_t* words)
      : rung_(reinterpret_cast<uint32_t*>(words)), asleep_(reinterpret_cast<uint32_t*>(words + 1)) {}

  // After what the sleeper waits for has been written.
  void ring() const {
    __atomic_add_fetch(rung_, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(asleep_, __ATOMIC_SEQ_CST)) wake();
  }

  // To be read before a look at what is waited for.
  uint32_t times_rung() const { return __atomic_load_n(rung_, __ATOMIC_SEQ_CST); }

  // Until it has rung more often than `seen`, or so many nanoseconds have gone.
  void sleep(uint32_t seen, int64_t nanoseconds) const {
    const timespec longest{nanoseconds / 1'000'000'000, nanoseconds % 1'000'000'000};
    __atomic_store_n(asleep_, 1, __ATOMIC_SEQ_CST);
    wait(seen, longest);  // not at all if it has rung meanwhile
    __atomic_store_n(asleep_, 0, __ATOMIC_SEQ_CST);
  }

 private:
#ifdef __linux__
  void wake() const { syscall(SYS_futex, rung_, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }
  void wait(uint32_t seen, const timespec& longest) const {
    syscall(SYS_futex, rung_, FUTEX_WAIT, seen, &longest, nullptr, 0);
  }
#else  // where ranks share no memory yet
  void wake() const {}
  void wait(uint32_t, const timespec&) const {
    const timespec moment{0, 50'000};
    nanosleep(&moment, nullptr);
  }
#endif

  uint32_t* rung_;
  uint32_t* asleep_;
};

}  // namespace tpkernels
