// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "copy_queue.h"

namespace tiledattn::cuda {

/// A stream of copies to this device, which is current.
std::unique_ptr<CopyQueue> make_copy_queue(int device);

}  // namespace tiledattn::cuda
