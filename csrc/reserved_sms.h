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

  // Returns itself.
  const Reservation& checked(const char* by) const {
    constexpr int64_t MANY = 1 << 15;  // more than a GPU has
    TORCH_CHECK_VALUE(sms >= 0 && sms <= MANY && most >= 0 && most <= MANY, by, ": expected to reserve 0 to ",
                      MANY, " SMs, of at most as many in all, got ", sms, " of ", most);
    return *this;
  }
};

// The only writer of torch's settings in this process, for Python and for gradient buckets. `ReservedSms` in
// tpkernels/reserved_sms.py does the same where the extension is not built.
class ReservedSms {
 public:
  static ReservedSms& of_process() {
    static ReservedSms& one = *new ReservedSms;  // never freed: a collective may end while the process exits
    return one;
  }

  void begin(const Reservation& more) { change(more, 1); }
  void end(const Reservation& less) { change(less, -1); }

  // Until a pause ends what the user has set is written, whatever is reserved.
  void pause(bool paused) {
    const std::lock_guard lock(mutex_);
    pauses_ = std::max(pauses_ + (paused ? 1 : -1), 0);
    write();
  }

  // So many reservations so far.
  int64_t begun() {
    const std::lock_guard lock(mutex_);
    return begun_;
  }

 private:
  void change(const Reservation& by, int32_t sign) {
    if (by.sms <= 0) return;
    const std::lock_guard lock(mutex_);
    reserved_ = std::max<int64_t>(reserved_ + sign * by.sms, 0);
    if (by.prefers_lt) prefer_lt_ = std::max(prefer_lt_ + sign, 0);
    most_ = by.most;
    if (sign > 0) ++begun_;
    write();
  }

  void write() {
    const std::optional<int32_t> now = TorchSettings::sms();
    const int32_t value = now.value_or(0);
    if (added_ == 0) unset_ = now && *now == 0 ? now : std::nullopt;
    const int32_t users = value < added_ ? value : value - added_;  // smaller: the user has set it meanwhile
    const int64_t wanted = pauses_ > 0 ? 0 : reserved_;
    added_ = static_cast<int32_t>(std::clamp<int64_t>(most_ - users, 0, wanted));
    const int32_t total = users + added_;
    TorchSettings::set_sms(total > 0 ? std::make_optional(total) : unset_);
    prefer(prefer_lt_ > 0 && pauses_ == 0);
  }

  void prefer(bool lt) {
    if (lt && !switched_ && TorchSettings::library() == at::BlasBackend::Cublas &&
        TorchSettings::can_prefer_lt()) {
      TorchSettings::set_library(at::BlasBackend::Cublaslt);
      switched_ = true;
    }
    if (!lt && std::exchange(switched_, false) && TorchSettings::library() == at::BlasBackend::Cublaslt) {
      TorchSettings::set_library(at::BlasBackend::Cublas);
    }
  }

  std::mutex mutex_;
  int64_t reserved_ = 0;  // by collectives in flight
  int64_t most_ = 0;      // of the latest reservation
  int64_t begun_ = 0;     // so many reservations
  int32_t pauses_ = 0;
  int32_t added_ = 0;             // of these, to what the user has set
  std::optional<int32_t> unset_;  // how the user says that none are reserved
  int32_t prefer_lt_ = 0;         // reservations that prefer cuBLASLt
  bool switched_ = false;         // from the user's cuBLAS
};

// While it lives, its SMs are reserved.
class Reserved {
 public:
  explicit Reserved(const Reservation& reservation) : reservation_(reservation) {
    ReservedSms::of_process().begin(reservation_);
  }
  ~Reserved() { ReservedSms::of_process().end(reservation_); }
  Reserved(const Reserved&) = delete;
  Reserved& operator=(const Reserved&) = delete;

 private:
  const Reservation reservation_;
};

}  // namespace tpkernels
