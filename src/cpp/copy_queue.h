// SPDX-License-Identifier: Apache-2.0
// Copies into scratch memory beside the kernels that read it, and the events that order the two.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "tiledattn/tensor.h"

namespace tiledattn {

/// A point in the work of a stream. Passed until it is recorded for the first time.
class StreamEvent {
 public:
  virtual ~StreamEvent() = default;
};

/// What the bytes to be copied lie in.
enum class CopyFrom {
  pageable,  ///< host memory that the copies need the CPU's help for
  pinned,    ///< host memory that the device reads by itself
  device,    ///< of this or of another device, which only the driver may be able to read
};

/// One run of bytes.
struct CopyPiece {
  void* to = nullptr;
  const void* from = nullptr;
  std::int64_t bytes = 0;
  CopyFrom from_memory = CopyFrom::pageable;
};

/// A stream of its own for copies to one device. Nothing but wait() and the destructor waits. On
/// the CPU every function works at once, and events have always passed.
class CopyQueue {
 public:
  /// Waits for what is on the queue.
  virtual ~CopyQueue() = default;

  virtual const Stream& stream() const = 0;
  /// Does it copy at once? Then nothing need be copied that can be put in its place right away.
  virtual bool immediate() const = 0;
  /// `timed`: seconds() can be asked for it. To record such an event holds up the copies behind it.
  virtual std::unique_ptr<StreamEvent> make_event(bool timed) const = 0;
  virtual void record(StreamEvent& event, const Stream& stream) const = 0;
  /// Work put on `waiting` from now on starts after the event.
  virtual void order(const Stream& waiting, const StreamEvent& event) const = 0;
  virtual bool passed(const StreamEvent& event) const = 0;
  virtual void wait(const StreamEvent& event) const = 0;
  /// Between two timed events that have passed.
  virtual double seconds(const StreamEvent& from, const StreamEvent& to) const = 0;

  /// Pieces do not overlap; in which order they are copied is open.
  virtual void copy(const std::vector<CopyPiece>& pieces) const = 0;
  /// Put some KiB in their place, on a stream of the caller's choice. They are read before the call
  /// returns; addresses and bytes are multiples of 8.
  virtual void write(void* to, const void* from, std::int64_t bytes,
                     const Stream& stream) const = 0;
  /// Set every bit: NaN in each of the types that attention takes.
  virtual void poison(void* data, std::int64_t bytes) const = 0;
  /// Host memory that copies can read without the CPU's help.
  virtual std::shared_ptr<void> allocate_host(std::int64_t bytes) const = 0;
};

/// The queue of the CPU.
std::unique_ptr<CopyQueue> make_host_copy_queue();

}  // namespace tiledattn
