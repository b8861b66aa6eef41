// A stream beside the one that computes. Devices without streams do everything at once, in order.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <optional>
#include <vector>

namespace tpkernels {

class SideStream {
 public:
  explicit SideStream(c10::Device device) {
    if (device.is_cpu()) return;
    device_.emplace(device);
    stream_.emplace(
        c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, /*isHighPriority=*/true));
  }

  // Adds the stream that is current in this thread to `streams`, once.
  void note_current(std::vector<c10::Stream>& streams) const {
    if (!stream_) return;
    const c10::Stream current = c10::impl::VirtualGuardImpl(device_->type()).getStream(*device_);
    for (const c10::Stream& known : streams) {
      if (known == current) return;
    }
    streams.push_back(current);
  }

  // What is enqueued here from now on waits for what is in `streams` so far. The host does not wait.
  void wait_for(const std::vector<c10::Stream>& streams) const {
    for (const c10::Stream& stream : streams) order(stream, *stream_);
  }

  // The reverse: the current stream waits for what is enqueued here so far.
  void let_current_wait() const {
    if (!stream_) return;
    order(*stream_, c10::impl::VirtualGuardImpl(device_->type()).getStream(*device_));
  }

  // Makes this stream the current one while `guard` lives.
  void enter(c10::OptionalStreamGuard& guard) const {
    if (stream_) guard.reset_stream(*stream_);
  }

 private:
  static void order(const c10::Stream& first, const c10::Stream& second) {
    c10::Event event(first.device_type());
    event.record(first);
    event.block(second);
  }

  std::optional<c10::Device> device_;
  std::optional<c10::Stream> stream_;
};

}  // namespace tpkernels
