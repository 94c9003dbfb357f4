// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "backend.h"
#include "copy_queue.h"

namespace tiledattn {

namespace {

class HostCopyQueue final : public CopyQueue {
 public:
  const Stream& stream() const override { return stream_; }
  bool immediate() const override { return true; }
  std::unique_ptr<StreamEvent> make_event(bool) const override {
    return std::make_unique<StreamEvent>();
  }
  void record(StreamEvent&, const Stream&) const override {}
  void order(const Stream&, const StreamEvent&) const override {}
  bool passed(const StreamEvent&) const override { return true; }
  void wait(const StreamEvent&) const override {}
  double seconds(const StreamEvent&, const StreamEvent&) const override { return 0; }

  void copy(const std::vector<CopyPiece>& pieces) const override {
    for (const CopyPiece& piece : pieces)
      std::memcpy(piece.to, piece.from, static_cast<std::size_t>(piece.bytes));
  }
  void write(void* to, const void* from, std::int64_t bytes, const Stream&) const override {
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
  }
  void poison(void* data, std::int64_t bytes) const override {
    std::memset(data, 0xff, static_cast<std::size_t>(bytes));
  }
  std::shared_ptr<void> allocate_host(std::int64_t bytes) const override {
    return cpu_backend().allocate(0, bytes);
  }

 private:
  Stream stream_;
};

}  // namespace

std::unique_ptr<CopyQueue> make_host_copy_queue() { return std::make_unique<HostCopyQueue>(); }

}  // namespace tiledattn
