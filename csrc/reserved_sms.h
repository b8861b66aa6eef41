// SMs that collectives in flight occupy. Products that are launched meanwhile leave them free: cuBLASLt and
// our own kernels read torch's setting when they are launched, cuBLAS does not (tpkernels/reserved_sms.py).
#pragma once

#include <ATen/Context.h>

#include <algorithm>
#include <mutex>
#include <optional>

namespace tpkernels {

// torch's two settings, which the user may have set, too.
struct TorchSettings {
  static std::optional<int32_t> sms() { return at::globalContext()._SMCarveout_EXPERIMENTAL(); }
  static void set_sms(std::optional<int32_t> sms) { at::globalContext()._setSMCarveout_EXPERIMENTAL(sms); }
  // torch's way through cuBLASLt may not know the limits that a user sets to sums in half precision.
  static bool can_prefer_lt() {
    constexpr auto unlimited = at::CuBLASReductionOption::AllowReducedPrecisionWithSplitK;
    const auto& context = at::globalContext();
    return at::Context::hasCuBLASLt() && context.allowFP16ReductionCuBLAS() == unlimited &&
           context.allowBF16ReductionCuBLAS() == unlimited;
  }
  static at::BlasBackend library() { return at::globalContext().blasPreferredBackend(); }
  static void set_library(at::BlasBackend library) { at::globalContext().setBlasPreferredBackend(library); }
};

// What collectives of one group reserve.
struct Reservation {
  int64_t sms = 0;          // 0: nothing
  int64_t most = 0;         // of all reservations together: products need some SMs
  bool prefers_lt = false;  // cuBLASLt leaves them free, cuBLAS does not
};

// The only writer of torch's settings in this process, for Python and for gradient buckets. `ReservedSms` in
// tpkernels/reserved_sms.py does the same where the extension is not built.
template <typename Settings>
class ReservedSms {
 public:
  static ReservedSms& of_process() {
    static ReservedSms& one = *new ReservedSms;  // never freed: a collective may end while the process exits
    return one;
  }

  void begin(const Reservation& more) { change(more, 1); }
  void end(const Reservation& less) { change(less, -1); }

 private:
  void change(const Reservation& by, int32_t sign) {
    if (by.sms <= 0) return;
    const std::lock_guard lock(mutex_);
    const std::optional<int32_t> now = Settings::sms();
    const int32_t value = now.value_or(0);
    if (added_ == 0) unset_ = now && *now == 0 ? now : std::nullopt;
    const int32_t users = value < added_ ? value : value - added_;  // smaller: the user has set it meanwhile
    reserved_ += sign * static_cast<int32_t>(by.sms);
    added_ = std::clamp(static_cast<int32_t>(by.most) - users, 0, reserved_);
    const int32_t total = users + added_;
    Settings::set_sms(total > 0 ? std::make_optional(total) : unset_);
    if (by.prefers_lt) prefer(sign);
  }

  void prefer(int32_t sign) {
    prefer_lt_ += sign;
    if (prefer_lt_ == 1 && sign > 0 && Settings::library() == at::BlasBackend::Cublas &&
        Settings::can_prefer_lt()) {
      Settings::set_library(at::BlasBackend::Cublaslt);
      switched_ = true;
    }
    if (prefer_lt_ == 0 && std::exchange(switched_, false) &&
        Settings::library() == at::BlasBackend::Cublaslt) {
      Settings::set_library(at::BlasBackend::Cublas);
    }
  }

  std::mutex mutex_;
  int32_t reserved_ = 0;          // by collectives in flight
  int32_t added_ = 0;             // of these, to what the user has set
  std::optional<int32_t> unset_;  // how the user says that none are reserved
  int32_t prefer_lt_ = 0;         // reservations that prefer cuBLASLt
  bool switched_ = false;         // from the user's cuBLAS
};

// While it lives, its SMs are reserved.
class Reserved {
 public:
  explicit Reserved(const Reservation& reservation) : reservation_(reservation) {
    ReservedSms<TorchSettings>::of_process().begin(reservation_);
  }
  ~Reserved() { ReservedSms<TorchSettings>::of_process().end(reservation_); }
  Reserved(const Reserved&) = delete;
  Reserved& operator=(const Reserved&) = delete;

 private:
  const Reservation reservation_;
};

}  // namespace tpkernels
