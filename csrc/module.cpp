// What Python sees through torch's dispatcher: no pybind, and no CUDA headers to build.
#include <torch/custom_class.h>
#include <torch/headeronly/version.h>
#include <torch/library.h>

#include <limits>

#include "bucket_engine.h"
#include "collectives.h"
#include "handover.h"
#include "reserved_sms.h"

// Read from the file before it is loaded, so that an extension built for another torch never runs.
extern "C" __attribute__((visibility("default"), used)) const char tpkernels_stamp[] =
    "tpkernels built with torch " TORCH_VERSION;

namespace tpkernels {
namespace {

// What Python's dtypes arrive as.
std::optional<at::ScalarType> dtype_of(const std::optional<int64_t>& number) {
  if (!number) return std::nullopt;
  TORCH_CHECK_TYPE(*number >= 0 && *number < static_cast<int64_t>(at::ScalarType::NumOptions),
                   "GradientBuckets: expected a dtype, got number ", *number);
  return static_cast<at::ScalarType>(*number);
}

c10::intrusive_ptr<BucketEngine> make_engine(
    const std::vector<at::Tensor>& parameters, const std::vector<std::string>& names,
    const c10::List<bool>& marked, std::string group, std::string tensor_parallel_group, int64_t rank,
    bool reduce_scatter, bool average, bool main_grad, bool check_nan, std::optional<int64_t> grad_dtype,
    std::optional<int64_t> wire_dtype, int64_t timeout_ms, int64_t sms, int64_t most_sms, bool prefers_lt) {
  return BucketEngine::make(
      parameters, EngineOptions{names, std::vector<bool>(marked.begin(), marked.end()), std::move(group),
                                std::move(tensor_parallel_group), rank, reduce_scatter, average, main_grad,
                                check_nan, dtype_of(grad_dtype), dtype_of(wire_dtype), timeout_ms,
                                Reservation{sms, most_sms, prefers_lt}});
}

// Of collectives that Python starts. sms: fewer if below zero
void reserve_sms(int64_t sms, int64_t most, bool prefers_lt) {
  const bool ends = sms < 0 && sms > std::numeric_limits<int64_t>::min();
  const Reservation by{ends ? -sms : sms, most, prefers_lt};
  by.checked("reserve_sms");
  auto& reserved = ReservedSms::of_process();
  ends ? reserved.end(by) : reserved.begin(by);
}

}  // namespace

TORCH_LIBRARY(tpkernels, library) {
  library.def("end_backends(__torch__.torch.classes.c10d.ProcessGroup group, float seconds) -> bool",
              &end_backends);
  library.def("reserve_sms(int sms, int most, bool prefers_lt) -> ()", &reserve_sms);
  library.def("pause_reserved_sms(bool paused) -> ()",
              [](bool paused) { ReservedSms::of_process().pause(paused); });
  library.def("sm_reservations_begun() -> int", [] { return ReservedSms::of_process().begun(); });
  library.class_<Handover>("Handover")
      .def(torch::init<std::string, std::vector<int64_t>, double>())
      .def("end", &Handover::end);
  library.class_<BucketEngine>("BucketEngine")
      .def(torch::init(&make_engine))
      .def("arrange", &BucketEngine::arrange)
      .def("meet", &BucketEngine::meet)
      .def("interrupt", &BucketEngine::interrupt)
      .def("launch_rest", &BucketEngine::launch_rest)
      .def("settle", &BucketEngine::settle)
      .def("awaited", &BucketEngine::awaited)
      .def("lose_others", &BucketEngine::lose_others)
      .def("expect", &BucketEngine::expect)
      .def("zero", &BucketEngine::zero)
      .def("finish", &BucketEngine::finish)
      .def("is_midway", &BucketEngine::is_midway)
      .def("set_synchronizing", &BucketEngine::set_synchronizing)
      .def("detach", &BucketEngine::detach)
      .def("buckets", &BucketEngine::buckets)
      .def("views", &BucketEngine::views)
      .def("arrivals", &BucketEngine::arrivals)
      .def("last_arrivals", &BucketEngine::last_arrivals)
      .def("launched_in_backward", &BucketEngine::launched_in_backward);
}

}  // namespace tpkernels
